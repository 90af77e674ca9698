"""Test sizes, durations and rounding, and pauses of the garbage collector."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from holdfast.core.garbage import collector_paused
from holdfast.core.units import (
    ceil_div,
    duration_text,
    exact_size_text,
    in_groups,
    parse_duration,
    parse_size,
    round_up,
    size_text,
)


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1024, "1.00 KiB"),
        (10 << 10, "10.0 KiB"),
        (100 << 20, "100 MiB"),
        (1023 << 20, "1.00 GiB"),
        (5 << 30, "5.00 GiB"),
        (3 << 70, "3072 EiB"),
    ],
)
def test_sizes_have_three_digits(nbytes: int, expected: str) -> None:
    """A size has three digits, in a unit that keeps the number below 1000."""
    assert size_text(nbytes) == expected


def test_round_up() -> None:
    """Values round up to the next multiple; columns are rounded row by row."""
    assert [round_up(value, 8) for value in (0, 1, 8, 9)] == [0, 8, 8, 16]
    assert [ceil_div(value, 8) for value in (0, 1, 8, 9)] == [0, 1, 1, 2]
    assert round_up(np.array([0, 1, 9]), 8).tolist() == [0, 8, 16]
    assert ceil_div(np.array([0, 1, 9]), 8).tolist() == [0, 1, 2]


@pytest.mark.parametrize("nbytes", [0, 1, 1023, 1024, 4097, 3 << 20, 5 << 40, 7 << 50])
def test_an_exact_size_is_read_back(nbytes: int) -> None:
    """An exact size parses to the same number of bytes."""
    assert parse_size(exact_size_text(nbytes)) == nbytes


@pytest.mark.parametrize("text", ["", "x", "1.5GiB", "-1", "12iB", "12 parsecs", "٣"])
def test_what_is_no_size_is_refused(text: str) -> None:
    """A malformed size is refused, as are digits of other scripts."""
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("90sec", 90), ("2min", 120), ("2 m", 120), (" 1.5h ", 5400), ("500ms", 0.5)],
)
def test_a_duration_has_a_unit(text: str, seconds: float) -> None:
    """The units are the same wherever a duration is given."""
    assert parse_duration(text) == parse_duration(text, needs_unit=True) == seconds
    assert parse_duration(duration_text(seconds)) == seconds


@pytest.mark.parametrize("text", ["", "min", "10 parsecs", "-3min", "1.s", "1,5s"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    """The error for a malformed duration says so."""
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([], []),
        ([3, 4, 3, 1], [[3, 4, 3], [1]]),
        ([11, 2], [[11], [2]]),
        ([5, 20, 5, 5], [[5], [20], [5, 5]]),
    ],
)
def test_groups_are_as_large_as_allowed(sizes: list[int], groups: list[list[int]]) -> None:
    """Groups keep the order and hold up to ten bytes; a larger item is alone."""
    assert list(in_groups(sizes, lambda size: size, 10)) == groups


def test_the_collector_runs_again_after_the_last_pause() -> None:
    """The collector is paused until the last pause ends, and stays off if it was off before."""
    gc.enable()
    try:
        first, second = collector_paused(), collector_paused()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert not gc.isenabled()
        second.__exit__(None, None, None)
        assert gc.isenabled()
        gc.disable()
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
