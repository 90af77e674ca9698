"""Dividing what several ranks hold: small cases with the answers written out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from holdfast.planner.balance import Group
from holdfast.planner.saving import Holdings, divide

Indices = tuple[int, ...]


def holdings(
    boxes: Sequence[tuple[Indices, Indices]],
    groups: tuple[Group, ...],
    *,
    group: list[int] | None = None,
    order: list[int] | None = None,
    itemsize: int = 4,
) -> Holdings:
    """Holdings of boxes (offsets, lengths), each the whole of its local tensor."""
    offsets = np.array([offset for offset, _ in boxes], dtype=np.int64)
    lengths = np.array([length for _, length in boxes], dtype=np.int64)
    rows = np.arange(len(boxes))
    return Holdings(
        tensor=rows,
        offsets=offsets,
        lengths=lengths,
        local_start=np.zeros(len(boxes), dtype=np.int64),
        local_shape=lengths,
        itemsize=np.full(len(boxes), itemsize),
        group=np.zeros(len(boxes), dtype=np.int64) if group is None else np.array(group),
        groups=groups,
        order=rows if order is None else np.array(order),
    )


def written(held: Holdings, rank: int) -> list[tuple[int, list[int], list[int], list[int]]]:
    """What a rank writes, as rows (tensor, offsets, lengths, offsets in the local tensor)."""
    mine = divide(held, rank)
    local = [
        [int(index) for index in np.unravel_index(start, shape)]
        for start, shape in zip(mine.local_start, mine.local_shape, strict=True)
    ]
    columns = (mine.tensor, mine.offsets, mine.lengths)
    return list(zip(*(column.tolist() for column in columns), local, strict=True))


def test_cuts_fall_on_rows() -> None:
    """Where a share ends inside a row, the row goes to the next holder."""
    held = holdings([((0, 0), (1000, 8))], ((0, 1, 2),))
    rows = [
        (offsets[0], lengths) for rank in range(3) for _, offsets, lengths, _ in written(held, rank)
    ]
    assert rows == [(0, [333, 8]), (333, [333, 8]), (666, [334, 8])]


def test_rows_are_cut_when_larger_than_a_hundredth_of_a_share() -> None:
    """A row of exactly 1% of a share stays whole; a row of more is cut at an element."""
    small, wide, wider = ((0, 0), (4, 1)), ((0, 0), (200, 8)), ((0, 0), (99, 17))
    assert [row[2] for row in written(holdings([small, wide], ((0, 1),)), 0)] == [[4, 1], [99, 8]]
    assert [row[2] for row in written(holdings([small, wider], ((0, 1),)), 0)] == [
        [4, 1],
        [49, 17],
        [1, 6],
    ]


def test_boxes_that_share_an_order_go_by_offset() -> None:
    """Holders list boxes with one ``order`` by offset, whatever their sequence."""
    boxes = [((4000, 0), (1000, 1)), ((0, 0), (1000, 1))]
    assert written(holdings(boxes, ((0, 1),), order=[1, 1]), 0) == [(1, [0, 0], [1000, 1], [0, 0])]
    assert written(holdings(boxes[::-1], ((0, 1),), order=[1, 1]), 1) == [
        (1, [4000, 0], [1000, 1], [0, 0])
    ]


def test_a_rank_outside_the_group_is_refused() -> None:
    """Dividing for a rank that is not a holder raises ValueError."""
    with pytest.raises(ValueError, match="rank 7"):
        divide(holdings([((0, 0), (1, 1))], ((0, 1),)), 7)
