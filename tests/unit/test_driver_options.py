"""Test the parsers of options, and the tracking of written ranges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.drivers.options import Option, duration, integer, or_off, size, switch, url
from holdfast.drivers.ranges import Ranges
from holdfast.errors import StorageError

SIZE = size(1, 1 << 40)
DURATION = duration(0.001, 7200)


@pytest.mark.parametrize(
    ("parse", "value", "text"),
    [(SIZE, 32 << 20, "32MiB"), (SIZE, 5 << 30, "5GiB"), (SIZE, 1 << 40, "1TiB"), (SIZE, 4097, "4097B"), (SIZE, 3 << 10, "3KiB"),
     (DURATION, 60.0, "60s"), (DURATION, 0.5, "0.5s"), (or_off(SIZE), 500_000_000, "500000000B"), (or_off(DURATION), 120.0, "120s"),
     (switch, True, "on"), (switch, False, "off"), (integer(0, 9), 7, "7"), (str, "x", "x")],
)  # fmt: skip
def test_a_value_is_written_with_its_unit(
    parse: Callable[[str], Any], value: Any, text: str
) -> None:
    """A value is written as text, with its unit, that parses to the same value."""
    assert Option(parse, None, "").text(value) == text
    assert parse(text) == value


@pytest.mark.parametrize("text", ["on", "true", "True", "yes", "1"])
def test_a_switch_takes_the_usual_words(text: str) -> None:
    """A switch accepts the usual words for on and off."""
    assert switch(text) is True
    assert or_off(DURATION)("off") is None
    assert url("https://[::1]:80/a/b") == "https://[::1]:80/a/b"
    assert switch({"on": "off", "yes": "no", "1": "0"}.get(text, "false")) is False


@pytest.mark.parametrize(
    ("parse", "text", "says"),
    [
        *((SIZE, text, "such as 32MiB") for text in ("", "0", "2TiB")),
        *((DURATION, text, "such as 30s") for text in ("", "0", "nan", "3h")),
        *((switch, text, "on or off") for text in ("", "maybe", "2", "on ")),
        *((url, text, r"http:// or https://, without user, password, query and fragment$") for text in ("", "host:80", "ftp://host", "http://",
          "http://u:p@host", "http://u@host", "http://host?a", "http://host/%3Fa", "http://host#a")),
        (or_off(DURATION), "never", "such as 30s, or off"),
    ],
)  # fmt: skip
def test_what_is_refused_is_told_with_what_is_taken(
    parse: Callable[[str], Any], text: str, says: str
) -> None:
    """A ValueError says which values are allowed."""
    with pytest.raises(ValueError, match=says):
        parse(text)


def written(nbytes: int, *pieces: tuple[int, int]) -> Ranges:
    """Return the ranges of an object of which these (start, length) were written."""
    ranges = Ranges(nbytes, uri="memory://x", key="k")
    for start, length in pieces:
        ranges.add(start, length)
    return ranges


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ([(0, 5), (4, 6)], "bytes 4:5 of 10 were written twice"),
        ([(0, 10), (9, 1)], "bytes 9:10 of 10 were written twice"),
        ([(0, 1), (0, 10)], "bytes 0:1 of 10 were written twice"),
        ([(0, 5), (6, 4)], "bytes 5:6 of 10 were never written"),
        ([(0, 9)], "bytes 9:10 of 10 were never written"),
        ([(1, 9)], "bytes 0:1 of 10 were never written"),
        ([], "bytes 0:10 of 10 were never written"),
    ],
)
def test_a_hole_or_an_overlap_of_one_byte_is_found(
    pieces: list[tuple[int, int]], says: str
) -> None:
    """A hole or overlap of one byte is found, whatever the order of the pieces."""
    for order in (pieces, pieces[::-1]):
        with pytest.raises(StorageError, match=says):
            written(10, *order).check_complete()


def test_what_is_written_once_is_complete() -> None:
    """Pieces may come in any order, be empty, and end before the declared size."""
    written(10, (5, 5), (0, 5), (3, 0)).check_complete()
    written(10, (0, 4)).check_complete(4)
    written(0).check_complete()
    for nbytes, says in (
        (3, "not inside an object of 3 bytes"),
        (5, "bytes 4:5 of 5 were never written"),
    ):
        with pytest.raises(StorageError, match=says):
            written(10, (0, 4)).check_complete(nbytes)
