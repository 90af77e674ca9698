"""Reads ranges of tensors' bytes, in row-major order, however their shards lie. Files over tensors
are read this way, and whatever walks through whole tensors in bounded memory.

Verified as every read is, and without torch: numpy copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...core.units import ceil_div
from ...drivers.contract import Driver
from ...planner.box import Box, flat_to_boxes
from ...planner.columns import padded
from ...planner.loading import LoadPlan, Targets, strided_copies
from ...planner.table import TensorTable
from ..format.manifest import Manifest
from ..runtime.buffers import HostBuffer, memory_for
from ..runtime.engine import offload
from .image_reader import ImageReader, plan_reads

__all__ = ["FlatRange", "read_flat", "read_ranges"]


@dataclass(frozen=True, slots=True, eq=False)
class FlatRange:
    """Bytes [start, stop) of the tensor in ``row``, which is no alias: whole elements. They go to
    ``into``, which has as many bytes."""

    row: int
    start: int
    stop: int
    into: npt.NDArray[np.uint8]


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
    await read_ranges(driver, manifest, [FlatRange(row, first, last, content)], budget_nbytes)
    return content.data[start - first : stop - first]


async def read_ranges(
    driver: Driver, manifest: Manifest, ranges: Sequence[FlatRange], budget_nbytes: int
) -> None:
    """Fill all of ``ranges``. Reads only the blocks that hold them, each once. Raises as
    :func:`read_flat` does."""
    targets, memory = await offload(_targets, ranges, manifest.tensors)
    plan = await offload(plan_reads, driver, manifest, targets)
    reader = ImageReader(driver, manifest, budget_nbytes)
    delivery = _Delivery(manifest, targets, memory, plan)
    await reader.run(plan, delivery.deliver)


Memory = Sequence[npt.NDArray[np.uint8]]
"""Where targets go, one by one."""


def _targets(ranges: Sequence[FlatRange], tensors: TensorTable) -> tuple[Targets, Memory]:
    """The boxes that the ranges consist of, each to be put into memory of its own shape; and that
    memory. Ranges are mostly whole tensors, which are boxes already: those are not looked at one by
    one."""
    rows = np.array([flat.row for flat in ranges], np.int64)
    nbytes = np.array([flat.stop - flat.start for flat in ranges], np.int64)
    is_whole = nbytes == tensors.nbytes[rows]
    whole = rows[is_whole]
    width = tensors.shape.shape[1]
    memory = [ranges[number].into for number in np.flatnonzero(is_whole).tolist()]
    row = []
    boxes = []
    for number in np.flatnonzero(~is_whole).tolist():
        for box, into in _boxes(ranges[number], tensors):
            row.append(ranges[number].row)
            boxes.append(box)
            memory.append(into)
    offsets = padded([box.offsets for box in boxes], width, 0)
    lengths = padded([box.lengths for box in boxes], width, 1)
    lengths = np.concatenate([tensors.shape[whole], lengths])
    targets = Targets(
        tensor=np.concatenate([whole, np.array(row, np.int64)]),
        offsets=np.concatenate([np.zeros((len(whole), width), np.int64), offsets]),
        lengths=lengths,
        local_start=np.zeros(len(memory), np.int64),
        local_shape=lengths,
        buffer=np.arange(len(memory), dtype=np.int64),
    )
    return targets, memory


def _boxes(flat: FlatRange, tensors: TensorTable) -> Iterator[tuple[Box, npt.NDArray[np.uint8]]]:
    """The boxes that a range consists of, and the memory of each."""
    itemsize = int(tensors.itemsize[flat.row])
    begin = 0
    shape = tensors.shape_of(flat.row)
    for box in flat_to_boxes(shape, flat.start // itemsize, flat.stop // itemsize):
        end = begin + math.prod(box.lengths) * itemsize
        yield box, flat.into[begin:end]
        begin = end


class _Delivery:
    """Copies what is read to the memory of the targets."""

    def __init__(
        self, manifest: Manifest, targets: Targets, memory: Memory, plan: LoadPlan
    ) -> None:
        self._tensors = manifest.tensors
        self._shards = manifest.shards
        self._targets = targets
        self._memory = memory
        self._plan = plan

    def deliver(self, read: int, buffer: HostBuffer) -> None:
        """Copy everything that read number ``read`` holds to where it is wanted. Thread-safe for
        distinct reads."""
        plan = self._plan
        data = np.frombuffer(buffer.view, np.uint8)
        base = int(plan.start[read])
        copies = slice(int(plan.first[read]), int(plan.first[read + 1]))
        columns = (
            plan.target[plan.pair[copies]],
            plan.src[copies] - base,
            plan.nbytes[copies],
            plan.dst[copies],
        )
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for copy, (target, src, nbytes, dst) in enumerate(rows, copies.start):
            if dst >= 0:
                self._memory[target][dst : dst + nbytes] = data[src : src + nbytes]
            else:
                self._copy_strided(copy, target, buffer, base)

    def _copy_strided(self, copy: int, target: int, buffer: HostBuffer, base: int) -> None:
        """``buffer`` holds the image from byte ``base`` on."""
        row = int(self._targets.tensor[target])
        ndim = int(self._tensors.ndim[row])
        itemsize = int(self._tensors.itemsize[row])
        element = np.dtype((np.void, itemsize))
        lengths = self._targets.lengths[target, :ndim].tolist()
        offsets = self._targets.offsets[target, :ndim].tolist()
        into = self._memory[target].view(element).reshape(lengths)
        for part in strided_copies(self._tensors, self._shards, self._plan, copy):
            box = part.box
            strides = [stride * itemsize for stride in part.strides]
            source = np.ndarray(box.lengths, element, buffer.view, part.start - base, strides)
            ranges = zip(box.offsets, offsets, box.lengths, strict=True)
            into[tuple(slice(a - b, a - b + n) for a, b, n in ranges)] = source
