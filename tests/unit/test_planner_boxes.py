"""Boxes, flat ranges, and both as columns."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.planner.box import Box, flat_to_boxes, intersect
from holdfast.planner.layout import FlatLayout, Layout, box_layout, local_layout, regions_of
from holdfast.planner.windows import windows

SHAPES = [(), (1,), (7,), (3, 5), (1, 4), (4, 1), (2, 3, 4), (3, 1, 2), (2, 2, 2, 2), (0, 3)]
SMALL = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=4)


def elements(box: Box) -> set[tuple[int, ...]]:
    """Return the indices in a box."""
    return set(itertools.product(*map(range, box.offsets, box.stops)))


def all_ranges(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield every flat range of a tensor."""
    return itertools.combinations_with_replacement(range(int(np.prod(shape, dtype=int)) + 1), 2)


@given(SMALL, SMALL)
def test_intersection_has_the_common_elements(
    a: list[tuple[int, int]], b: list[tuple[int, int]]
) -> None:
    """The intersection of two boxes contains exactly the elements of both."""
    n = min(len(a), len(b))
    one, two = (Box(tuple(o for o, _ in x[:n]), tuple(size for _, size in x[:n])) for x in (a, b))
    common = intersect(one, two)
    assert (elements(common) if common else set()) == elements(one) & elements(two)


@pytest.mark.parametrize(("offsets", "lengths"), [((0,), (1, 2)), ((0, 0), (1, -1))])
def test_impossible_boxes_are_refused(offsets: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    """Offsets and lengths that do not match, and negative lengths, raise ValueError."""
    with pytest.raises(ValueError, match="box"):
        Box(offsets, lengths)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 21)])
def test_ranges_outside_the_array_are_refused(start: int, stop: int) -> None:
    """A flat range that does not lie within the array raises ValueError."""
    with pytest.raises(ValueError, match="not a range"):
        flat_to_boxes((4, 5), start, stop)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_range_is_few_boxes_that_cover_it(shape: tuple[int, ...]) -> None:
    """At most 2 * ndim - 1 boxes cover a range: disjoint, not empty, in order."""
    element = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    for start, stop in all_ranges(shape):
        pieces = FlatLayout(shape, start, stop).pieces
        assert len(pieces) <= max(1, 2 * len(shape) - 1)
        held = [element[tuple(map(slice, p.box.offsets, p.box.stops))].ravel() for p in pieces]
        assert all(map(len, held))
        assert [n for part in held for n in part.tolist()] == list(range(start, stop))
        assert [p.local_start for p in pieces] == [part[0] - start for part in held]


def test_columns_of_ranges_hold_the_boxes_of_each() -> None:
    """Many flat ranges as columns have the boxes that each layout has, in the same order."""
    layouts = [FlatLayout(shape, *ends) for shape in SHAPES for ends in all_ranges(shape)]
    regions = regions_of(layouts, 4)
    columns = (regions.tensor, regions.offsets, regions.lengths, regions.local_start)
    found = list(zip(*(column.tolist() for column in columns), strict=True))
    assert found == [
        (row, four(piece.box.offsets, 0), four(piece.box.lengths, 1), piece.local_start)
        for row, layout in enumerate(layouts)
        for piece in layout.pieces
    ]
    assert np.array_equal(regions.local_shape, regions.lengths)


def four(values: Sequence[int], fill: int) -> list[int]:
    """Pad to four values."""
    return [*values, *[fill] * (4 - len(values))]


def test_boxes_and_ranges_keep_their_order() -> None:
    """The rows of layouts of both kinds ascend; empty layouts have none."""
    layouts: list[Layout] = [
        FlatLayout((3, 3), 2, 7),
        local_layout((3, 3)),
        box_layout((3, 3), Box((2, 0), (1, 3))),
        FlatLayout((3, 3), 4, 4),
        box_layout((3, 3), Box((3, 0), (0, 3))),
        FlatLayout((3, 3), 8, 9),
    ]
    regions = regions_of(layouts, 2)
    assert [layout.is_empty for layout in layouts] == [False, False, False, True, True, False]
    assert regions.tensor.tolist() == [0, 0, 0, 1, 2, 5]
    assert regions.local_start.tolist() == [0, 1, 4, 0, 0, 0]
    assert regions.local_shape.tolist() == [[1, 1], [1, 3], [1, 1], [3, 3], [1, 3], [1, 1]]


@given(st.lists(st.integers(0, 100), max_size=20), st.integers(1, 64), st.integers(0, 5))
def test_every_byte_is_in_one_window(sizes: list[int], window_nbytes: int, first: int) -> None:
    """Windows hold all items in order, and all but the last end at multiples of their size."""
    begin = first * window_nbytes // 2
    found = list(windows(sizes, window_nbytes, begin))
    parts = [part for w in found for part in w.slices]
    seen = [(part.item, byte) for part in parts for byte in range(part.start, part.stop)]
    assert seen == [(item, byte) for item, nbytes in enumerate(sizes) for byte in range(nbytes)]
    assert [w.start for w in found] == [begin, *(w.stop for w in found)][: len(found)]
    assert all(w.nbytes <= window_nbytes for w in found)
    assert all(w.stop % window_nbytes == 0 for w in found[:-1])
    for w in found:
        ends = [0, *itertools.accumulate(part.nbytes for part in w.slices)]
        assert [*(part.at for part in w.slices), w.nbytes] == ends
