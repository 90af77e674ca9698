"""Reads a range of one tensor's bytes, in row-major order, however its shards lie. Files over
tensors are read this way.

Verified as every read is, and without torch: numpy copies.
"""

from __future__ import annotations

import math
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from ...core.units import ceil_div
from ...drivers.contract import Driver
from ...planner.box import Box, flat_to_boxes, row_strides
from ...planner.columns import padded
from ...planner.loading import LoadPlan, Targets, strided_parts
from ..format.manifest import Manifest
from ..runtime.buffers import HostBuffer, memory_for
from ..runtime.engine import offload
from .image_reader import ImageReader, plan_reads

__all__ = ["read_flat"]


async def read_flat(
    driver: Driver, manifest: Manifest, row: int, start: int, stop: int, budget_nbytes: int
) -> memoryview:
    """Bytes [start, stop) of the tensor in ``row``, which is no alias. Reads only the blocks that
    hold them.

    Raises ValueError for a range that is not within the tensor; DamagedError; StorageError.
    """
    tensors = manifest.tensors
    itemsize = int(tensors.itemsize[row])
    first = start // itemsize
    boxes = flat_to_boxes(tensors.shape_of(row), first, ceil_div(stop, itemsize))
    flat = _FlatRange(manifest, boxes, itemsize)
    targets = _targets(row, boxes, tensors.shape.shape[1])
    plan = await offload(plan_reads, driver, manifest, targets)
    reader = ImageReader(driver, manifest, budget_nbytes)
    await reader.run(plan, lambda read, buffer: flat.deliver(plan, read, buffer))
    return flat.content.data[start - first * itemsize : stop - first * itemsize]


def _targets(row: int, boxes: list[Box], width: int) -> Targets:
    """The boxes, each to be put into memory of its own shape."""
    lengths = padded([box.lengths for box in boxes], width, 1)
    return Targets(
        tensor=np.full(len(boxes), row, np.int64),
        offsets=padded([box.offsets for box in boxes], width, 0),
        lengths=lengths,
        local_offsets=np.zeros_like(lengths),
        local_shape=lengths,
        buffer=np.arange(len(boxes), dtype=np.int64),
    )


class _FlatRange:
    """The memory that the boxes of a flat range go to, one after the other."""

    def __init__(self, manifest: Manifest, boxes: list[Box], itemsize: int) -> None:
        self._shards = manifest.shards
        self._boxes = boxes
        self._itemsize = itemsize
        sizes = (math.prod(box.lengths) * itemsize for box in boxes)
        ends = list(accumulate(sizes, initial=0))
        with memory_for(f"{ends[-1]:,} bytes of a tensor"):
            self.content = np.empty(ends[-1], np.uint8)
        self._parts = [self.content[begin:end] for begin, end in pairwise(ends)]

    def deliver(self, plan: LoadPlan, read: int, buffer: HostBuffer) -> None:
        """Copy everything that read number ``read`` holds to where it is wanted. Thread-safe for
        distinct reads."""
        data = np.frombuffer(buffer.view, np.uint8)
        base = int(plan.start[read])
        for copy in range(int(plan.first[read]), int(plan.first[read + 1])):
            src = int(plan.src[copy])
            nbytes = int(plan.nbytes[copy])
            dst = int(plan.dst[copy])
            pair = int(plan.pair[copy])
            if dst >= 0:
                part = self._parts[int(plan.target[pair])]
                part[dst : dst + nbytes] = data[src - base : src - base + nbytes]
            else:
                self._copy_strided(plan, pair, src, nbytes, buffer, base)

    def _copy_strided(
        self, plan: LoadPlan, pair: int, src: int, nbytes: int, buffer: HostBuffer, base: int
    ) -> None:
        """Copy bytes [src, src + nbytes) of the image, which ``buffer`` holds from byte ``base``
        on, where they are no single run of the wanted box."""
        shard = int(plan.shard[pair])
        target = int(plan.target[pair])
        box = self._boxes[target]
        itemsize = self._itemsize
        element = np.dtype((np.void, itemsize))
        into = self._parts[target].view(element).reshape(box.lengths)
        stored = _box(self._shards.offsets[shard], self._shards.lengths[shard], box.ndim)
        wanted = _box(plan.offsets[pair], plan.lengths[pair], box.ndim)
        shard_start = int(self._shards.start[shard])
        strides = [stride * itemsize for stride in row_strides(stored.lengths)]
        first = (src - shard_start) // itemsize
        last = (src + nbytes - shard_start) // itemsize
        for part in strided_parts(stored, wanted, first, last):
            steps = zip(part.offsets, stored.offsets, strides, strict=True)
            at = shard_start - base + sum((a - b) * stride for a, b, stride in steps)
            ranges = zip(part.offsets, box.offsets, part.lengths, strict=True)
            window = tuple(slice(a - b, a - b + n) for a, b, n in ranges)
            into[window] = np.ndarray(part.lengths, element, buffer.view, at, strides)


def _box(offsets: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], ndim: int) -> Box:
    return Box(tuple(offsets[:ndim].tolist()), tuple(lengths[:ndim].tolist()))
