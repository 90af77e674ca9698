"""Arithmetic on columns of boxes, against the same for one box."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.planner.box import Box, contiguous_range, row_strides
from holdfast.planner.columns import (
    contiguous,
    flat_starts,
    padded,
    ranges,
    strides,
    volumes,
    widen,
)

SHAPE = (3, 1, 4)


def boxes() -> list[Box]:
    """All boxes of a small array."""
    every = [
        (low, high - low)
        for size in SHAPE
        for low in range(size)
        for high in range(low + 1, size + 1)
    ]
    per_dim = [[pair for pair in dict.fromkeys(every) if sum(pair) <= size] for size in SHAPE]
    return [
        Box((a, c, e), (b, d, f))
        for a, b in per_dim[0]
        for c, d in per_dim[1]
        for e, f in per_dim[2]
    ]


def test_columns_agree_with_boxes() -> None:
    """Volumes, strides, positions and contiguity of rows are those of the box in each row."""
    every = boxes()
    offsets, lengths = (
        np.array([getattr(box, side) for box in every]) for side in ("offsets", "lengths")
    )
    within = np.broadcast_to(np.array(SHAPE), offsets.shape)
    assert len(every) == 60
    assert volumes(lengths).tolist() == [box.volume for box in every]
    assert strides(lengths).tolist() == [list(row_strides(box.lengths)) for box in every]
    assert contiguous(lengths, within).tolist() == [
        contiguous_range(box, SHAPE) is not None for box in every
    ]
    assert flat_starts(offsets, within).tolist() == [
        np.ravel_multi_index(box.offsets, SHAPE) for box in every
    ]


def test_no_rows_and_no_dimensions() -> None:
    """Tables without rows, and boxes without dimensions, are nothing special."""
    nothing, scalars = np.empty((0, 2), dtype=np.int64), np.empty((3, 0), dtype=np.int64)
    assert volumes(nothing).tolist() == []
    assert volumes(scalars).tolist() == [1, 1, 1]
    assert flat_starts(scalars, scalars).tolist() == [0, 0, 0]
    assert contiguous(scalars, scalars).tolist() == [True, True, True]
    assert strides(scalars).shape == (3, 0)


def test_ranges() -> None:
    """Ranges come one after the other, with the row each value came from; empty ones leave nothing."""
    rows, values = ranges(np.array([5, 0, 7]), np.array([2, 0, 3]))
    assert rows.tolist() == [0, 0, 2, 2, 2]
    assert values.tolist() == [5, 6, 7, 8, 9]


def test_widen() -> None:
    """Columns are padded on the right; those wide enough are returned as they are, wider ones
    refused."""
    columns = np.array([[1, 2], [3, 4]])
    assert widen(columns, 3, 9).tolist() == [[1, 2, 9], [3, 4, 9]]
    assert widen(columns, 2, 9) is columns
    with pytest.raises(ValueError, match="more than 1"):
        widen(columns, 1, 9)


def test_padded() -> None:
    """Rows of different length become one array; a row that is too long is refused."""
    assert padded([(1, 2), (), (3,)], 2, 9).tolist() == [[1, 2], [9, 9], [3, 9]]
    assert padded([], 2, 0).shape == (0, 2)
    assert padded([()], 0, 0).shape == (1, 0)
    with pytest.raises(ValueError, match="longer than 1"):
        padded([(1, 2), ()], 1, 0)
