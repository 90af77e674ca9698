"""Helpers of all commands: exit statuses and output.

Exit statuses:

- 0: success
- 1: the answer is no (damage found, no checkpoint there)
- 2: failure, or a wrong call; one message on stderr gives the reason and the remedy
- 3: a bug of ours, with a traceback
- 130: interrupted
- 141: the reader of the output has gone
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from ..errors import HoldfastError, UsageError
from .text import printable

__all__ = ["complain", "ended", "print_json", "write_text"]


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
