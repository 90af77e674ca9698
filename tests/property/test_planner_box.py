"""Flat ranges and boxes: two ways to say which elements, of arrays of any size."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from holdfast.planner.box import Box, contiguous_range, flat_to_boxes, intersect

LENGTHS = st.lists(
    st.sampled_from([1, 1, 2, 3, 7, 4096, 128_256]) | st.integers(1, 1 << 20), max_size=6
)
SMALL = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=4)


@given(LENGTHS, st.data())
def test_a_flat_range_is_the_boxes_it_is_made_into(lengths: list[int], data: st.DataObject) -> None:
    """One run of elements each, one run following on the other, from its start to its stop; and no
    more than are needed."""
    volume = math.prod(lengths)
    start, stop = sorted(data.draw(st.integers(0, volume)) for _ in "ab")
    boxes = flat_to_boxes(lengths, start, stop)
    at = start
    for box in boxes:
        assert contiguous_range(box, lengths) == (at, at + box.volume)
        assert box.volume > 0
        at += box.volume
    assert at == stop
    assert all(
        0 <= a < b <= limit
        for box in boxes
        for a, b, limit in zip(box.offsets, box.stops, lengths, strict=True)
    )
    assert len(boxes) <= max(1, 2 * len(lengths) - 1)


def elements(box: Box) -> set[tuple[int, ...]]:
    """The indices in a box."""
    return set(itertools.product(*map(range, box.offsets, box.stops)))


@given(SMALL, SMALL)
def test_the_common_part_of_two_boxes_has_their_common_elements(
    a: list[tuple[int, int]], b: list[tuple[int, int]]
) -> None:
    """All of them, and no others; there is none where they have none."""
    n = min(len(a), len(b))
    one, two = (
        Box(tuple(o for o, _ in x[:n]), tuple(length for _, length in x[:n])) for x in (a, b)
    )
    common = intersect(one, two)
    assert (elements(common) if common else set()) == elements(one) & elements(two)
