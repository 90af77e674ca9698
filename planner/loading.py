"""Plans a load: from the targets of a rank and the stored images to byte ranges to read and copies.

Reads are whole blocks, the unit of checksum, and stay within one chunk, the unit of I/O, or within
several. A byte is read once even if several targets want it. Every step works on whole columns;
nothing loops over tensors or shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ..core.units import round_up
from .box import Box, flat_to_boxes, intersect, row_strides
from .columns import Ints, contiguous, cut, flat_starts, ranges, strides, union, volumes, widen
from .image import BLOCK_NBYTES, CHUNK_NBYTES
from .layout import Regions
from .table import ShardTable, TensorTable

# Pairs of a target and a shard of its tensor examined at once; limits the memory of planning.
PAIRS_PER_BATCH = 1 << 22


@dataclass(frozen=True, eq=False)
class Targets(Regions):
    """Boxes that one rank wants.

    ``tensor``          (n,) row in the checkpoint's TensorTable; not an alias
    ``buffer``          (n,) index of the caller's local tensor
    """

    buffer: Ints


@dataclass(frozen=True, eq=False)
class LoadPlan:
    """P reads, the C copies that they allow, and the pairs of a shard and a target behind the
    copies.

    Reads ascend by image and start and are disjoint. Each lies between two multiples of the read
    unit, usually a chunk, and extends from one block boundary to another or to hashed_end:

    ``image``     (P,)
    ``start``     (P,) bytes of the image's file
    ``stop``      (P,)

    The copies of read r are the rows from ``first[r]`` to ``first[r + 1]``:

    ``first``     (P + 1,)
    ``pair``      (C,) row of the pair columns
    ``src``       (C,) offset in the image's file, in bytes, of the first byte to copy
    ``nbytes``    (C,) bytes from there on
    ``dst``       (C,) offset, in bytes, in the C-contiguous local tensor; or -1 if the elements are
                  not one run on both sides: then ``src`` and ``nbytes`` are a range of the stored
                  box, in whole elements, and ``strided_copies`` returns the copies within it

    A pair; its box is the intersection of shard and target, in elements of the global tensor:

    ``shard``     row of the ShardTable
    ``target``    row of the Targets
    ``offsets``   (pairs, D)
    ``lengths``   (pairs, D)
    """

    image: Ints
    start: Ints
    stop: Ints
    first: Ints
    pair: Ints
    src: Ints
    nbytes: Ints
    dst: Ints
    shard: Ints
    target: Ints
    offsets: Ints
    lengths: Ints
    bytes_wanted: int


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Pairs and their positions. Byte offsets run through all images, one after the other."""

    shard: Ints
    target: Ints
    offsets: Ints
    lengths: Ints
    stored: Ints  # lengths of the stored box
    itemsize: Ints
    start: Ints  # first wanted byte of the stored box
    stop: Ints  # past the last wanted byte of the stored box
    end: Ints  # end of the image's blocks
    dst: Ints  # byte offset in the local tensor, or -1


def plan_load(
    tensors: TensorTable,
    shards: ShardTable,
    targets: Targets,
    hashed_end: Ints,
    *,
    chunk_nbytes: int = CHUNK_NBYTES,
    block_nbytes: int = BLOCK_NBYTES,
    gap_nbytes: int = 0,
) -> LoadPlan:
    """Plan the load of ``targets`` from images whose blocks end at ``hashed_end`` (images,).

    Ranges at most ``gap_nbytes`` apart are read as one. Raises ValueError if shards do not cover a
    target exactly once (``coverage_errors`` reports that beforehand), lie outside their image, or
    are not aligned to their elements.
    """
    if chunk_nbytes % block_nbytes:
        raise ValueError(
            f"chunks of {chunk_nbytes} bytes are not a whole number of blocks of {block_nbytes}"
        )
    # Put all images on one line, each at a chunk boundary, too far apart to be merged. From here
    # on, ranges are 1-D.
    room = round_up(hashed_end + gap_nbytes + 1, chunk_nbytes)
    base = np.cumsum(room) - room
    shards, targets = _same_ndim(shards, targets)
    pairs = _pairs(tensors, shards, targets, base, hashed_end)
    _check(tensors, shards, targets, pairs, block_nbytes)
    run_pair, run_start, run_stop = _runs(pairs, block_nbytes)
    start = run_start // block_nbytes * block_nbytes
    stop = np.minimum(round_up(run_stop, block_nbytes), pairs.end[run_pair])
    start, stop = cut(*union(start, stop, gap_nbytes), chunk_nbytes)
    pair, read = _overlaps(run_pair, run_start, run_stop, start, stop)
    return _plan(pairs, base, start, stop, pair, read)


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """A ``box`` in elements of the global tensor, at byte ``start`` of the image's file.

    ``strides``: distances of its elements there, in elements.
    """

    box: Box
    start: int
    strides: tuple[int, ...]


def strided_copies(
    tensors: TensorTable, shards: ShardTable, plan: LoadPlan, copy: int
) -> Iterator[StridedCopy]:
    """Yield the parts of a copy of ``plan`` whose elements are not one run on both sides."""
    pair = int(plan.pair[copy])
    shard = int(plan.shard[pair])
    row = int(shards.tensor[shard])
    ndim = int(tensors.ndim[row])
    itemsize = int(tensors.itemsize[row])
    stored = _box(shards.offsets[shard], shards.lengths[shard], ndim)
    wanted = _box(plan.offsets[pair], plan.lengths[pair], ndim)
    start = int(shards.start[shard])
    first = (int(plan.src[copy]) - start) // itemsize
    last = first + int(plan.nbytes[copy]) // itemsize
    strides = row_strides(stored.lengths)
    for box in flat_to_boxes(stored.lengths, first, last):
        part = intersect(box.shifted(stored.offsets), wanted)
        if part is None:
            continue
        steps = zip(part.offsets, stored.offsets, strides, strict=True)
        at = sum((a - b) * stride for a, b, stride in steps)
        yield StridedCopy(part, start + at * itemsize, strides)


def _box(offsets: Ints, lengths: Ints, ndim: int) -> Box:
    return Box(tuple(offsets[:ndim].tolist()), tuple(lengths[:ndim].tolist()))


def _same_ndim(shards: ShardTable, targets: Targets) -> tuple[ShardTable, Targets]:
    """Return both, padded to the larger number of dimensions."""
    ndim = max(shards.offsets.shape[1], targets.offsets.shape[1])
    offsets = widen(shards.offsets, ndim, 0)
    lengths = widen(shards.lengths, ndim, 1)
    return (
        ShardTable(shards.tensor, offsets, lengths, shards.image, shards.start),
        replace(
            targets,
            offsets=widen(targets.offsets, ndim, 0),
            lengths=widen(targets.lengths, ndim, 1),
            local_shape=widen(targets.local_shape, ndim, 1),
        ),
    )


def _meeting(shards: ShardTable, targets: Targets, n_tensors: int) -> tuple[Ints, Ints]:
    """Return the pairs of shards and targets that have elements in common, ascending by target."""
    found = [
        _with_common_elements(shards, targets, shard, target)
        for shard, target in _candidates(shards.pointers(n_tensors), targets.tensor)
    ]
    none = np.empty(0, dtype=np.int64)
    return (
        np.concatenate([none, *(shard for shard, _ in found)]),
        np.concatenate([none, *(target for _, target in found)]),
    )


def _candidates(pointers: Ints, tensor: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Yield each target with each shard of its tensor, in batches ``(shard, target)``."""
    counts = pointers[tensor + 1] - pointers[tensor]
    batch = np.cumsum(counts) // PAIRS_PER_BATCH
    edges = [0, *(np.flatnonzero(np.diff(batch)) + 1).tolist(), len(tensor)]
    for low, high in itertools.pairwise(edges):
        target, shard = ranges(pointers[tensor[low:high]], counts[low:high])
        yield shard, target + low


def _with_common_elements(
    shards: ShardTable, targets: Targets, shard: Ints, target: Ints
) -> tuple[Ints, Ints]:
    meets = np.ones(len(shard), dtype=np.bool_)
    for dim in range(shards.offsets.shape[1]):
        stored = shards.offsets[shard, dim]
        wanted = targets.offsets[target, dim]
        meets &= np.minimum(
            stored + shards.lengths[shard, dim], wanted + targets.lengths[target, dim]
        ) > np.maximum(stored, wanted)
    return shard[meets], target[meets]


def _pairs(
    tensors: TensorTable, shards: ShardTable, targets: Targets, base: Ints, hashed_end: Ints
) -> _Pairs:
    """Return the intersections of shards and targets; images begin at ``base`` on the line."""
    shard, target = _meeting(shards, targets, len(tensors))
    stored_offsets = shards.offsets[shard]
    stored = shards.lengths[shard]
    image = shards.image[shard]
    wanted_offsets = targets.offsets[target]
    local_shape = targets.local_shape[target]
    offsets = np.maximum(stored_offsets, wanted_offsets)
    lengths = (
        np.minimum(stored_offsets + stored, wanted_offsets + targets.lengths[target]) - offsets
    )
    itemsize = tensors.itemsize[shards.tensor[shard]]
    start = base[image] + shards.start[shard]
    within = offsets - stored_offsets
    local = targets.local_start[target] + flat_starts(offsets - wanted_offsets, local_shape)
    straight = contiguous(lengths, stored) & contiguous(lengths, local_shape)
    return _Pairs(
        shard,
        target,
        offsets,
        lengths,
        stored,
        itemsize,
        start=start + flat_starts(within, stored) * itemsize,
        stop=start + (flat_starts(within + lengths - 1, stored) + 1) * itemsize,
        end=(base + hashed_end)[image],
        dst=np.where(straight, local * itemsize, -1),
    )


def _check(
    tensors: TensorTable, shards: ShardTable, targets: Targets, pairs: _Pairs, block_nbytes: int
) -> None:
    sums = np.append(0, np.cumsum(volumes(pairs.lengths)))
    first = np.searchsorted(pairs.target, np.arange(len(targets) + 1))
    stored = sums[first[1:]] - sums[first[:-1]]
    wanted = volumes(targets.lengths)
    for row in np.flatnonzero(stored != wanted)[:1]:
        name = tensors.names[targets.tensor[row]]
        raise ValueError(f"{name}: the shards have {stored[row]} of {wanted[row]} wanted elements")
    start = shards.start[pairs.shard]
    outside = (pairs.stop > pairs.end) | (start < 0)
    # A read that ends inside an element would tear it. Elements copied as one run of bytes need no
    # alignment.
    torn = (pairs.dst < 0) & ((block_nbytes % pairs.itemsize != 0) | (start % pairs.itemsize != 0))
    for flaw, rows in (
        ("lies outside its image", outside),
        ("is not aligned to its elements", torn),
    ):
        for pair in np.flatnonzero(rows)[:1]:
            name = tensors.names[targets.tensor[pairs.target[pair]]]
            raise ValueError(f"{name}: shard {pairs.shard[pair]} {flaw}")


def _runs(pairs: _Pairs, block_nbytes: int) -> tuple[Ints, Ints, Ints]:
    """Return the runs of stored bytes that pairs want: the pair, ascending, and start and stop.

    Runs with less than a block between them count as one, because their blocks cover the gap
    anyway.
    """
    counts, nelems = _collapsed(pairs, block_nbytes)
    number = volumes(counts)
    pair, index = ranges(np.zeros_like(number), number)
    if len(pair) == len(number):
        return pair, pairs.start, pairs.start + nelems * pairs.itemsize
    position = np.zeros_like(pair)
    steps = strides(pairs.stored)
    for dim in range(counts.shape[1] - 1, -1, -1):
        index, within = np.divmod(index, counts[pair, dim])
        position += within * steps[pair, dim]
    start = pairs.start[pair] + position * pairs.itemsize[pair]
    return pair, start, start + (nelems * pairs.itemsize)[pair]


def _collapsed(pairs: _Pairs, block_nbytes: int) -> tuple[Ints, Ints]:
    """Return each pair's repeated runs per dimension (n, D), and the elements of a run (n,)."""
    steps = strides(pairs.stored)
    counts = pairs.lengths.copy()
    nelems = np.ones(len(counts), dtype=np.int64)
    joined = np.ones(len(counts), dtype=np.bool_)
    for dim in range(counts.shape[1] - 1, -1, -1):
        gap = (steps[:, dim] - nelems) * pairs.itemsize
        # Once a dimension is not joined, the dimensions outside it repeat whole sets of runs, and
        # cannot be joined either.
        joined &= (counts[:, dim] == 1) | (gap < block_nbytes)
        nelems = np.where(joined, (counts[:, dim] - 1) * steps[:, dim] + nelems, nelems)
        counts[:, dim] = np.where(joined, 1, counts[:, dim])
    return counts, nelems


def _overlaps(
    run_pair: Ints, run_start: Ints, run_stop: Ints, start: Ints, stop: Ints
) -> tuple[Ints, Ints]:
    """Return each ``(pair, read)`` whose read holds bytes of the pair, ascending by read."""
    first = np.searchsorted(stop, run_start, side="right").astype(np.int64, copy=False)
    run, read = ranges(first, np.searchsorted(start, run_stop, side="left") - first)
    pair = run_pair[run]
    # The runs of a pair are ascending, so repeated combinations are adjacent.
    new = np.append(True, (pair[1:] != pair[:-1]) | (read[1:] != read[:-1]))[: len(pair)]
    order = np.argsort(read[new], kind="stable")
    return pair[new][order], read[new][order]


def _plan(pairs: _Pairs, base: Ints, start: Ints, stop: Ints, pair: Ints, read: Ints) -> LoadPlan:
    """Return the plan of reads [start, stop) on the line, with a copy for each ``(pair, read)``."""
    image = np.searchsorted(base, start, side="right").astype(np.int64, copy=False) - 1
    src = np.maximum(start[read], pairs.start[pair])
    dst = pairs.dst[pair]
    return LoadPlan(
        image=image,
        start=start - base[image],
        stop=stop - base[image],
        first=np.searchsorted(read, np.arange(len(start) + 1)).astype(np.int64, copy=False),
        pair=pair,
        src=src - base[image[read]],
        nbytes=np.minimum(stop[read], pairs.stop[pair]) - src,
        dst=np.where(dst < 0, -1, dst + src - pairs.start[pair]),
        shard=pairs.shard,
        target=pairs.target,
        offsets=pairs.offsets,
        lengths=pairs.lengths,
        bytes_wanted=int((volumes(pairs.lengths) * pairs.itemsize).sum()),
    )
