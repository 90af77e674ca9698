"""From any layout into any other: plans are executed in memory, and small ones checked by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.effort import examples

from holdfast.planner.box import Box, row_strides
from holdfast.planner.columns import Ints
from holdfast.planner.image import ImageLayout, lay_out
from holdfast.planner.layout import FlatLayout
from holdfast.planner.loading import LoadPlan, StridedCopy, Targets, plan_load, strided_copies
from holdfast.planner.placement import Placement, Replicated, Split, holders, local_pieces
from holdfast.planner.placement import local_shape as local_shape_of
from holdfast.planner.saving import Holdings, divide
from holdfast.planner.sharing import Sharing, WantedRanges, regrouped, share
from holdfast.planner.table import ShardTable, TensorTable, coverage_errors

NDIM = 4
BLOCK, CHUNK = 16, 64  # small, so that small tensors cross many of them
Indices = tuple[int, ...]
DTYPES = ["uint8", "int16", "float32", "int64", "complex128"]


Shape = tuple[int, ...]
Array = npt.NDArray[np.generic]
Bytes = npt.NDArray[np.uint8]


@dataclass
class Held:
    """A part of a tensor that a rank holds, its place in a buffer, and its other holders."""

    tensor: int
    box: Box
    buffer: int
    local_start: int
    local_shape: tuple[int, ...]
    buffer_shape: tuple[int, ...]
    group: tuple[int, ...]


def inset(tensor: int, box: Box, buffer: int, by: int) -> Held:
    """Return the part of one rank whose buffer is larger than the box by ``by`` on each side."""
    local_shape = tuple(length + 2 * by for length in box.lengths)
    local_start = int(np.dot([by] * box.ndim, row_strides(local_shape)))
    return Held(tensor, box, buffer, local_start, local_shape, local_shape, (0,))


@st.composite
def placements(draw: st.DrawFn, ndim: int, mesh: Shape) -> list[Placement]:
    """Draw placements of a tensor on a mesh."""
    splits = [Split(dim, stride) for dim in range(ndim) for stride in (1, 1, 2, 3)]
    choices: list[Placement] = [Replicated(), *splits]
    return [draw(st.sampled_from(choices)) for _ in mesh]


@st.composite
def layouts(draw: st.DrawFn, shapes: Sequence[Shape]) -> list[list[Held]]:
    """Draw the holdings of each rank: by placements on a mesh, or as flat ranges."""
    mesh = draw(st.sampled_from([(1,), (2,), (3,), (5,), (2, 2), (3, 2), (2, 1, 2)]))
    ranks = np.arange(math.prod(mesh)).reshape(mesh)
    layout: list[list[Held]] = [[] for _ in range(ranks.size)]
    for tensor, shape in enumerate(shapes):
        flat: bool = draw(st.booleans())
        if shape and flat:
            cuts = sorted(draw(st.integers(0, math.prod(shape))) for _ in range(ranks.size - 1))
            for rank, (start, stop) in enumerate(itertools.pairwise([0, *cuts, math.prod(shape)])):
                buffer = len(layout[rank])
                for piece in FlatLayout(tuple(shape), start, stop).pieces:
                    layout[rank].append(
                        Held(
                            tensor,
                            piece.box,
                            buffer,
                            piece.local_start,
                            piece.local_shape,
                            (stop - start,),
                            (rank,),
                        )
                    )
            continue
        chosen = draw(placements(len(shape), mesh))
        for at in itertools.product(*map(range, mesh)):
            rank, group, local = (
                int(ranks[at]),
                holders(ranks, at, chosen),
                local_shape_of(shape, mesh, at, chosen),
            )
            buffer = len(layout[rank])
            for piece in local_pieces(shape, mesh, at, chosen):
                layout[rank].append(
                    Held(tensor, piece.box, buffer, piece.local_start, local, local, group)
                )
    return layout


@st.composite
def windows(draw: st.DrawFn, shapes: Sequence[Shape]) -> list[list[Held]]:
    """Draw one rank that wants any boxes, some repeated or empty, each in its own buffer."""
    held: list[Held] = []
    for tensor in draw(st.lists(st.integers(0, len(shapes) - 1), max_size=5)):
        ends = [sorted(draw(st.integers(0, length)) for _ in "ab") for length in shapes[tensor]]
        box = Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))
        held.append(inset(tensor, box, len(held), draw(st.integers(0, 1))))
    return [held]


def table_of(shapes: Sequence[Shape], dtypes: Sequence[str]) -> TensorTable:
    """Return the tensor table."""
    n = len(shapes)
    codes = tuple((name, np.dtype(name).itemsize) for name in DTYPES)
    dtype = np.array([DTYPES.index(name) for name in dtypes], dtype=np.uint8)
    ndim = np.array([len(shape) for shape in shapes])
    nobody = np.full(n, -1)
    return TensorTable(
        tuple(f"t{row}" for row in range(n)), dtype, codes, ndim, wide(shapes, 1), nobody, nobody
    )


def wide(rows: Sequence[Sequence[int]], fill: int) -> Ints:
    """Return rows as an (n, NDIM) array."""
    return np.array([[*row, *[fill] * (NDIM - len(row))] for row in rows], dtype=np.int64).reshape(
        -1, NDIM
    )


def slices(offsets: Ints, lengths: Ints) -> tuple[slice, ...]:
    """Return an index for a box."""
    return tuple(
        slice(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True)
    )


def save(
    tensors: TensorTable, arrays: Sequence[Array], layout: Sequence[list[Held]]
) -> tuple[list[Bytes], ShardTable, Ints]:
    """Return all images as bytes, with their shards and the ends of their blocks."""
    images, shards, ends = [], [], []
    for rank, held in enumerate(layout):
        groups = tuple(dict.fromkeys(part.group for part in held))
        tensor = np.array([part.tensor for part in held], dtype=np.int64)
        offsets, lengths = (
            wide([part.box.offsets for part in held], 0),
            wide([part.box.lengths for part in held], 1),
        )
        group = np.array([groups.index(part.group) for part in held], dtype=np.int64)
        whole = Holdings(
            tensor,
            offsets,
            lengths,
            np.array([part.local_start for part in held], dtype=np.int64),
            wide([part.local_shape for part in held], 1),
            tensors.itemsize[tensor],
            group,
            groups,
            tensor,
        )
        mine = divide(whole, rank)
        dtypes = [DTYPES[code] for code in tensors.dtype[mine.tensor]]
        names = [f"{row}" for row in range(len(mine))]
        image = lay_out(names, dtypes, mine.lengths, np.full(len(mine), NDIM), mine.itemsize)
        images.append(fill(image, mine, arrays))
        shards.append(
            ShardTable(
                mine.tensor, mine.offsets, mine.lengths, np.full(len(mine), rank), image.start
            )
        )
        ends.append(image.data_end)  # not a whole number of blocks, as hashed_end in real files
    return images, ShardTable.concat(shards), np.array(ends)


def fill(image: ImageLayout, mine: Holdings, arrays: Sequence[Array]) -> Bytes:
    """Return the image's bytes."""
    file = np.zeros(image.nbytes, dtype=np.uint8)
    file[: len(image.header)] = np.frombuffer(image.header, dtype=np.uint8)
    for row, start in enumerate(image.start.tolist()):
        part = arrays[mine.tensor[row]][slices(mine.offsets[row], mine.lengths[row])].tobytes()
        file[start : start + len(part)] = np.frombuffer(part, dtype=np.uint8)
    return file


def targets_of(held: Sequence[Held]) -> tuple[Targets, dict[int, tuple[int, Shape]]]:
    """Return the targets of a rank, and the tensor and shape of each buffer."""
    targets = Targets(
        np.array([part.tensor for part in held], dtype=np.int64),
        wide([part.box.offsets for part in held], 0),
        wide([part.box.lengths for part in held], 1),
        np.array([part.local_start for part in held], dtype=np.int64),
        wide([part.local_shape for part in held], 1),
        np.array([part.buffer for part in held], dtype=np.int64),
    )
    return targets, {part.buffer: (part.tensor, part.buffer_shape) for part in held}


def carry_out(
    tensors: TensorTable,
    shards: ShardTable,
    plan: LoadPlan,
    targets: Targets,
    images: Sequence[Bytes],
    buffers: Mapping[int, Array],
) -> int:
    """Perform a plan with nothing but the bytes it reads; return the number copied."""
    copied = 0
    for read, image in enumerate(plan.image.tolist()):
        start, stop = int(plan.start[read]), int(plan.stop[read])
        data = images[image][start:stop]
        for copy in range(plan.first[read], plan.first[read + 1]):
            pair = plan.pair[copy]
            src, nbytes, dst = (int(column[copy]) for column in (plan.src, plan.nbytes, plan.dst))
            assert start <= src < src + nbytes <= stop
            assert shards.image[plan.shard[pair]] == image
            buffer = buffers[int(targets.buffer[plan.target[pair]])]
            content = data[src - start : src - start + nbytes]
            if dst >= 0:
                buffer.reshape(-1).view(np.uint8)[dst : dst + nbytes] = content
                copied += nbytes
            else:
                assert (src - shards.start[plan.shard[pair]]) % buffer.itemsize == 0
                parts = strided_copies(tensors, shards, plan, copy)
                target = plan.target[pair]
                copied += sum(scatter(p, targets, target, content, src, buffer) for p in parts)
    return copied


def scatter(
    part: StridedCopy, targets: Targets, target: int, content: Bytes, src: int, buffer: Array
) -> int:
    """Copy a strided part; ``content`` begins at byte ``src`` of the image."""
    strides = [stride * buffer.itemsize for stride in part.strides]
    source = np.ndarray(part.box.lengths, buffer.dtype, content, part.start - src, strides)
    at = wide([part.box.offsets], 0)[0] - targets.offsets[target]
    lengths = wide([part.box.lengths], 1)[0]
    buffer.reshape(-1)[local_elements(targets, target, at, lengths)] = source.reshape(lengths)
    return source.nbytes


def local_elements(targets: Targets, target: int, offsets: Ints, lengths: Ints) -> Ints:
    """Return the elements of a target's buffer that a box at ``offsets`` covers."""
    grid = np.ix_(*(np.arange(at, at + n) for at, n in zip(offsets, lengths, strict=True)))
    within = np.ravel_multi_index(grid, targets.local_shape[target])
    elements: Ints = targets.local_start[target] + within
    return elements


def expected_of(
    held: Sequence[Held], arrays: Sequence[Array], buffers: Mapping[int, Array], targets: Targets
) -> dict[int, Array]:
    """Return the expected contents of the buffers, from the tensors themselves."""
    result = {index: np.zeros_like(buffer) for index, buffer in buffers.items()}
    for row, part in enumerate(held):
        content = arrays[part.tensor][slices(targets.offsets[row], targets.lengths[row])]
        at = local_elements(targets, row, np.zeros(NDIM, int), targets.lengths[row])
        result[part.buffer].reshape(-1)[at] = content
    return result


SIZES = st.sampled_from([0, 1, 2, 3, 5, 6, 7, 9, 17])
SHAPES = st.lists(
    st.lists(SIZES, max_size=NDIM).map(tuple).filter(lambda s: math.prod(s) <= 700),
    min_size=1,
    max_size=4,
)

Resharding = tuple[TensorTable, list[Array], list[list[Held]], list[list[Held]], int]
"""Tensors and their content, the layouts saved and wanted, and the gap that a read may bridge."""


@st.composite
def reshardings(draw: st.DrawFn) -> Resharding:
    """Draw tensors, a layout to save them in, and one to load them into."""
    shapes = draw(SHAPES)
    dtypes = [draw(st.sampled_from(DTYPES)) for _ in shapes]
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    arrays = []
    for shape, dtype in zip(wide(shapes, 1), dtypes, strict=True):
        nbytes = int(shape.prod()) * np.dtype(dtype).itemsize
        arrays.append(np.frombuffer(rng.bytes(nbytes), dtype=dtype).reshape(shape))
    gap = draw(st.sampled_from([0, 0, 16, 100]))
    wanted = draw(layouts(shapes) | windows(shapes))
    return table_of(shapes, dtypes), arrays, draw(layouts(shapes)), wanted, gap


@examples(150)
@given(reshardings())
def test_any_layout_loads_into_any_other(case: Resharding) -> None:
    """Any layout is filled bit for bit, from no more blocks than hold a wanted byte."""
    tensors, arrays, saved, loaded, gap = case
    images, shards, ends = save(tensors, arrays, saved)
    assert coverage_errors(tensors, shards) == []
    for held in loaded:
        targets, kinds = targets_of(held)
        buffers = {
            index: np.zeros(shape, dtype=arrays[tensor].dtype)
            for index, (tensor, shape) in kinds.items()
        }
        plan = plan_load(
            tensors, shards, targets, ends, chunk_nbytes=CHUNK, block_nbytes=BLOCK, gap_nbytes=gap
        )
        copied = carry_out(tensors, shards, plan, targets, images, buffers)
        for index, expected in expected_of(held, arrays, buffers, targets).items():
            assert buffers[index].tobytes() == expected.tobytes()
        assert_reads_are_proper(plan, ends)
        if not gap:
            pairs = range(len(plan.shard))
            needed = [blocks_wanted(plan, pair, tensors, shards) for pair in pairs]
            assert {(image, at // BLOCK) for image, at in bytes_of(plan)} == set().union(*needed)
        nbytes = tensors.itemsize[targets.tensor] * targets.lengths.prod(axis=1)
        assert plan.bytes_wanted == copied == nbytes.sum()


def assert_reads_are_proper(plan: LoadPlan | Sharing, ends: Ints) -> None:
    """Reads are ascending and disjoint, whole blocks of one chunk, and each has something to copy."""
    for read, image in enumerate(plan.image.tolist()):
        start, stop = int(plan.start[read]), int(plan.stop[read])
        assert 0 <= start < stop <= ends[image]
        assert start % BLOCK == 0
        assert stop % BLOCK == 0 or stop == ends[image]
        assert start // CHUNK == (stop - 1) // CHUNK
    line = list(zip(plan.image.tolist(), plan.start.tolist(), plan.stop.tolist(), strict=True))
    for (image, _, stop), (next_image, start, _) in itertools.pairwise(line):
        assert image < next_image or (image == next_image and stop <= start)


def blocks_wanted(
    plan: LoadPlan, pair: int, tensors: TensorTable, shards: ShardTable
) -> set[tuple[int, int]]:
    """Return the blocks (image, block) that hold elements of a pair, element by element."""
    shard = plan.shard[pair]
    itemsize, image = int(tensors.itemsize[shards.tensor[shard]]), int(shards.image[shard])
    within = plan.offsets[pair] - shards.offsets[shard]
    grid = np.ix_(
        *(np.arange(low, low + n) for low, n in zip(within, plan.lengths[pair], strict=True))
    )
    start = shards.start[shard] + np.ravel_multi_index(grid, shards.lengths[shard]) * itemsize
    return {(image, block) for block in np.unique(start // BLOCK).tolist()}


@st.composite
def circles(draw: st.DrawFn) -> tuple[Resharding, list[list[Held]]]:
    """Draw a checkpoint, and ranks that load it together, some of them replicas."""
    case = draw(reshardings())
    shapes = [array.shape for array in case[1]]
    ranks = case[3] * draw(st.integers(1, 3)) + draw(
        st.just([]) | layouts(shapes) | windows(shapes)
    )
    return case, ranks


@examples(50)
@given(circles())
def test_ranks_that_share_read_each_wanted_byte_once(
    case: tuple[Resharding, list[list[Held]]],
) -> None:
    """Each wanted byte is read by exactly one rank that wants it, and every rank is filled."""
    (tensors, arrays, saved, _, gap), ranks = case
    images, shards, ends = save(tensors, arrays, saved)
    targets = [targets_of(held) for held in ranks]
    sizes = {"chunk_nbytes": CHUNK, "block_nbytes": BLOCK, "gap_nbytes": gap}
    plans = [plan_load(tensors, shards, wanted, ends, **sizes) for wanted, _ in targets]
    sharing = share(
        [WantedRanges.from_bytes(WantedRanges.of(plan).to_bytes()) for plan in plans], CHUNK
    )
    assert_reads_are_proper(sharing, ends)
    assert bytes_of(sharing) == set().union(*map(bytes_of, plans))
    for member, (held, plan, (wanted, kinds)) in enumerate(zip(ranks, plans, targets, strict=True)):
        wide_plan, units = regrouped(plan, sharing)
        assert_units_are_right(sharing, member, plan, wide_plan, units.tolist())
        buffers = {
            index: np.zeros(shape, dtype=arrays[tensor].dtype)
            for index, (tensor, shape) in kinds.items()
        }
        assert carry_out(tensors, shards, wide_plan, wanted, images, buffers) == plan.bytes_wanted
        for index, expected in expected_of(held, arrays, buffers, wanted).items():
            assert buffers[index].tobytes() == expected.tobytes()


def bytes_of(reads: LoadPlan | Sharing) -> set[tuple[int, int]]:
    """Return every byte that is read, as (image, position)."""
    columns = zip(reads.image.tolist(), reads.start.tolist(), reads.stop.tolist(), strict=True)
    return {(image, at) for image, start, stop in columns for at in range(start, stop)}


def assert_units_are_right(
    sharing: Sharing, member: int, plan: LoadPlan, wide_plan: LoadPlan, units: list[int]
) -> None:
    """Check that a member takes part in the units it wants, and receives only their hull."""
    mine = [
        u
        for u in range(len(sharing.image))
        if member in sharing.member[sharing.first[u] : sharing.first[u + 1]]
    ]
    assert units == mine
    wanted = bytes_of(plan)
    for row, unit in enumerate(units):
        takers = [m for m, _, _ in sharing.takers(unit)]
        assert sharing.reader[unit] not in takers
        assert (member == sharing.reader[unit]) != (member in takers)
        image, low, high = int(sharing.image[unit]), *sharing.hull(unit, member)
        assert (wide_plan.image[row], wide_plan.start[row]) == (image, sharing.start[unit])
        here = [
            at for i, at in wanted if i == image and sharing.start[unit] <= at < sharing.stop[unit]
        ]
        assert (min(here), max(here) + 1) == (low, high)


@examples(30)
@given(st.integers(1, 6), st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_replicas_read_even_parts(members: int, blocks: list[int]) -> None:
    """Replicas read one run each, of an equal share within one chunk."""
    stop = np.array(blocks) * BLOCK
    wish = WantedRanges(np.arange(len(blocks)), np.zeros(len(blocks), np.int64), stop)
    sharing = share([wish] * members, CHUNK)
    loads = np.bincount(sharing.reader, sharing.stop - sharing.start, minlength=members)
    assert loads.sum() == stop.sum()
    assert abs(loads - stop.sum() / members).max() <= CHUNK
    assert (np.diff(sharing.reader) >= 0).all()
    assert sharing.shared_nbytes == (stop.sum() if members > 1 else 0)


def one_tensor(*shape: int, itemsize: int = 1) -> TensorTable:
    """Return a table of one tensor."""
    table = table_of([shape], ["uint8"])
    return replace(table, dtypes=(("x", itemsize),) * len(DTYPES), shape=np.array([shape]))


def stored(*rows: tuple[Indices, Indices, int, int]) -> ShardTable:
    """Return shards of tensor 0 from rows (offsets, lengths, image, start)."""
    offsets, lengths, image, start = (
        np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)
    )
    return ShardTable(np.zeros(len(rows), dtype=np.int64), offsets, lengths, image, start)


def wanted(*boxes: tuple[Indices, Indices]) -> Targets:
    """Return each box of tensor 0 as the whole of its own buffer."""
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
    """Return a plan in small blocks and chunks."""
    return plan_load(
        tensors,
        shards,
        targets,
        np.array(hashed_end),
        chunk_nbytes=4 * CHUNK,
        block_nbytes=4 * BLOCK,
        **options,
    )


def reads(plan: LoadPlan) -> list[tuple[int, int, int]]:
    """Return the reads of a plan as rows (image, start, stop)."""
    return list(zip(plan.image.tolist(), plan.start.tolist(), plan.stop.tolist(), strict=True))


def copies(plan: LoadPlan) -> list[tuple[int, int, int]]:
    """Return the copies of a plan as rows (src, nbytes, dst)."""
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
    with pytest.raises(ValueError, match="t0: the shards have 4 of 8 wanted elements"):
        plan(one_tensor(8), half, wanted(((0,), (8,))), [64])
    twice = stored(((0,), (8,), 0, 0), ((2,), (3,), 0, 8))
    with pytest.raises(ValueError, match="t0: the shards have 11 of 8 wanted elements"):
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
