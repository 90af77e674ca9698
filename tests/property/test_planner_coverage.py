"""Coverage against a count of every element: tilings of all kinds, and tilings with something
wrong."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.effort import examples

from holdfast.planner.box import Box, flat_to_boxes
from holdfast.planner.columns import Ints
from holdfast.planner.coverage import flawed, flaws
from holdfast.planner.table import ShardTable, TensorTable, coverage_errors

Shape = tuple[int, ...]
Sides = tuple[Sequence[int], Sequence[int]]
"""Offsets and lengths of a box, which may be impossible ones."""
Case = tuple[Shape, list[Sides]]
SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)


@st.composite
def guillotine(draw: st.DrawFn, region: Box) -> list[Box]:
    """A tiling by cuts from side to side."""
    dims = [dim for dim, length in enumerate(region.lengths) if length > 1]
    if not dims or draw(st.integers(0, 3)) == 0:
        return [region]
    dim = draw(st.sampled_from(dims))
    at = draw(st.integers(1, region.lengths[dim] - 1))
    low, high = part(region, dim, 0, at), part(region, dim, at, region.lengths[dim])
    return [*draw(guillotine(low)), *draw(guillotine(high))]


def part(box: Box, dim: int, start: int, stop: int) -> Box:
    """The indices from start to stop of the box along one dimension."""
    offsets, lengths = list(box.offsets), list(box.lengths)
    offsets[dim], lengths[dim] = offsets[dim] + start, stop - start
    return Box(tuple(offsets), tuple(lengths))


@st.composite
def flat(draw: st.DrawFn, region: Box) -> list[Box]:
    """A tiling by flat ranges."""
    cuts = draw(st.lists(st.integers(0, region.volume), max_size=6))
    edges = sorted({0, *cuts, region.volume})
    return [
        box for edge in itertools.pairwise(edges) for box in flat_to_boxes(region.lengths, *edge)
    ]


@st.composite
def pinwheel(draw: st.DrawFn, region: Box) -> list[Box]:
    """A tiling that no plane parts, in two of the dimensions."""
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
    """A shape and boxes that tile it."""
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
    """How often each element is stored, and whether some box has no elements or sticks out."""
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
    """The kinds of flaws there are."""
    times, outside = count(shape, boxes)
    found = {
        "missing": (times == 0).any(),
        "stored twice": (times > 1).any(),
        "out of bounds": outside,
    }
    return {kind for kind, present in found.items() if present}


def columns(boxes: Sequence[Sides], ndim: int) -> tuple[Ints, Ints]:
    """Offsets and lengths as (n, ndim) arrays."""
    offsets = np.array([box[0] for box in boxes], dtype=np.int64)
    lengths = np.array([box[1] for box in boxes], dtype=np.int64)
    return offsets.reshape(len(boxes), ndim), lengths.reshape(len(boxes), ndim)


def tables(cases: Sequence[Case], ndim: int = 4) -> tuple[TensorTable, ShardTable]:
    """The tensor and shard tables of several shapes with their boxes."""
    n = len(cases)
    shape = np.array([[*shape, *[1] * (ndim - len(shape))] for shape, _ in cases])
    names = tuple(f"t{row}" for row in range(n))
    dims = np.array([len(shape) for shape, _ in cases])
    nobody = np.full(n, -1)
    tensors = TensorTable(
        names, np.zeros(n, dtype=np.uint8), (("int8", 1),), dims, shape, nobody, nobody
    )
    rows = [
        (row, [*offsets, *[0] * (ndim - len(offsets))], [*lengths, *[1] * (ndim - len(lengths))])
        for row, (_, boxes) in enumerate(cases)
        for offsets, lengths in boxes
    ]
    tensor = np.array([row for row, _, _ in rows], dtype=np.int64)
    zeros = np.zeros_like(tensor)
    return tensors, ShardTable(tensor, *columns([row[1:] for row in rows], ndim), zeros, zeros)


@examples(150)
@given(tilings())
def test_tilings_are_accepted(case: tuple[Shape, list[Box]]) -> None:
    """However a tensor is tiled, there is no error; and that is known without a second look."""
    shape, boxes = case
    tensors, shards = tables([(shape, [(box.offsets, box.lengths) for box in boxes])])
    assert coverage_errors(tensors, shards) == []
    assert flawed(tensors.shape, shards.tensor, shards.offsets, shards.lengths).tolist() == [False]


@examples(400)
@given(nearly_tilings())
def test_flaws_are_those_counted(case: Case) -> None:
    """The kinds of flaws found are exactly those that counting finds, and each example is one."""
    shape, boxes = case
    times, _ = count(shape, boxes)
    found = flaws(shape, *columns(boxes, len(shape)))
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
