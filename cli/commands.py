"""Declarations of commands, and their exit statuses and output.

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from ..errors import HoldfastError, UsageError
from .text import printable

T = TypeVar("T")


class Argument(NamedTuple):
    """The names of an argument, and keywords of ``ArgumentParser.add_argument``."""

    names: tuple[str, ...]
    how: Mapping[str, Any]


def argument(name: str, value: str | None, help: str, *, short: str = "", **how: Any) -> Argument:
    """Return an argument. ``value`` is the name of its value; an option without one is a flag. A
    value has the type of a numeric default, unless ``type`` is given."""
    names = (short, name) if short else (name,)
    if value is not None:
        how["metavar"] = value
        if isinstance(how.get("default"), int | float):
            how.setdefault("type", type(how["default"]))
    elif not how:
        how["action"] = "store_true"
    return Argument(names, {"help": help, **how})


JSON = argument(
    "--json", None, "print one JSON document instead", dest="json_output", action="store_true"
)


ONLY = argument(
    "--only",
    "NAME",
    "take only this item and those below it, such as model; may be given several times",
    action="append",
    default=[],
)
RENAME = argument(
    "--rename",
    "OLD=NEW",
    "rename tensors, such as 'model.*=*'; the first matching rule applies",
    action="append",
    default=[],
)


@dataclass(frozen=True)
class Command:
    """A command, whose arguments become the keywords of a function.

    ``name`` starts with its group's name, if any. ``more`` follows the ``summary`` in its help.
    ``runs`` names the function and its module below this package, by default ``NAME:run``.
    ``needs`` are packages that it cannot do without. ``examples`` map command lines to their
    purposes, and ``statuses`` the exit statuses 0 and 1 to their meanings.
    """

    name: str
    summary: str
    examples: Mapping[str, str]
    statuses: Mapping[int, str]
    more: str = ""
    runs: str = ""
    needs: tuple[str, ...] = ()
    arguments: tuple[Argument, ...] = ()
    groups: Mapping[str, tuple[Argument, ...]] = field(default_factory=dict)


def count(text: str) -> int:
    """Parse a whole number of 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def counts(text: str) -> list[int]:
    """Parse whole numbers, separated by commas."""
    return [count(each.strip()) for each in text.split(",")]


def size(text: str) -> int:
    """Parse a size in bytes."""
    from ..core.units import parse_size

    return _parsed(text, parse_size)


def sizes(text: str) -> list[int]:
    """Parse sizes in bytes, separated by commas."""
    return [size(each) for each in text.split(",")]


def duration(text: str) -> float:
    """Parse a duration with a unit, in seconds."""
    from ..core.units import parse_duration

    return _parsed(text, partial(parse_duration, needs_unit=True))


def share(text: str) -> float:
    """Parse a share below 1, such as ``0.05`` or ``5%``."""
    part = _parsed(text.removesuffix("%"), float) / (100 if text.endswith("%") else 1)
    if not 0 <= part < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share")
    return part


def _parsed(text: str, parse: Callable[[str], T]) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


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
