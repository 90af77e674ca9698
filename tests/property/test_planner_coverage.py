"""Tables of tensors and shards, and their coverage against a count of every element."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.effort import examples

from holdfast.planner import coverage
from holdfast.planner.box import Box, flat_to_boxes
from holdfast.planner.columns import Ints, padded
from holdfast.planner.coverage import flawed, flaws
from holdfast.planner.table import ShardTable, TensorTable, coverage_errors

Shape = tuple[int, ...]
Sides = tuple[Sequence[int], Sequence[int]]
"""Offsets and lengths of a box, which may be invalid."""
Case = tuple[Shape, list[Sides]]
Row = tuple[int, Sequence[int], Sequence[int]]
"""A tensor, and the offsets and lengths of a box."""
SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)


@st.composite
def guillotine(draw: st.DrawFn, region: Box) -> list[Box]:
    """Draw a tiling by cuts from side to side."""
    dims = [dim for dim, length in enumerate(region.lengths) if length > 1]
    if not dims or draw(st.integers(0, 3)) == 0:
        return [region]
    dim = draw(st.sampled_from(dims))
    at = draw(st.integers(1, region.lengths[dim] - 1))
    low, high = part(region, dim, 0, at), part(region, dim, at, region.lengths[dim])
    return [*draw(guillotine(low)), *draw(guillotine(high))]


def part(box: Box, dim: int, start: int, stop: int) -> Box:
    """Return the part of the box from start to stop along one dimension."""
    offsets, lengths = list(box.offsets), list(box.lengths)
    offsets[dim], lengths[dim] = offsets[dim] + start, stop - start
    return Box(tuple(offsets), tuple(lengths))


@st.composite
def flat(draw: st.DrawFn, region: Box) -> list[Box]:
    """Draw a tiling by flat ranges."""
    cuts = draw(st.lists(st.integers(0, region.volume), max_size=6))
    edges = sorted({0, *cuts, region.volume})
    return [
        box for edge in itertools.pairwise(edges) for box in flat_to_boxes(region.lengths, *edge)
    ]


@st.composite
def pinwheel(draw: st.DrawFn, region: Box) -> list[Box]:
    """Draw a tiling that no plane parts, in two of the dimensions."""
    dims = [dim for dim, length in enumerate(region.lengths) if length > 2]
    if len(dims) < 2:
        return [region]
    i, j = draw(st.permutations(dims))[:2]
    a, b = region.lengths[i], region.lengths[j]
    p, q = sorted(draw(st.sets(st.integers(1, a - 1), min_size=2, max_size=2)))
    r, s = sorted(draw(st.sets(st.integers(1, b - 1), min_size=2, max_size=2)))
    corners = [(0, p, 0, s), (0, q, s, b), (q, a, r, b), (p, a, 0, r), (p, q, r, s)]
    boxes = [part(part(region, i, low, high), j, left, right) for low, high, left, right in corners]
    return [*boxes[:-1], *draw(guillotine(boxes[-1]))]


@st.composite
def tilings(draw: st.DrawFn) -> tuple[Shape, list[Box]]:
    """Draw a shape and boxes that tile it."""
    shape = draw(SHAPES)
    whole = Box((0,) * len(shape), shape)
    if not whole.volume:
        return shape, []
    boxes = draw(st.sampled_from([guillotine, flat, pinwheel]).flatmap(lambda kind: kind(whole)))
    return shape, draw(st.permutations(boxes))


@st.composite
def nearly_tilings(draw: st.DrawFn) -> Case:
    """Draw a shape and boxes, some left out, doubled, moved, grown or swapped."""
    shape, tiling = draw(tilings())
    boxes: list[Sides] = [(box.offsets, box.lengths) for box in tiling]
    for _ in range(draw(st.integers(0, 3)) if boxes else 0):
        index = draw(st.integers(0, len(boxes) - 1))
        offsets, lengths = (list(column) for column in boxes[index])
        change = draw(st.sampled_from(["drop", "double", "move", "grow", "any"]))
        dim = draw(st.integers(0, len(shape) - 1)) if shape else None
        if change == "drop" and len(boxes) > 1:
            del boxes[index]
            continue
        if dim is not None and change == "move":
            offsets[dim] += draw(st.sampled_from([-1, 1]))
        if dim is not None and change == "grow":
            lengths[dim] += draw(st.sampled_from([-1, 1]))
        if dim is not None and change == "any":
            offsets[dim], lengths[dim] = draw(st.integers(-2, 8)), draw(st.integers(-2, 8))
        boxes[index : index + (change != "double")] = [(offsets, lengths)]
    return shape, boxes


def count(shape: Shape, boxes: Sequence[Sides]) -> tuple[Ints, bool]:
    """Count how often each element is stored, and look for boxes that stick out or are empty."""
    times, outside = np.zeros(shape, dtype=int), False
    for offsets, lengths in boxes:
        pairs = list(zip(offsets, lengths, shape, strict=True))
        if all(
            offset >= 0 and length > 0 and offset + length <= limit
            for offset, length, limit in pairs
        ):
            times[tuple(slice(offset, offset + length) for offset, length, _ in pairs)] += 1
        else:
            outside = True
    return times, outside


def kinds_in(shape: Shape, boxes: Sequence[Sides]) -> set[str]:
    """Return the kinds of flaws in a tiling."""
    times, outside = count(shape, boxes)
    found = {
        "missing": (times == 0).any(),
        "stored twice": (times > 1).any(),
        "out of bounds": outside,
    }
    return {kind for kind, present in found.items() if present}


def tensor_table(
    shapes: Sequence[Shape],
    *,
    owner: list[int] | None = None,
    alias: list[int] | None = None,
    names: Sequence[str] | None = None,
    ndim: int = 0,
) -> TensorTable:
    """Return a table of float32 tensors, padded to at least ``ndim`` dimensions."""
    dims = [len(shape) for shape in shapes]
    nothing = np.full(len(shapes), -1)
    return TensorTable(
        names=tuple(names or (f"t{row}" for row in range(len(shapes)))),
        dtype=np.zeros(len(shapes), dtype=np.uint8),
        dtypes=(("float32", 4),),
        ndim=np.array(dims),
        shape=padded(shapes, max([ndim, *dims]), 1),
        alias=nothing if alias is None else np.array(alias),
        owner=nothing if owner is None else np.array(owner),
    )


def shard_table(rows: Sequence[Row], ndim: int = 2) -> ShardTable:
    """Return shards from rows (tensor, offsets, lengths)."""
    offsets = padded([offset for _, offset, _ in rows], ndim, 0)
    lengths = padded([length for _, _, length in rows], ndim, 1)
    tensor = np.array([row for row, _, _ in rows], dtype=np.int64)
    return ShardTable(tensor, offsets, lengths, np.arange(len(rows)), 100 * np.arange(len(rows)))


def tables(cases: Sequence[Case]) -> tuple[TensorTable, ShardTable]:
    """Return the tensor and shard tables of several shapes with their boxes."""
    rows = [(row, *box) for row, (_, boxes) in enumerate(cases) for box in boxes]
    return tensor_table([shape for shape, _ in cases], ndim=4), shard_table(rows, ndim=4)


@examples(150)
@given(tilings())
def test_tilings_are_accepted(case: tuple[Shape, list[Box]]) -> None:
    """Any tiling of a tensor gives no error, and the check needs no second look."""
    shape, boxes = case
    tensors, shards = tables([(shape, [(box.offsets, box.lengths) for box in boxes])])
    assert coverage_errors(tensors, shards) == []
    assert flawed(tensors.shape, shards.tensor, shards.offsets, shards.lengths).tolist() == [False]


@examples(400)
@given(nearly_tilings())
def test_flaws_are_those_counted(case: Case) -> None:
    """The flaws found are of exactly the kinds that counting finds, and each example is one."""
    shape, boxes = case
    times, _ = count(shape, boxes)
    shards = shard_table([(0, *box) for box in boxes], ndim=len(shape))
    found = flaws(shape, shards.offsets, shards.lengths)
    assert {flaw.kind for flaw in found} == kinds_in(shape, boxes)
    for flaw in found:
        cell = times[
            tuple(slice(*pair) for pair in zip(flaw.box.offsets, flaw.box.stops, strict=True))
        ]
        assert flaw.kind == "out of bounds" or cell.size == math.prod(flaw.box.lengths) > 0
        assert flaw.kind != "missing" or (cell == 0).all()
        assert flaw.kind != "stored twice" or (cell > 1).all()


@examples(250)
@given(st.lists(nearly_tilings(), min_size=1, max_size=5))
def test_tables_are_judged_tensor_by_tensor(cases: list[Case]) -> None:
    """Exactly the flawed tensors of a table are named, with the kinds that counting finds."""
    tensors, shards = tables(cases)
    flags = flawed(tensors.shape, shards.tensor, shards.offsets, shards.lengths)
    assert flags.tolist() == [bool(kinds_in(*case)) for case in cases]
    errors = coverage_errors(tensors, shards, limit=100)
    expected = {(f"t{row}", kind) for row, case in enumerate(cases) for kind in kinds_in(*case)}
    kinds = ("missing", "stored twice", "out of bounds")
    assert {
        (error.split(":")[0], kind) for error in errors for kind in kinds if kind in error
    } == expected


def test_find_prefers_the_ranks_own_row() -> None:
    """A rank finds its own row; a rank of a larger job gets one in turn."""
    table = tensor_table([(1,)] * 4, names=["rng", "rng", "w", "rng"], owner=[4, 0, -1, 2])
    assert table.rows["rng"] == (0, 1, 3)
    assert [table.find("rng", rank) for rank in (0, 2, 4, 1, 3, 5)] == [1, 3, 0, 3, 1, 0]
    assert (table.find("rng"), table.find_all(["rng"]).tolist()) == (1, [1])


def test_find_all_finds_what_find_does() -> None:
    """It looks up many names at once, with and without owners; -1 stands for a missing name."""
    shared = tensor_table([(1,)] * 3)
    owned = tensor_table([(1,)] * 4, names=["rng", "w", "rng", "v"], owner=[1, -1, 0, -1])
    assert shared.find_all(["t2", "x", "t0"], rank=1).tolist() == [2, -1, 0]
    assert owned.find_all(["rng", "v", "x", "w"], rank=1).tolist() == [0, 3, -1, 1]
    assert owned.find_all(["rng", "rng"], rank=4).tolist() == [2, 2]


def test_shards_sort_and_point() -> None:
    """Sorting is by tensor and otherwise keeps the order; pointers delimit each tensor's rows."""
    rows = shard_table([(2, (0,), (4,)), (0, (0,), (1,)), (2, (4,), (4,))])
    table = ShardTable.concat([rows])
    assert table.tensor.tolist() == [0, 2, 2]
    assert table.image.tolist() == [1, 0, 2]
    assert table.start.tolist() == [100, 0, 200]
    assert table.pointers(4).tolist() == [0, 1, 1, 3, 3]
    assert table.nbytes(tensor_table([(1,), (1,), (8,)])).tolist() == [4, 16, 16]


def test_concat_pads_and_sorts() -> None:
    """Tables of different width become one, padded with offset 0 and length 1."""
    table = ShardTable.concat(
        [shard_table([(1, (3, 4), (5, 6))]), shard_table([(0, (7,), (8,))], ndim=1)]
    )
    assert table.tensor.tolist() == [0, 1]
    assert table.offsets.tolist() == [[7, 0], [3, 4]]
    assert table.lengths.tolist() == [[8, 1], [5, 6]]
    assert len(ShardTable.concat([])) == len(ShardTable.empty(3)) == 0


@pytest.mark.parametrize(
    ("offsets", "lengths"),
    [
        ((0, 0), (5, 6)),
        ((-1, 0), (5, 6)),
        ((0, 0), (4, 0)),
        ((4, 0), (1, 6)),
        ((0, 0), (4, -6)),
        ((2**63 - 1, 0), (4, 6)),
    ],
)
def test_boxes_out_of_bounds_are_named(offsets: Shape, lengths: Shape) -> None:
    """A box that leaves its tensor, or is empty, is named; the check does not overflow."""
    rows = [(0, (0, 0), (4, 6)), (0, offsets, lengths), (0, (9, 9), (1, 1))]
    shown = Box(offsets, tuple(max(length, 0) for length in lengths))
    errors = coverage_errors(tensor_table([(4, 6)]), shard_table(rows))
    assert errors == [f"t0: a shard {shown} is out of bounds of shape [4, 6], or empty"]


def test_scalars_and_empty_tensors() -> None:
    """A scalar needs its one element; a tensor without elements needs nothing and allows nothing."""
    table = tensor_table([(), (0, 3)])
    assert coverage_errors(table, shard_table([(0, (), ())])) == []
    assert coverage_errors(table, shard_table([])) == ["t0: its only element is missing"]
    assert (
        "out of bounds"
        in coverage_errors(table, shard_table([(0, (), ()), (1, (0, 0), (1, 1))]))[0]
    )


def test_aliases_have_no_shards() -> None:
    """An alias is covered by the tensor it stands for; shards of its own would be a second copy."""
    table = tensor_table([(4,), (4,)], alias=[-1, 0])
    assert coverage_errors(table, shard_table([(0, (0,), (4,))])) == []
    errors = coverage_errors(table, shard_table([(0, (0,), (4,)), (1, (0,), (4,))]))
    assert errors == ["t1: stored twice, since it is an alias of t0 and has shards too"]


def test_unknown_tensors_and_the_limit() -> None:
    """A shard of no tensor is an error; there are never more sentences than the limit."""
    for unknown in (-1, 1, 7):
        errors = coverage_errors(
            tensor_table([(1,)]), shard_table([(0, (), ()), (unknown, (), ())])
        )
        assert errors == [
            f"a shard names tensor {unknown}, which is out of bounds: there are 1 tensors"
        ]
    assert len(coverage_errors(tensor_table([(2,)] * 50), shard_table([]))) == 20
    assert len(coverage_errors(tensor_table([(2,)] * 50), shard_table([]), limit=3)) == 3


def test_only_what_no_plane_parts_is_counted_cell_by_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grids and flat ranges are checked without looking at single cells, which is slow."""
    monkeypatch.setattr(coverage, "cells", lambda *_: pytest.fail("counted cell by cell"))
    rows = [(row, (0, 3 * part), (4, 3)) for row in range(5) for part in (1, 0)]
    rows += [
        (row, (2 * part, column), (2, 1))
        for row in range(5, 9)
        for column in range(6)
        for part in range(2)
    ]
    flat = [((0, 0), (1, 4)), ((0, 4), (1, 2)), ((1, 0), (2, 6)), ((3, 0), (1, 6))]
    rows += [(9, offsets, lengths) for offsets, lengths in flat]
    assert coverage_errors(tensor_table([(4, 6)] * 10), shard_table(rows)) == []
    pinwheel: list[Row] = [
        (0, (0, 0), (1, 4)),
        (0, (0, 4), (3, 2)),
        (0, (3, 2), (1, 4)),
        (0, (1, 0), (3, 2)),
        (0, (1, 2), (2, 2)),
    ]
    with pytest.raises(pytest.fail.Exception, match="cell by cell"):
        coverage_errors(tensor_table([(4, 6)]), shard_table(pinwheel))


def test_a_gap_among_many_boxes_is_looked_at_first() -> None:
    """The search for an example goes where volumes do not add up, not through all boxes."""
    low = np.array(
        [(row, column) for row in range(30) for column in range(30) if (row, column) != (7, 23)]
    )
    (cell_low, cell_high, boxes), *_ = coverage.cells(
        np.zeros(2, dtype=int), np.full(2, 30), low, low + 1
    )
    assert (cell_low.tolist(), cell_high.tolist(), boxes) == ([7, 23], [8, 24], 0)
