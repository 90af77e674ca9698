"""Dividing among holders: together they write everything exactly once, and evenly."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.effort import examples

from holdfast.planner.saving import Holdings, divide

NDIM = 3


@st.composite
def tensors(draw):
    """A tensor that some ranks hold: which, its shape, its itemsize, and the box of it that they have."""
    group = tuple(sorted(draw(st.sets(st.integers(0, 5), min_size=1, max_size=6))))
    shape = draw(st.lists(st.integers(0, 12), min_size=NDIM, max_size=NDIM))
    shape[draw(st.integers(0, NDIM - 1))] *= draw(st.sampled_from([1, 1, 10, 40]))
    return group, shape, draw(st.sampled_from([1, 2, 4, 8])), draw(st.lists(st.integers(0, 9), min_size=3, max_size=3))


def holdings_of(rank, cases, seed):
    """What a rank holds of all the tensors, in an order of its own; tensor index = row in ``cases``."""
    mine = [row for row, (group, *_) in enumerate(cases) if rank in group]
    np.random.default_rng(seed).shuffle(mine)
    groups = tuple(dict.fromkeys(cases[row][0] for row in mine))
    column = np.array(mine, dtype=np.int64)
    lengths = np.array([cases[row][1] for row in mine], dtype=np.int64).reshape(-1, NDIM)
    offsets = np.array([cases[row][3] for row in mine], dtype=np.int64).reshape(-1, NDIM)
    itemsize = np.array([cases[row][2] for row in mine], dtype=np.int64)
    group = np.array([groups.index(cases[row][0]) for row in mine], dtype=np.int64)
    # The local tensor is larger than the box, and lies elsewhere on each rank.
    return Holdings(column, offsets, lengths, np.full_like(offsets, rank), itemsize, group, groups, column)


@examples(150)
@given(st.lists(tensors(), max_size=8), st.integers(0, 1000))
def test_holders_write_everything_once(cases, seed):
    """Every element of every tensor is written by exactly one of its holders, from where that holder has it."""
    times = [np.zeros(shape, dtype=int) for _, shape, _, _ in cases]
    for rank in range(6):
        mine = divide(holdings_of(rank, cases, seed + rank), rank)
        for row, offset, length, local in zip(
            mine.tensor.tolist(), mine.offsets, mine.lengths, mine.local_offsets, strict=True
        ):
            assert (length > 0).all()
            within = offset - np.array(cases[row][3])
            assert (local - rank == within).all()
            times[row][tuple(map(slice, within, within + length))] += 1
    assert all((count == 1).all() for count in times)


@examples(150)
@given(st.lists(tensors(), min_size=1, max_size=8), st.integers(0, 1000))
def test_holders_write_evenly(cases, seed):
    """Of what a group holds, each member writes its share, within 2% or an element."""
    for group in {case[0] for case in cases}:
        theirs = [row for row, case in enumerate(cases) if case[0] == group]
        share = sum(np.prod(cases[row][1]) * cases[row][2] for row in theirs) / len(group)
        slack = max(0.02 * share, *(cases[row][2] for row in theirs))
        for rank in group:
            held = holdings_of(rank, cases, seed + rank)
            mine = divide(held, rank)
            nbytes = mine.nbytes[mine.group == held.groups.index(group)].sum()
            assert abs(nbytes - share) <= slack
