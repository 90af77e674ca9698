"""Dividing among holders: together they write everything once, and evenly; small cases by hand."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.effort import examples

from holdfast.planner.balance import SHARE_UNIT, Group, balance
from holdfast.planner.saving import Holdings, divide

NDIM, WORLD = 3, 6
Indices = tuple[int, ...]
LARGER = 2
Tensor = tuple[Group, list[int], int, list[int]]
"""The holders, shape and itemsize of a tensor, and the offsets of its box."""


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Draw a tensor: the ranks that hold it, its shape and itemsize, and the offsets of its box."""
    group = tuple(sorted(draw(st.sets(st.integers(0, 5), min_size=1, max_size=6))))
    shape = draw(st.lists(st.integers(0, 12), min_size=NDIM, max_size=NDIM))
    shape[draw(st.integers(0, NDIM - 1))] *= draw(st.sampled_from([1, 1, 10, 40]))
    return (
        group,
        shape,
        draw(st.sampled_from([1, 2, 4, 8])),
        draw(st.lists(st.integers(0, 9), min_size=3, max_size=3)),
    )


def holdings_of(rank: int, cases: Sequence[Tensor], seed: int) -> Holdings:
    """Return a rank's holdings in an order of its own; tensor index = row in ``cases``."""
    mine = [row for row, (group, *_) in enumerate(cases) if rank in group]
    np.random.default_rng(seed).shuffle(mine)
    groups = tuple(dict.fromkeys(cases[row][0] for row in mine))
    column = np.array(mine, dtype=np.int64)
    lengths = np.array([cases[row][1] for row in mine], dtype=np.int64).reshape(-1, NDIM)
    offsets = np.array([cases[row][3] for row in mine], dtype=np.int64).reshape(-1, NDIM)
    itemsize = np.array([cases[row][2] for row in mine], dtype=np.int64)
    group = np.array([groups.index(cases[row][0]) for row in mine], dtype=np.int64)
    # The local tensor is larger than the box, and lies elsewhere on each rank.
    local_start = np.full_like(column, rank)
    local_shape = lengths + LARGER
    return Holdings(
        column, offsets, lengths, local_start, local_shape, itemsize, group, groups, column
    )


def held_by(cases: Sequence[Tensor]) -> Counter[Group]:
    """Return the bytes that each group holds together."""
    held: Counter[Group] = Counter()
    for group, shape, itemsize, _ in cases:
        held[group] += int(np.prod(shape)) * itemsize
    return held


def least(held: Mapping[Group, int]) -> float:
    """Return the highest load of the best division, by the theorem of maximal flow."""
    sets = (
        set(ranks) for n in range(1, WORLD + 1) for ranks in itertools.combinations(range(WORLD), n)
    )
    return max(
        sum(nbytes for group, nbytes in held.items() if ranks >= set(group)) / len(ranks)
        for ranks in sets
    )


@examples(150)
@given(st.lists(tensors(), max_size=8), st.integers(0, 1000), st.booleans())
def test_holders_write_everything_once(cases: list[Tensor], seed: int, balanced: bool) -> None:
    """Exactly one holder writes each element, from its place in that holder's memory."""
    shares = balance(held_by(cases), WORLD) if balanced else None
    times = [np.zeros(shape, dtype=int) for _, shape, _, _ in cases]
    for rank in range(WORLD):
        mine = divide(holdings_of(rank, cases, seed + rank), rank, shares)
        for row, offset, length, local in zip(
            mine.tensor.tolist(), mine.offsets, mine.lengths, mine.local_start, strict=True
        ):
            assert (length > 0).all()
            within = offset - np.array(cases[row][3])
            local_shape = np.array(cases[row][1]) + LARGER
            assert local == rank + np.ravel_multi_index(within, local_shape)
            times[row][tuple(map(slice, within, within + length))] += 1
    assert all((count == 1).all() for count in times)


@examples(150)
@given(st.lists(tensors(), min_size=1, max_size=8), st.integers(0, 1000))
def test_holders_write_evenly(cases: list[Tensor], seed: int) -> None:
    """Each member writes its share of its group's bytes, within 2% or an element."""
    for group in {case[0] for case in cases}:
        theirs = [row for row, case in enumerate(cases) if case[0] == group]
        share = sum(np.prod(cases[row][1]) * cases[row][2] for row in theirs) / len(group)
        slack = max(0.02 * share, *(cases[row][2] for row in theirs))
        for rank in group:
            held = holdings_of(rank, cases, seed + rank)
            mine = divide(held, rank)
            nbytes = mine.nbytes[mine.group == held.groups.index(group)].sum()
            assert abs(nbytes - share) <= slack


@examples(150)
@given(st.lists(tensors(), min_size=1, max_size=8), st.integers(0, 1000))
def test_the_whole_job_is_balanced(cases: list[Tensor], seed: int) -> None:
    """However groups overlap, the highest load is within 2% and cuts of the best division."""
    held = held_by(cases)
    shares = balance(held, WORLD)
    loads = [
        divide(holdings_of(rank, cases, seed + rank), rank, shares).nbytes.sum()
        for rank in range(WORLD)
    ]
    cuts = sum(
        max(itemsize, 0.01 * held[group] / len(group))
        for group, _, itemsize, _ in cases
        if len(group) > 1
    )
    assert max(loads) <= 1.02 * least(held) + cuts


@examples(200)
@given(
    st.dictionaries(
        st.sets(st.integers(0, WORLD - 1), min_size=1).map(lambda ranks: tuple(sorted(ranks))),
        st.integers(0, 1 << 50) | st.integers(0, 99),
        max_size=16,
    )
)
def test_shares_are_as_even_as_holders_allow(held: dict[Group, int]) -> None:
    """The highest load is the least possible, within 1.5%; cuts ascend from nothing to all."""
    shares = balance(held, WORLD)
    loads = np.zeros(WORLD)
    for group, nbytes in held.items():
        cuts = shares.get(group, [SHARE_UNIT * i / len(group) for i in range(len(group) + 1)])
        assert (len(cuts), cuts[0], cuts[-1]) == (len(group) + 1, 0, SHARE_UNIT)
        assert (np.diff(cuts) >= 0).all()
        loads[list(group)] += nbytes * np.diff(cuts) / SHARE_UNIT
    assert loads.max() <= 1.015 * least(held) + 1e-5 * sum(held.values())


def holdings(
    boxes: Sequence[tuple[Indices, Indices]],
    groups: tuple[Group, ...],
    *,
    order: list[int] | None = None,
) -> Holdings:
    """Return holdings of boxes (offsets, lengths), each the whole of its local tensor."""
    offsets = np.array([offset for offset, _ in boxes], dtype=np.int64)
    lengths = np.array([length for _, length in boxes], dtype=np.int64)
    rows = np.arange(len(boxes))
    return Holdings(
        tensor=rows,
        offsets=offsets,
        lengths=lengths,
        local_start=np.zeros(len(boxes), dtype=np.int64),
        local_shape=lengths,
        itemsize=np.full(len(boxes), 4),
        group=np.zeros(len(boxes), dtype=np.int64),
        groups=groups,
        order=rows if order is None else np.array(order),
    )


def written(held: Holdings, rank: int) -> list[tuple[int, list[int], list[int], list[int]]]:
    """Return the boxes that a rank writes as (tensor, offsets, lengths, local offsets)."""
    mine = divide(held, rank)
    local = [
        [int(index) for index in np.unravel_index(start, shape)]
        for start, shape in zip(mine.local_start, mine.local_shape, strict=True)
    ]
    columns = (mine.tensor, mine.offsets, mine.lengths)
    return list(zip(*(column.tolist() for column in columns), local, strict=True))


def test_cuts_fall_on_rows() -> None:
    """A row in which a share ends belongs to the next holder."""
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
