"""Load plans: which bytes are read for what, in small cases with the answers written out."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.planner.loading import LoadPlan, Targets, plan_load
from holdfast.planner.table import ShardTable, TensorTable

BLOCK, CHUNK = 64, 256
Indices = tuple[int, ...]


def one_tensor(*shape: int, itemsize: int = 1) -> TensorTable:
    """A table of one tensor."""
    column = np.zeros(1, dtype=np.int64)
    nobody = column - 1
    return TensorTable(
        names=("w",),
        dtype=column.astype(np.uint8),
        dtypes=(("x", itemsize),),
        ndim=column + len(shape),
        shape=np.array([shape], dtype=np.int64),
        alias=nobody,
        owner=nobody,
    )


def stored(*rows: tuple[Indices, Indices, int, int]) -> ShardTable:
    """Shards of tensor 0 from rows (offsets, lengths, image, start)."""
    offsets, lengths, image, start = (
        np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)
    )
    return ShardTable(np.zeros(len(rows), dtype=np.int64), offsets, lengths, image, start)


def wanted(*boxes: tuple[Indices, Indices]) -> Targets:
    """Each box of tensor 0 as the whole of a buffer of its own."""
    offsets, lengths = (np.array(column, dtype=np.int64) for column in zip(*boxes, strict=True))
    rows = np.arange(len(boxes))
    return Targets(np.zeros_like(rows), offsets, lengths, np.zeros_like(rows), lengths, rows)


def plan(
    tensors: TensorTable,
    shards: ShardTable,
    targets: Targets,
    hashed_end: list[int],
    **options: int,
) -> LoadPlan:
    """A plan in small blocks and chunks."""
    return plan_load(
        tensors,
        shards,
        targets,
        np.array(hashed_end),
        chunk_nbytes=CHUNK,
        block_nbytes=BLOCK,
        **options,
    )


def reads(plan: LoadPlan) -> list[tuple[int, int, int]]:
    """The reads of a plan as rows (image, start, stop)."""
    return list(zip(plan.image.tolist(), plan.start.tolist(), plan.stop.tolist(), strict=True))


def copies(plan: LoadPlan) -> list[tuple[int, int, int]]:
    """The copies of a plan as rows (src, nbytes, dst)."""
    return list(zip(plan.src.tolist(), plan.nbytes.tolist(), plan.dst.tolist(), strict=True))


def test_gaps_are_bridged_when_asked() -> None:
    """Ranges at most the gap apart are read as one, those further apart are not."""
    shards = stored(((0,), (1000,), 0, 0))
    both = wanted(((0,), (10,)), ((128,), (10,)))
    assert reads(plan(one_tensor(1000), shards, both, [1024])) == [(0, 0, 64), (0, 128, 192)]
    assert reads(plan(one_tensor(1000), shards, both, [1024], gap_nbytes=63)) == [
        (0, 0, 64),
        (0, 128, 192),
    ]
    assert reads(plan(one_tensor(1000), shards, both, [1024], gap_nbytes=64)) == [(0, 0, 192)]


@pytest.mark.parametrize("gap", [192, 10_000])
def test_gaps_are_not_bridged_between_images(gap: int) -> None:
    """The end of one image and the begin of the next are never one read, however large the gap."""
    shards = stored(((0,), (64,), 0, 0), ((64,), (64,), 1, 0))
    made = plan(one_tensor(128), shards, wanted(((0,), (128,))), [64, 64], gap_nbytes=gap)
    assert reads(made) == [(0, 0, 64), (1, 0, 64)]


@pytest.mark.parametrize(("width", "nbytes"), [(2, (1 << 34) - 14), (16, 1 << 34)])
def test_planning_does_not_grow_with_the_tensor(width: int, nbytes: int) -> None:
    """A billion rows, or columns of them with small gaps, are one run: planned as fast as a few."""
    rows = 1 << 30
    shards, targets = stored(((0, 0), (rows, 16), 0, 0)), wanted(((0, 0), (rows, width)))
    made = plan_load(
        one_tensor(rows, 16), shards, targets, np.array([1 << 34]), chunk_nbytes=1 << 34
    )
    assert reads(made) == [(0, 0, 1 << 34)]
    assert made.nbytes.tolist() == [nbytes]


def test_tables_of_different_width_meet() -> None:
    """Shards and targets may be padded to different numbers of dimensions."""
    narrow, broad = stored(((0,), (100,), 0, 0)), stored(((0, 0, 0), (100, 1, 1), 0, 0))
    one, three = wanted(((64,), (30,))), wanted(((64, 0, 0), (30, 1, 1)))
    for shards, targets in ((narrow, three), (broad, one)):
        made = plan(one_tensor(100), shards, targets, [128])
        assert (reads(made), copies(made)) == ([(0, 64, 128)], [(64, 30, 0)])
        assert (made.offsets.tolist(), made.lengths.tolist()) == ([[64, 0, 0]], [[30, 1, 1]])


def test_incomplete_tables_are_refused() -> None:
    """A target that shards do not cover, or cover twice, raises and names the tensor."""
    half = stored(((0,), (4,), 0, 0))
    with pytest.raises(ValueError, match="w: the shards have 4 of 8 wanted elements"):
        plan(one_tensor(8), half, wanted(((0,), (8,))), [64])
    twice = stored(((0,), (8,), 0, 0), ((2,), (3,), 0, 8))
    with pytest.raises(ValueError, match="w: the shards have 11 of 8 wanted elements"):
        plan(one_tensor(8), twice, wanted(((0,), (8,))), [64])


@pytest.mark.parametrize("start", [-1, 57])
def test_shards_outside_their_image_are_refused(start: int) -> None:
    """A shard that begins before its image or ends behind it raises."""
    with pytest.raises(ValueError, match="lies outside its image"):
        plan(one_tensor(8), stored(((0,), (8,), 0, start)), wanted(((0,), (8,))), [64])


def test_elements_that_a_read_would_tear_are_refused() -> None:
    """A strided copy needs elements that end where blocks do; one run of bytes does not."""
    shards = stored(((0, 0), (4, 4), 0, 2))
    with pytest.raises(ValueError, match="aligned"):
        plan(one_tensor(4, 4, itemsize=4), shards, wanted(((0, 0), (4, 2))), [128])
    assert copies(plan(one_tensor(4, 4, itemsize=4), shards, wanted(((1, 0), (2, 4))), [128])) == [
        (18, 32, 0)
    ]


def test_many_pairs_go_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning in small batches gives the same plan as in one."""
    shards = stored(*(((4 * row,), (4,), 0, 4 * row) for row in range(16)))
    targets = wanted(*(((3 * row,), (20,)) for row in range(10)))
    whole = plan(one_tensor(64), shards, targets, [64])
    monkeypatch.setattr("holdfast.planner.loading.PAIRS_PER_BATCH", 7)
    parts = plan(one_tensor(64), shards, targets, [64])
    assert copies(parts) == copies(whole)
    assert parts.shard.tolist() == whole.shard.tolist()
    assert parts.target.tolist() == whole.target.tolist()
