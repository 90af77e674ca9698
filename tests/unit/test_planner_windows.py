"""Windows: every byte of a row of items is in exactly one, and none is too large."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.planner.windows import Slice, windows


@given(st.lists(st.integers(0, 100), max_size=20), st.integers(1, 64), st.integers(0, 5))
def test_every_byte_is_in_one_window(sizes: list[int], window_nbytes: int, first: int) -> None:
    """In order; windows end at multiples of their size, all but the last."""
    found = list(windows(sizes, window_nbytes, first * window_nbytes))
    seen = [
        (part.item, byte)
        for w in found
        for part in w.slices
        for byte in range(part.start, part.stop)
    ]
    assert seen == [(item, byte) for item, nbytes in enumerate(sizes) for byte in range(nbytes)]
    assert all(w.nbytes <= window_nbytes for w in found)
    assert all(w.stop % window_nbytes == 0 for w in found[:-1])
    for w in found:
        assert w.nbytes == sum(part.nbytes for part in w.slices)
        ends = [0, *(part.at + part.nbytes for part in w.slices)]
        assert [part.at for part in w.slices] == ends[:-1]


def test_a_row_that_begins_within_a_window() -> None:
    """The first window is shorter, so that all others begin where they are read and written best."""
    first, second = windows([10, 8], 16, 4)
    assert (first.start, first.stop, second.start, second.stop) == (4, 16, 16, 22)
    assert first.slices == (Slice(0, 0, 10, 0), Slice(1, 0, 2, 10))
    assert second.slices == (Slice(1, 2, 8, 0),)
