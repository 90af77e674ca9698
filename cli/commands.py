"""Helpers of all commands: their parsers, exit statuses and output.

Exit statuses:

- 0: success
- 1: the answer is no (damage found, no checkpoint there)
- 2: failure, or a wrong call; one message on stderr gives the reason and the remedy
- 3: a bug of ours, with a traceback
- 130: interrupted
- 141: the reader of the output has gone
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, TypeAlias

from ..errors import HoldfastError, UsageError
from .manual import MANUAL, HelpFormatter, closing_words
from .text import printable

__all__ = ["Parsers", "add_command", "complain", "ended", "print_json", "write_text"]

Parsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""Registry of subcommands."""


def add_command(
    commands: Parsers,
    name: str,
    summary: str,
    more: str = "",
    *,
    runs: str = "",
    needs: Sequence[str] = (),
) -> argparse.ArgumentParser:
    """Add a command, whose arguments become the keywords of a function.

    ``name`` starts with that of its group, if any. ``runs`` names the function and its module below
    this package, by default ``NAME:run``. ``needs`` are packages that it cannot do without.
    """

    def call(**arguments: Any) -> int:
        from importlib.util import find_spec

        if not all(map(find_spec, needs)):
            complain(f"the demo needs {' and '.join(needs)}: pip install {' '.join(needs)}")
            return 2
        module, _, function = (runs or f"{name}:run").partition(":")
        status: int = getattr(import_module(f".{module}", __package__), function)(**arguments)
        return status

    parser = commands.add_parser(
        name.rpartition(" ")[2],
        help=summary,
        description=f"{summary}. {more}".strip(),
        epilog=closing_words(MANUAL[name]),
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=call)
    return parser


def ended(command: Callable[[], int]) -> int:
    """Run ``command`` and return its exit status. Errors of our own tree become a message, not a
    traceback."""
    try:
        status = command()
        sys.stdout.flush()
    except HoldfastError as error:
        complain(str(error))
        return 2
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # the interpreter flushes stdout at exit
        return 141
    except KeyboardInterrupt:
        complain("interrupted")
        return 130
    return status


def complain(message: str) -> None:
    """Print one message on stderr."""
    print("holdfast: " + "\n".join(map(printable, message.splitlines())), file=sys.stderr)


def write_text(path: str, text: str) -> None:
    """Write a file that the user has named. Raises UsageError if that fails."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def print_json(document: Any) -> None:
    """Print one JSON document on stdout, on one line."""
    import json

    print(json.dumps(document, separators=(",", ":")))
