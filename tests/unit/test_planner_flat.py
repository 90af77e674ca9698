"""Flat ranges: how elements [a, b) of a row-major tensor become boxes, one by one and all at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from holdfast.planner.box import Box, contiguous_range
from holdfast.planner.columns import flat_boxes
from holdfast.planner.layout import BoxLayout, FlatLayout, Layout, local_layout
from holdfast.planner.regions import regions_of

SHAPES = [(), (1,), (7,), (3, 5), (1, 4), (4, 1), (2, 3, 4), (3, 1, 2), (2, 2, 2, 2), (0, 3)]


def all_ranges(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Every range of a tensor."""
    return itertools.combinations_with_replacement(range(int(np.prod(shape, dtype=int)) + 1), 2)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_range_is_few_boxes_that_cover_it(shape: tuple[int, ...]) -> None:
    """At most 2 * ndim - 1 boxes, disjoint, one behind the other, with exactly its elements."""
    element = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    for start, stop in all_ranges(shape):
        pieces = FlatLayout(shape, start, stop).pieces
        assert len(pieces) <= max(1, 2 * len(shape) - 1)
        held = [element[tuple(map(slice, p.box.offsets, p.box.stops))].ravel() for p in pieces]
        assert [n for part in held for n in part.tolist()] == list(range(start, stop))
        assert [p.local_start for p in pieces] == [part[0] - start for part in held]


def test_the_bound_is_reached() -> None:
    """A range that begins and ends inside a row of a 3-d tensor is five boxes."""
    assert [str(piece.box) for piece in FlatLayout((4, 4, 4), 5, 59).pieces] == [
        "[0:1,1:2,1:4]",
        "[0:1,2:4,0:4]",
        "[1:3,0:4,0:4]",
        "[3:4,0:2,0:4]",
        "[3:4,2:3,0:3]",
    ]


def test_all_ranges_at_once_are_what_each_is_alone() -> None:
    """The columns of many ranges hold the boxes that each layout has, in the same order."""
    layouts = [FlatLayout(shape, *ends) for shape in SHAPES for ends in all_ranges(shape)]
    regions = regions_of(layouts, 4)
    found = list(
        zip(
            regions.row.tolist(),
            regions.offsets.tolist(),
            regions.lengths.tolist(),
            regions.local_start.tolist(),
            strict=True,
        )
    )
    assert found == [
        (row, padded(piece.box.offsets, 0), padded(piece.box.lengths, 1), piece.local_start)
        for row, layout in enumerate(layouts)
        for piece in layout.pieces
    ]
    assert np.array_equal(regions.local_shape, regions.lengths)


def padded(values: Sequence[int], fill: int) -> list[int]:
    """Four of them."""
    return [*values, *[fill] * (4 - len(values))]


def test_boxes_and_ranges_keep_their_order() -> None:
    """Of layouts of both kinds, the rows ascend."""
    box = Box((2, 0), (1, 3))
    layouts: list[Layout] = [
        FlatLayout((3, 3), 2, 7),
        local_layout((3, 3)),
        BoxLayout((3, 3), box),
        FlatLayout((3, 3), 4, 4),
        FlatLayout((3, 3), 8, 9),
    ]
    regions = regions_of(layouts, 2)
    assert regions.row.tolist() == [0, 0, 0, 1, 2, 4]
    assert regions.local_start.tolist() == [0, 1, 4, 0, 0, 0]
    assert regions.local_shape.tolist() == [[1, 1], [1, 3], [1, 1], [3, 3], [1, 3], [1, 1]]


def test_a_part_knows_of_no_other_rank() -> None:
    """But, unlike a whole tensor, it says which part of a tensor it is."""
    flat = FlatLayout((4, 3), 2, 7)
    box = BoxLayout((4, 3), Box((1, 0), (2, 3)))
    assert (flat.holders, box.holders, local_layout((4, 3)).holders) == ((), (), None)
    assert (flat.region, box.region) == ("[flat 2:7]", "[1:3,0:3]")
    assert flat.local_shape == (5,)
    assert flat == FlatLayout((4, 3), 2, 7)
    assert len({flat, FlatLayout((3, 4), 2, 7), FlatLayout((4, 3), 2, 8)}) == 3


def test_empty_parts_have_no_boxes() -> None:
    """Neither an empty range nor a box without elements has anything to store."""
    for layout in (FlatLayout((4, 3), 5, 5), BoxLayout((4, 3), Box((4, 0), (0, 3)))):
        assert layout.is_empty
        assert tuple(layout.pieces) == ()


def test_a_range_that_is_whole_rows_is_one_box() -> None:
    """And one run of memory, which is copied at once."""
    row, offsets, lengths, first = flat_boxes(
        np.array([[100, 8], [100, 8]]), np.array([16, 0]), np.array([80, 800])
    )
    assert (row.tolist(), offsets.tolist(), first.tolist()) == ([0, 1], [[2, 0], [0, 0]], [16, 0])
    assert lengths.tolist() == [[8, 8], [100, 8]]
    assert contiguous_range(Box((2, 0), (8, 8)), (100, 8)) == (16, 80)
