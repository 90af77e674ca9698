"""Reads ranges of tensors' bytes, in row-major order, however their shards lie. Files over tensors
are read this way, and whatever walks through whole tensors in bounded memory.

Verified as every read is, and without torch: numpy copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...core.units import ceil_div
from ...drivers.contract import Driver
from ...planner.box import Box, flat_to_boxes
from ...planner.columns import Ints, padded
from ...planner.loading import LoadPlan, Targets, strided_copies
from ...planner.table import TensorTable
from ..format.manifest import Manifest
from ..runtime.buffers import HostBuffer, memory_for
from ..runtime.engine import offload
from .image_reader import ImageReader, plan_reads

__all__ = ["FlatRanges", "read_flat", "read_ranges"]

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class FlatRanges:
    """Ranges of tensors' bytes, as columns; all go to the memory ``into``.

    ``row``      (n,) the tensor, which is no alias
    ``start``    (n,) whole elements: from this byte of it
    ``stop``     (n,) to this one
    ``at``       (n,) where in ``into`` they go
    """

    row: Ints
    start: Ints
    stop: Ints
    at: Ints
    into: Bytes

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int, int, int]], into: Bytes) -> FlatRanges:
        """Of row, start, stop and place of each."""
        row, start, stop, at = np.array(list(rows), np.int64).reshape(-1, 4).T
        return cls(row, start, stop, at, into)


async def read_flat(
    driver: Driver, manifest: Manifest, row: int, start: int, stop: int, budget_nbytes: int
) -> memoryview:
    """Bytes [start, stop) of the tensor in ``row``, which is no alias. Reads only the blocks that
    hold them.

    Raises ValueError for a range that is not within the tensor; DamagedError; StorageError.
    """
    itemsize = int(manifest.tensors.itemsize[row])
    first = start // itemsize * itemsize
    last = ceil_div(stop, itemsize) * itemsize
    with memory_for(f"{last - first:,} bytes of a tensor"):
        content = np.empty(last - first, np.uint8)
    wanted = FlatRanges.of([(row, first, last, 0)], content)
    await read_ranges(driver, manifest, [wanted], budget_nbytes)
    return content.data[start - first : stop - first]


async def read_ranges(
    driver: Driver, manifest: Manifest, ranges: Sequence[FlatRanges], budget_nbytes: int
) -> None:
    """Fill all of ``ranges``. Reads only the blocks that hold them, each once. Raises as
    :func:`read_flat` does."""
    targets, places = await offload(_targets, ranges, manifest.tensors)
    plan = await offload(plan_reads, driver, manifest, targets)
    reader = ImageReader(driver, manifest, budget_nbytes)
    delivery = _Delivery(manifest, targets, places, plan)
    await reader.run(plan, delivery.deliver)


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """Where targets go: each to the place ``at`` of one of ``memories``, which ``memory`` says."""

    memories: Sequence[Bytes]
    memory: Ints
    at: Ints


def _targets(ranges: Sequence[FlatRanges], tensors: TensorTable) -> tuple[Targets, _Places]:
    """The boxes that the ranges consist of, and where they go. Ranges are mostly whole tensors,
    which are boxes already: those are not looked at one by one."""
    none = np.empty(0, np.int64)
    rows = np.concatenate([none, *(of.row for of in ranges)])
    starts = np.concatenate([none, *(of.start for of in ranges)])
    stops = np.concatenate([none, *(of.stop for of in ranges)])
    at = np.concatenate([none, *(of.at for of in ranges)])
    memory = np.repeat(np.arange(len(ranges), dtype=np.int64), [len(of.row) for of in ranges])
    is_whole = stops - starts == tensors.nbytes[rows]
    whole = rows[is_whole]
    width = tensors.shape.shape[1]
    source = np.flatnonzero(is_whole).tolist()
    begins = [0] * len(source)
    boxes = []
    for number in np.flatnonzero(~is_whole).tolist():
        row = int(rows[number])
        for box, begin in _boxes(tensors, row, int(starts[number]), int(stops[number])):
            source.append(number)
            begins.append(begin)
            boxes.append(box)
    offsets = padded([box.offsets for box in boxes], width, 0)
    lengths = padded([box.lengths for box in boxes], width, 1)
    lengths = np.concatenate([tensors.shape[whole], lengths])
    of_range = np.array(source, np.int64)
    targets = Targets(
        tensor=rows[of_range],
        offsets=np.concatenate([np.zeros((len(whole), width), np.int64), offsets]),
        lengths=lengths,
        local_start=np.zeros(len(source), np.int64),
        local_shape=lengths,
        buffer=np.arange(len(source), dtype=np.int64),
    )
    memories = [of.into for of in ranges]
    return targets, _Places(memories, memory[of_range], at[of_range] + np.array(begins, np.int64))


def _boxes(tensors: TensorTable, row: int, start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """The boxes that bytes [start, stop) of a tensor consist of, and how many bytes are before
    each."""
    itemsize = int(tensors.itemsize[row])
    begin = 0
    for box in flat_to_boxes(tensors.shape_of(row), start // itemsize, stop // itemsize):
        yield box, begin
        begin += math.prod(box.lengths) * itemsize


class _Delivery:
    """Copies what is read to the memory of the targets."""

    def __init__(
        self, manifest: Manifest, targets: Targets, places: _Places, plan: LoadPlan
    ) -> None:
        self._tensors = manifest.tensors
        self._shards = manifest.shards
        self._targets = targets
        self._places = places
        self._plan = plan

    def deliver(self, read: int, buffer: HostBuffer) -> None:
        """Copy everything that read number ``read`` holds to where it is wanted. Thread-safe for
        distinct reads."""
        plan = self._plan
        base = int(plan.start[read])
        copies = np.arange(int(plan.first[read]), int(plan.first[read + 1]))
        is_run = plan.dst[copies] >= 0
        self._copy_runs(copies[is_run], buffer, base)
        for copy in copies[~is_run].tolist():
            self._copy_strided(copy, int(plan.target[plan.pair[copy]]), buffer, base)

    def _copy_runs(self, copies: Ints, buffer: HostBuffer, base: int) -> None:
        """Copy what is one run of bytes on both sides. Runs that follow one another on both sides
        are one."""
        if not len(copies):
            return
        plan = self._plan
        target = plan.target[plan.pair[copies]]
        memory = self._places.memory[target]
        into = self._places.at[target] + plan.dst[copies]
        src = plan.src[copies] - base
        nbytes = plan.nbytes[copies]
        follows = (
            (memory[1:] == memory[:-1])
            & (into[1:] == (into + nbytes)[:-1])
            & (src[1:] == (src + nbytes)[:-1])
        )
        heads = np.flatnonzero(np.append(True, ~follows))
        data = np.frombuffer(buffer.view, np.uint8)
        columns = (memory[heads], into[heads], src[heads], np.add.reduceat(nbytes, heads))
        for number, to, begin, count in zip(*(c.tolist() for c in columns), strict=True):
            self._places.memories[number][to : to + count] = data[begin : begin + count]

    def _copy_strided(self, copy: int, target: int, buffer: HostBuffer, base: int) -> None:
        """``buffer`` holds the image from byte ``base`` on."""
        row = int(self._targets.tensor[target])
        ndim = int(self._tensors.ndim[row])
        itemsize = int(self._tensors.itemsize[row])
        element = np.dtype((np.void, itemsize))
        lengths = self._targets.lengths[target, :ndim].tolist()
        offsets = self._targets.offsets[target, :ndim].tolist()
        places = self._places
        at = int(places.at[target])
        memory = places.memories[int(places.memory[target])]
        into = memory[at : at + math.prod(lengths) * itemsize].view(element).reshape(lengths)
        for part in strided_copies(self._tensors, self._shards, self._plan, copy):
            box = part.box
            strides = [stride * itemsize for stride in part.strides]
            source = np.ndarray(box.lengths, element, buffer.view, part.start - base, strides)
            ranges = zip(box.offsets, offsets, box.lengths, strict=True)
            into[tuple(slice(a - b, a - b + n) for a, b, n in ranges)] = source
