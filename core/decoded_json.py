"""Decoded JSON, and checks that narrow it to the types a reader expects.

Data from a storage or from another rank may be anything. Each function returns its argument if it
has the expected type. Otherwise it raises ValueError, which calls the value ``what``. A bool is not
an int here, and neither is a float.
"""

from __future__ import annotations

import json
import reprlib
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


def object_from(text: bytes | str) -> dict[str, Json]:
    """Parse an object. Raises ValueError for anything else, and for a repeated key."""
    try:
        value = json.loads(text, object_pairs_hook=_without_repeats)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return object_in(value, "it")


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it repeats a name")
    return found


def int_in(value: Json, what: str) -> int:
    """Return ``value`` if it is an integer."""
    if type(value) is not int:
        raise _unexpected(value, what, "an integer")
    return value


def number_in(value: Json, what: str) -> float:
    """Return ``value`` as a float if it is an integer or a float."""
    if type(value) is not int and type(value) is not float:
        raise _unexpected(value, what, "a number")
    return float(value)


def str_in(value: Json, what: str) -> str:
    """Return ``value`` if it is a string."""
    if type(value) is not str:
        raise _unexpected(value, what, "a string")
    return value


def list_in(value: Json, what: str) -> list[Json]:
    """Return ``value`` if it is a list of anything."""
    if type(value) is not list:
        raise _unexpected(value, what, "a list")
    return value


def object_in(value: Json, what: str) -> dict[str, Json]:
    """Return ``value`` if it is an object with any contents."""
    if type(value) is not dict:
        raise _unexpected(value, what, "an object")
    return value


def ints_in(value: Json, what: str) -> list[int]:
    """Return ``value`` if it is a list of integers."""
    ints = [item for item in list_in(value, what) if type(item) is int]
    return _whole(ints, value, what, "a list of integers")


def strs_in(value: Json, what: str) -> list[str]:
    """Return ``value`` if it is a list of strings."""
    texts = [item for item in list_in(value, what) if type(item) is str]
    return _whole(texts, value, what, "a list of strings")


def rows_in(value: Json, length: int, what: str) -> list[list[Json]]:
    """Return ``value`` if it is a list of lists of ``length`` items."""
    rows = [item for item in list_in(value, what) if type(item) is list and len(item) == length]
    return _whole(rows, value, what, f"a list of lists of {length}")


def _whole(found: list[T], value: Json, what: str, expected: str) -> list[T]:
    """Return the items found, if they are all items of ``value``."""
    if len(found) < len(list_in(value, what)):
        raise _unexpected(value, what, expected)
    return found


def _unexpected(value: Json, what: str, expected: str) -> ValueError:
    return ValueError(f"{what} is {reprlib.repr(value)}, not {expected}")
