"""Load plans: which bytes are read for what, in small cases with the answers written out."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.planner.box import Box
from holdfast.planner.loading import LoadPlan, Targets, plan_load, strided_parts
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


def test_a_slice_is_read_in_blocks() -> None:
    """A slice of a stored tensor is read from the block it begins in to the end of the block it
    ends in."""
    made = plan(one_tensor(1000), stored(((0,), (1000,), 0, 64)), wanted(((100,), (50,))), [1088])
    assert reads(made) == [(0, 128, 256)]
    assert copies(made) == [(164, 50, 0)]
    assert (made.bytes_wanted, made.bytes_planned) == (50, 128)


def test_reads_stay_within_a_chunk() -> None:
    """A range that crosses a chunk boundary is two reads, with the copy cut at the boundary."""
    made = plan(one_tensor(1000), stored(((0,), (1000,), 0, 64)), wanted(((100,), (200,))), [1088])
    assert reads(made) == [(0, 128, 256), (0, 256, 384)]
    assert copies(made) == [(164, 92, 0), (256, 108, 92)]
    assert made.first.tolist() == [0, 1, 2]


def test_the_last_read_ends_with_the_hashed_part() -> None:
    """Where the hashed part ends inside a block, so does the read."""
    made = plan(one_tensor(100), stored(((0,), (100,), 0, 0)), wanted(((90,), (10,))), [110])
    assert reads(made) == [(0, 64, 110)]


def test_a_range_wanted_twice_is_read_once() -> None:
    """Two buffers that want the same elements share the read and get a copy each."""
    made = plan(
        one_tensor(64), stored(((0,), (64,), 0, 0)), wanted(((0,), (40,)), ((30,), (20,))), [64]
    )
    assert reads(made) == [(0, 0, 64)]
    assert copies(made) == [(0, 40, 0), (30, 20, 0)]
    assert made.target[made.pair].tolist() == [0, 1]


def test_a_target_gathers_from_several_images() -> None:
    """The parts of a target come from the images that store them, each to its place."""
    shards = stored(((0, 0), (2, 8), 1, 64), ((2, 0), (2, 8), 0, 128))
    made = plan(one_tensor(4, 8), shards, wanted(((1, 0), (3, 8))), [192, 128])
    assert reads(made) == [(0, 128, 192), (1, 64, 128)]
    assert copies(made) == [(128, 16, 8), (72, 8, 0)]
    assert made.shard[made.pair].tolist() == [1, 0]


def test_columns_close_together_are_read_as_one() -> None:
    """Columns whose gaps are smaller than a block are read with the gaps, as a strided copy."""
    made = plan(one_tensor(8, 16), stored(((0, 0), (8, 16), 0, 0)), wanted(((0, 4), (8, 2))), [128])
    assert reads(made) == [(0, 0, 128)]
    assert copies(made) == [(4, 114, -1)]


def test_columns_far_apart_are_read_each() -> None:
    """Columns of long rows are read a block each, and nothing between them."""
    made = plan(
        one_tensor(3, 200), stored(((0, 0), (3, 200), 0, 0)), wanted(((0, 10), (3, 5))), [640]
    )
    assert reads(made) == [(0, 0, 64), (0, 192, 256), (0, 384, 448)]
    # The second run is 210 to 215. Each copy's range is what its read holds of the span from the
    # first run to the last.
    assert copies(made) == [(10, 54, -1), (192, 64, -1), (384, 31, -1)]


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


def test_a_strided_buffer_is_filled_by_a_strided_copy() -> None:
    """One run in the image that is several in the local tensor has no single destination."""
    targets = Targets(
        *(np.array(column) for column in ([0], [[0, 0]], [[4, 4]], [2], [[4, 8]], [0]))
    )
    made = plan(one_tensor(4, 4), stored(((0, 0), (4, 4), 0, 0)), targets, [64])
    assert copies(made) == [(0, 16, -1)]


def test_destinations_are_in_bytes() -> None:
    """Destinations count bytes of the local tensor, from the target's place in it."""
    targets = Targets(*(np.array(column) for column in ([0], [[4]], [[4]], [3], [[10]], [0])))
    made = plan(one_tensor(8, itemsize=8), stored(((0,), (8,), 0, 0)), targets, [64])
    assert copies(made) == [(32, 32, 24)]


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


def test_nothing_wanted_is_nothing_read() -> None:
    """No targets, or targets without elements, make an empty plan."""
    nothing = plan(one_tensor(8), stored(((0,), (8,), 0, 0)), wanted(((0,), (0,))), [64])
    assert (reads(nothing), copies(nothing), nothing.first.tolist()) == ([], [], [0])
    assert (nothing.bytes_wanted, nothing.bytes_planned) == (0, 0)


def test_scalars_load() -> None:
    """A tensor without dimensions is one element."""
    made = plan(one_tensor(itemsize=4), stored(((), (), 0, 60)), wanted(((), ())), [64])
    assert copies(made) == [(60, 4, 0)]


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


def test_sizes_that_do_not_fit_are_refused() -> None:
    """Chunks that are no whole number of blocks raise."""
    with pytest.raises(ValueError, match="whole number of blocks"):
        plan_load(
            one_tensor(8),
            stored(((0,), (8,), 0, 0)),
            wanted(((0,), (8,))),
            np.array([64]),
            chunk_nbytes=100,
            block_nbytes=64,
        )


def test_strided_parts() -> None:
    """Of a flat range of the stored box, the parts that are wanted, in coordinates of the tensor."""
    stored_box, wanted_box = Box((10, 0), (4, 5)), Box((11, 1), (3, 2))
    assert strided_parts(stored_box, wanted_box, 0, 20) == [wanted_box]
    assert strided_parts(stored_box, wanted_box, 7, 12) == [
        Box((11, 2), (1, 1)),
        Box((12, 1), (1, 1)),
    ]
    assert strided_parts(stored_box, wanted_box, 0, 6) == []


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
