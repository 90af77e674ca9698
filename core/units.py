"""Parses and formats sizes and durations; rounds up; groups items by size."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


T = TypeVar("T")
IntOrArray = TypeVar("IntOrArray", int, "npt.NDArray[np.int64]")
"""One number, or a column of them."""

MIB = 1 << 20
GIB = 1 << 30

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_SIZE = re.compile(r"(\d+)\s*(?:([kmgt]?)(i?)b?)?", re.IGNORECASE | re.ASCII)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.ASCII)
_SECONDS = {"ms": 0.001, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def ceil_div(value: IntOrArray, divisor: IntOrArray | int) -> IntOrArray:
    """Return ``value / divisor`` rounded up: the number of groups of ``divisor`` for ``value``
    items."""
    return -(-value // divisor)


def round_up(value: IntOrArray, multiple: IntOrArray | int) -> IntOrArray:
    """Return the smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def parse_size(text: str) -> int:
    """Return the bytes of a size such as ``32MiB``, ``500 MB``, ``4k`` or ``4096``. Raises
    ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size")
    prefix = (match[2] or "").lower()
    is_binary = bool(match[3])
    if is_binary and not prefix:
        raise ValueError(f"{text!r} is not a size")
    base = 1024 if is_binary else 1000
    nbytes: int = int(match[1]) * base ** _POWERS[prefix]
    return nbytes


def exact_size_text(nbytes: int) -> str:
    """Return a text that :func:`parse_size` reads as exactly ``nbytes``: ``32MiB``, ``4097B``."""
    power = 0
    while nbytes and nbytes % 1024 == 0 and power < 4:
        nbytes //= 1024
        power += 1
    return f"{nbytes}{_UNITS[power]}"


def size_text(nbytes: int) -> str:
    """Return three digits and a unit, for people: ``512 B``, ``1.21 GiB``, ``62.5 KiB``."""
    size = float(nbytes)
    power = 0
    while size >= 999.5 and power + 1 < len(_UNITS):
        size /= 1024
        power += 1
    if power == 0 or size >= 99.95:
        return f"{size:.0f} {_UNITS[power]}"
    if size >= 9.995:
        return f"{size:.1f} {_UNITS[power]}"
    return f"{size:.2f} {_UNITS[power]}"


def parse_duration(text: str, *, needs_unit: bool = False) -> float:
    """Return the seconds of a duration such as ``90s``, ``500ms``, ``2min``, ``1.5h`` or ``30``.

    Raises ValueError, with ``needs_unit`` also for a number without a unit.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a duration")
    unit = match[2]
    if not unit and not needs_unit:
        unit = "s"
    if unit not in _SECONDS:
        raise ValueError(f"{text!r} is not a duration")
    return float(match[1]) * _SECONDS[unit]


def duration_text(seconds: float) -> str:
    """Return a text that :func:`parse_duration` reads as ``seconds``: ``1.5s``."""
    return f"{seconds:g}s"


def in_groups(
    items: Iterable[T], nbytes_of: Callable[[T], int], nbytes_max: int
) -> Iterator[list[T]]:
    """Yield the items in order, in groups of at most ``nbytes_max`` bytes; a larger item is
    alone."""
    group: list[T] = []
    nbytes = 0
    for item in items:
        size = nbytes_of(item)
        if group and nbytes + size > nbytes_max:
            yield group
            group = []
            nbytes = 0
        group.append(item)
        nbytes += size
    if group:
        yield group
