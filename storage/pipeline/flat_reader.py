"""Reads byte ranges of tensors in row-major order, whatever their shards' layout.

Used to read files that consist of tensors, and to walk through whole tensors in bounded memory.
Verified like every read. Needs no torch: numpy copies.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
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

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class FlatRanges:
    """Byte ranges of tensors, as columns; all are read into the memory ``into``.

    ``row``      (n,) the tensor, not an alias
    ``start``    (n,) first byte of the range, at an element boundary
    ``stop``     (n,) end of the range, at an element boundary
    ``at``       (n,) offset in ``into``
    """

    row: Ints
    start: Ints
    stop: Ints
    at: Ints
    into: Bytes

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int, int, int]], into: Bytes) -> FlatRanges:
        """Build columns from (row, start, stop, at) tuples."""
        row, start, stop, at = np.array(list(rows), np.int64).reshape(-1, 4).T
        return cls(row, start, stop, at, into)


async def read_flat(
    driver: Driver, manifest: Manifest, row: int, start: int, stop: int, budget_nbytes: int
) -> memoryview:
    """Read bytes [start, stop) of the tensor in ``row``, which must not be an alias.

    Reads only the blocks that hold them. Raises ValueError for a range outside the tensor;
    DamagedError; StorageError.
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
    """Fill all ``ranges``, reading only their blocks, each once.

    Raises like :func:`read_flat`; the memory's content is then undefined.
    """
    plan, delivery = await offload(_planned, driver, manifest, ranges)
    reader = ImageReader(driver, manifest, budget_nbytes)
    await reader.run(plan, delivery.deliver, places=delivery.in_place)


def _planned(
    driver: Driver, manifest: Manifest, ranges: Sequence[FlatRanges]
) -> tuple[LoadPlan, _Delivery]:
    targets, places = _targets(ranges, manifest.tensors)
    plan = plan_reads(driver, manifest, targets)
    return plan, _Delivery(manifest, targets, places, plan)


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """Destinations of targets: offset ``at`` in one of ``memories``, selected by ``memory``."""

    memories: Sequence[Bytes]
    memory: Ints
    at: Ints


def _targets(ranges: Sequence[FlatRanges], tensors: TensorTable) -> tuple[Targets, _Places]:
    """Return the boxes of the ranges, and their destinations.

    Most ranges are whole tensors, which already are boxes, so those are handled as columns.
    """
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
    """Yield the boxes of bytes [start, stop) of a tensor, and the number of bytes before each."""
    itemsize = int(tensors.itemsize[row])
    begin = 0
    for box in flat_to_boxes(tensors.shape_of(row), start // itemsize, stop // itemsize):
        yield box, begin
        begin += math.prod(box.lengths) * itemsize


class _Delivery:
    """Copies read data to the memory of the targets."""

    def __init__(
        self, manifest: Manifest, targets: Targets, places: _Places, plan: LoadPlan
    ) -> None:
        self._tensors = manifest.tensors
        self._shards = manifest.shards
        self._targets = targets
        self._places = places
        self._plan = plan
        target = plan.target[plan.pair]
        self._memory = places.memory[target]
        self._into = places.at[target] + plan.dst
        self._is_run = plan.dst >= 0
        self._follows = np.zeros(len(target), np.bool_)
        """True for a copy that continues the previous one of its read, on both sides."""
        self._follows[1:] = (
            self._is_run[1:]
            & self._is_run[:-1]
            & (self._memory[1:] == self._memory[:-1])
            & (self._into[1:] == (self._into + plan.nbytes)[:-1])
            & (plan.src[1:] == (plan.src + plan.nbytes)[:-1])
        )
        self._follows[plan.first[:-1]] = False
        self.in_place = self._find_in_place()
        """Reads whose bytes are all wanted in one stretch of memory, with that memory, by
        number."""

    def deliver(self, read: int, buffer: HostBuffer) -> None:
        """Copy the wanted parts of read number ``read``. Thread-safe for distinct reads."""
        if self.in_place.get(read) is buffer:
            return
        plan = self._plan
        base = int(plan.start[read])
        data = np.frombuffer(buffer.view, np.uint8)
        copies = slice(int(plan.first[read]), int(plan.first[read + 1]))
        heads = np.flatnonzero(~self._follows[copies])
        nbytes = np.add.reduceat(plan.nbytes[copies], heads)
        heads += copies.start
        columns = (heads, self._memory[heads], self._into[heads], plan.src[heads] - base, nbytes)
        for copy, number, to, begin, count in zip(*(c.tolist() for c in columns), strict=True):
            if self._is_run[copy]:
                self._places.memories[number][to : to + count] = data[begin : begin + count]
            else:
                self._copy_strided(copy, int(plan.target[plan.pair[copy]]), buffer, base)

    def _copy_strided(self, copy: int, target: int, buffer: HostBuffer, base: int) -> None:
        """Copy a strided box. ``buffer`` holds the image from byte ``base`` on."""
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

    def _find_in_place(self) -> dict[Hashable, HostBuffer]:
        plan = self._plan
        if not len(self._follows):
            return {}
        head = plan.first[:-1]
        sizes = plan.stop - plan.start
        is_one = np.add.reduceat(~self._follows, head, dtype=np.int64) == 1
        begins_with_it = plan.src[head] == plan.start
        ends_with_it = np.add.reduceat(plan.nbytes, head) == sizes
        buffers: dict[Hashable, HostBuffer] = {}
        found = is_one & self._is_run[head] & begins_with_it & ends_with_it
        for read in np.flatnonzero(found).tolist():
            copy = int(head[read])
            content = self._places.memories[int(self._memory[copy])]
            begin = int(self._into[copy])
            view = content[begin : begin + int(sizes[read])]
            buffers[read] = HostBuffer(view.data, int(view.ctypes.data), content)
        return buffers
