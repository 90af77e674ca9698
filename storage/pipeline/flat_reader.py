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
    pieces = [piece for flat in ranges for piece in _pieces(flat, manifest.tensors)]
    targets = _targets(pieces, manifest.tensors.shape.shape[1])
    plan = await offload(plan_reads, driver, manifest, targets)
    reader = ImageReader(driver, manifest, budget_nbytes)
    delivery = _Delivery(manifest, pieces, plan)
    await reader.run(plan, delivery.deliver)


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """A box of the tensor in ``row``, and the memory for it."""

    row: int
    box: Box
    into: npt.NDArray[np.uint8]


def _pieces(flat: FlatRange, tensors: TensorTable) -> Iterator[_Piece]:
    itemsize = int(tensors.itemsize[flat.row])
    begin = 0
    shape = tensors.shape_of(flat.row)
    for box in flat_to_boxes(shape, flat.start // itemsize, flat.stop // itemsize):
        end = begin + math.prod(box.lengths) * itemsize
        yield _Piece(flat.row, box, flat.into[begin:end])
        begin = end


def _targets(pieces: Sequence[_Piece], width: int) -> Targets:
    """The boxes, each to be put into memory of its own shape."""
    lengths = padded([piece.box.lengths for piece in pieces], width, 1)
    return Targets(
        tensor=np.array([piece.row for piece in pieces], np.int64),
        offsets=padded([piece.box.offsets for piece in pieces], width, 0),
        lengths=lengths,
        local_start=np.zeros(len(pieces), np.int64),
        local_shape=lengths,
        buffer=np.arange(len(pieces), dtype=np.int64),
    )


class _Delivery:
    """Copies what is read to the memory of the pieces."""

    def __init__(self, manifest: Manifest, pieces: Sequence[_Piece], plan: LoadPlan) -> None:
        self._tensors = manifest.tensors
        self._shards = manifest.shards
        self._pieces = pieces
        self._plan = plan

    def deliver(self, read: int, buffer: HostBuffer) -> None:
        """Copy everything that read number ``read`` holds to where it is wanted. Thread-safe for
        distinct reads."""
        plan = self._plan
        data = np.frombuffer(buffer.view, np.uint8)
        base = int(plan.start[read])
        for copy in range(int(plan.first[read]), int(plan.first[read + 1])):
            src = int(plan.src[copy])
            nbytes = int(plan.nbytes[copy])
            dst = int(plan.dst[copy])
            pair = int(plan.pair[copy])
            if dst >= 0:
                into = self._pieces[int(plan.target[pair])].into
                into[dst : dst + nbytes] = data[src - base : src - base + nbytes]
            else:
                self._copy_strided(copy, self._pieces[int(plan.target[pair])], buffer, base)

    def _copy_strided(self, copy: int, piece: _Piece, buffer: HostBuffer, base: int) -> None:
        """``buffer`` holds the image from byte ``base`` on."""
        itemsize = int(self._tensors.itemsize[piece.row])
        element = np.dtype((np.void, itemsize))
        into = piece.into.view(element).reshape(piece.box.lengths)
        for part in strided_copies(self._tensors, self._shards, self._plan, copy):
            box = part.box
            strides = [stride * itemsize for stride in part.strides]
            source = np.ndarray(box.lengths, element, buffer.view, part.start - base, strides)
            ranges = zip(box.offsets, piece.box.offsets, box.lengths, strict=True)
            into[tuple(slice(a - b, a - b + n) for a, b, n in ranges)] = source
