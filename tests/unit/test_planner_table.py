"""The tables: look-ups, columns, and the sentences about shards that do not cover their tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from holdfast.planner import coverage
from holdfast.planner.box import Box
from holdfast.planner.table import ShardTable, TensorTable, coverage_errors

Indices = tuple[int, ...]
Row = tuple[int, Indices, Indices]


def tensor_table(
    shapes: Sequence[Indices],
    *,
    owner: list[int] | None = None,
    alias: list[int] | None = None,
    names: Sequence[str] | None = None,
) -> TensorTable:
    """A table of float32 tensors."""
    ndim = np.array([len(shape) for shape in shapes])
    padded = np.ones((len(shapes), max(ndim, default=0)), dtype=np.int64)
    for row, shape in enumerate(shapes):
        padded[row, : len(shape)] = shape
    nothing = np.full(len(shapes), -1)
    return TensorTable(
        names=tuple(names or (f"t{row}" for row in range(len(shapes)))),
        dtype=np.zeros(len(shapes), dtype=np.uint8),
        dtypes=(("float32", 4),),
        ndim=ndim,
        shape=padded,
        alias=nothing if alias is None else np.array(alias),
        owner=nothing if owner is None else np.array(owner),
    )


def shard_table(rows: Sequence[Row], ndim: int = 2) -> ShardTable:
    """Shards from rows (tensor, offsets, lengths)."""
    offsets, lengths = (
        np.zeros((len(rows), ndim), dtype=np.int64),
        np.ones((len(rows), ndim), dtype=np.int64),
    )
    for index, (_, offset, length) in enumerate(rows):
        offsets[index, : len(offset)], lengths[index, : len(length)] = offset, length
    tensor = np.array([row for row, _, _ in rows], dtype=np.int64)
    return ShardTable(tensor, offsets, lengths, np.arange(len(rows)), 100 * np.arange(len(rows)))


def test_find_prefers_the_ranks_own_row() -> None:
    """A rank finds its own row; a rank of a larger job gets one in turn."""
    table = tensor_table([(1,)] * 4, names=["rng", "rng", "w", "rng"], owner=[4, 0, -1, 2])
    assert table.rows["rng"] == (0, 1, 3)
    assert [table.find("rng", rank) for rank in (0, 2, 4, 1, 3, 5)] == [1, 3, 0, 3, 1, 0]
    assert (table.find("rng"), table.find_all(["rng"]).tolist()) == (1, [1])


def test_find_all_finds_what_find_does() -> None:
    """Many names at once, with and without owners; -1 stands for a name that is not there."""
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
def test_boxes_out_of_bounds_are_named(offsets: Indices, lengths: Indices) -> None:
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
