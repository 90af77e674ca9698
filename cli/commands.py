"""What all commands have in common: how they end.

0: well. 1: what was asked for is not so (damage found, no checkpoint there). 2: it could not be
done, or the call was wrong; one message on stderr says why, and what to do. 3: a fault of ours,
with a traceback. 130: interrupted. 141: the reader of the output has gone.
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
    """Run ``command``; return its exit status. What it raises of our error tree becomes a message,
    not a traceback."""
    try:
        status = command()
        sys.stdout.flush()
    except HoldfastError as error:
        complain(str(error))
        return 2
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # the interpreter flushes once more
        return 141
    except KeyboardInterrupt:
        complain("interrupted")
        return 130
    return status


def complain(message: str) -> None:
    """One message on stderr."""
    print("holdfast: " + "\n".join(map(printable, message.splitlines())), file=sys.stderr)


def write_text(path: str, text: str) -> None:
    """Write a file that the user has named. Raises UsageError where that cannot be."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def print_json(document: Any) -> None:
    """One JSON document on stdout, on one line."""
    import json

    print(json.dumps(document, separators=(",", ":")))
