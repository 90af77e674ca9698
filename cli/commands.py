"""What all commands have in common: how they end.

0: well. 1: what was asked for is not so (damage found, no checkpoint there). 2: it could not be done, or the call was
wrong; one message on stderr says why, and what to do. 3: a fault of ours, with a traceback. 130: interrupted. 141: nobody
reads the output any more.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from ..errors import HoldfastError
from .text import printable

__all__ = ["Commands", "complain", "print_json"]


class Commands(TyperGroup):
    """The commands. Each returns its exit status; what it raises of our error tree becomes a message, not a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for, and exit."""
        try:
            status = super().invoke(ctx)
            sys.stdout.flush()
        except HoldfastError as error:
            complain(str(error))
            status = 2
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more
            status = 141
        raise typer.Exit(status or 0)


def complain(message: str) -> None:
    """One message on stderr."""
    typer.echo("holdfast: " + "\n".join(map(printable, message.splitlines())), err=True)


def print_json(document: Any) -> None:
    """One JSON document on stdout, on one line."""
    import json

    typer.echo(json.dumps(document, separators=(",", ":")))
