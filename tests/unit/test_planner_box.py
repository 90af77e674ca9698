"""Boxes and flat ranges: small cases with the answers written out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from holdfast.planner.box import Box, contiguous_range, flat_to_boxes, intersect, row_strides


def test_box_measures() -> None:
    """A box knows its dimensions, its volume and where it ends, and reads like a slice."""
    box = Box((0, 128), (2, 64))
    assert (box.ndim, box.volume, box.stops, str(box)) == (2, 128, (2, 192), "[0:2,128:192]")


def test_box_without_dimensions_has_one_element() -> None:
    """A 0-d box stands for a scalar."""
    assert (Box((), ()).volume, Box((), ()).ndim, Box((), ()).stops) == (1, 0, ())


def test_shifted_keeps_the_lengths() -> None:
    """Moving a box changes where it begins and nothing else."""
    assert Box((1, 2), (3, 4)).shifted((10, -2)) == Box((11, 0), (3, 4))


@pytest.mark.parametrize(("offsets", "lengths"), [((0,), (1, 2)), ((0, 0), (1, -1))])
def test_impossible_boxes_are_refused(offsets: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    """Offsets and lengths that do not match, and negative lengths, raise ValueError."""
    with pytest.raises(ValueError, match="box"):
        Box(offsets, lengths)


@pytest.mark.parametrize(
    ("a", "b", "common"),
    [
        (Box((0, 0), (4, 4)), Box((2, 3), (4, 4)), Box((2, 3), (2, 1))),
        (Box((0, 0), (4, 4)), Box((4, 0), (1, 4)), None),  # they touch
        (Box((0, 0), (4, 4)), Box((1, 1), (0, 2)), None),  # one is empty
        (Box((), ()), Box((), ()), Box((), ())),
    ],
)
def test_intersect(a: Box, b: Box, common: Box | None) -> None:
    """What two boxes have in common, in either order; None when that is nothing."""
    assert intersect(a, b) == common
    assert intersect(b, a) == common


def test_boxes_of_different_dimensions_do_not_intersect() -> None:
    """Comparing boxes of tensors of different dimensions is a mistake of the caller."""
    with pytest.raises(ValueError, match="zip"):
        intersect(Box((0,), (4,)), Box((0, 0), (4, 4)))


def test_row_strides() -> None:
    """Strides count elements, the last dimension fastest."""
    assert row_strides((2, 3, 4)) == (12, 4, 1)
    assert row_strides(()) == ()


@pytest.mark.parametrize(
    ("box", "lengths", "expected"),
    [
        (Box((2, 0), (3, 5)), (8, 5), (10, 25)),  # whole rows
        (Box((2, 1), (1, 3)), (8, 5), (11, 14)),  # part of one row
        (Box((2, 1), (2, 3)), (8, 5), None),  # parts of two rows
        (Box((1, 2, 0), (1, 2, 7)), (3, 4, 7), (42, 56)),
        (Box((0, 0, 3), (3, 1, 1)), (3, 1, 7), None),
        (Box((), ()), (), (0, 1)),
        (Box((3, 1), (0, 2)), (8, 5), (16, 16)),  # empty
    ],
)
def test_contiguous_range(
    box: Box, lengths: tuple[int, ...], expected: tuple[int, int] | None
) -> None:
    """A box is one run when every dimension inside the first one longer than 1 is whole."""
    assert contiguous_range(box, lengths) == expected


def test_flat_range_becomes_head_rows_and_tail() -> None:
    """A range that begins and ends inside rows becomes the head's box, the whole rows and the
    tail's box."""
    assert flat_to_boxes((4, 5), 3, 17) == [
        Box((0, 3), (1, 2)),
        Box((1, 0), (2, 5)),
        Box((3, 0), (1, 2)),
    ]


@pytest.mark.parametrize("lengths", [(), (7,), (4, 5), (2, 3, 4), (2, 1, 3, 2), (3, 1), (1, 1, 1)])
def test_every_flat_range_of_small_arrays(lengths: tuple[int, ...]) -> None:
    """All ranges of an array come back element by element, in order, in at most 2 * ndim - 1 boxes."""
    volume = math.prod(lengths)
    index = np.arange(volume).reshape(lengths)
    for start in range(volume + 1):
        for stop in range(start, volume + 1):
            boxes = flat_to_boxes(lengths, start, stop)
            slices = [
                tuple(slice(*pair) for pair in zip(box.offsets, box.stops, strict=True))
                for box in boxes
            ]
            elements = [element for part in slices for element in index[part].ravel().tolist()]
            assert elements == list(range(start, stop))
            assert all(box.volume for box in boxes)
            assert len(boxes) <= (max(1, 2 * len(lengths) - 1) if start < stop else 0)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 21)])
def test_ranges_outside_the_array_are_refused(start: int, stop: int) -> None:
    """A range that is not within the array raises ValueError."""
    with pytest.raises(ValueError, match="not a range"):
        flat_to_boxes((4, 5), start, stop)
