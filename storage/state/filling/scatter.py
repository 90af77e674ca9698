"""Copies verified bytes into the caller's tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ....core.spans import Where, counting
from ....planner.box import Box
from ....planner.loading import LoadPlan, Targets, strided_copies
from ....planner.table import ShardTable, TensorTable
from ...runtime.buffers import HostBuffer
from ..bits import Place, as_bits, copy_memory, typed_storage, writable
from ..dtypes import dtype_of
from .targets import MemoryTable


class Scatter:
    """Executes the copies of a load plan.

    ``buffers`` are the local tensors that ``targets.buffer`` indexes, and ``memory`` describes
    them.
    """

    def __init__(
        self,
        tensors: TensorTable,
        shards: ShardTable,
        targets: Targets,
        plan: LoadPlan,
        buffers: Sequence[torch.Tensor],
        memory: MemoryTable,
    ) -> None:
        self._tensors = tensors
        self._shards = shards
        self._targets = targets
        self._plan = plan
        self._buffers = buffers
        codes = tensors.dtype[targets.tensor].tolist()
        self._dtypes = {code: dtype_of(*tensors.dtypes[code]) for code in set(codes)}
        self._codes = codes
        self._buffer_of = targets.buffer.tolist()
        self._addresses = self._as_stored(memory)
        self._on_device = not memory.on_host.all()
        self._counted = counting("device_copy")

    def deliver(self, read: int, buffer: HostBuffer) -> None:
        """Copy the bytes of read number ``read`` to their targets. Thread-safe for distinct
        reads."""
        if not self._on_device:
            self._copy(read, buffer)
            return
        nbytes = int(self._plan.stop[read] - self._plan.start[read])
        with self._counted(Where(nbytes=nbytes)):
            self._copy(read, buffer)

    def _copy(self, read: int, buffer: HostBuffer) -> None:
        plan = self._plan
        copies = range(int(plan.first[read]), int(plan.first[read + 1]))
        rows = slice(copies.start, copies.stop)
        start = int(plan.start[read])
        base = buffer.address - start
        addresses = self._addresses
        columns = (plan.target[plan.pair[rows]], plan.src[rows], plan.nbytes[rows], plan.dst[rows])
        listed = (column.tolist() for column in columns)
        for copy, target, src, nbytes, dst in zip(copies, *listed, strict=True):
            address = addresses[target]
            if address and dst >= 0:
                copy_memory(address + dst, base + src, nbytes)
            else:
                self._copy_strided(copy, target, buffer, start)

    def _as_stored(self, memory: MemoryTable) -> list[int]:
        """Return the address of each target stored as it lies in memory; 0 for all others."""
        rows = self._targets.buffer
        stored = np.array([id(self._dtypes[code]) for code in self._codes], np.int64)
        same = memory.dtype_id[rows] == stored
        addresses: list[int] = np.where(
            same & memory.as_stored[rows], memory.address[rows], 0
        ).tolist()
        return addresses

    def _copy_strided(self, copy: int, target: int, buffer: HostBuffer, start: int) -> None:
        """Copy one strided piece. ``buffer`` holds the image from byte ``start`` on."""
        dtype = self._dtypes[self._codes[target]]
        data = typed_storage(buffer.view, dtype.itemsize)
        into = self._buffers[self._buffer_of[target]]
        for part in strided_copies(self._tensors, self._shards, self._plan, copy):
            at = (part.start - start) // dtype.itemsize
            source = data.as_strided(part.box.lengths, part.strides, at)
            with writable(into):
                _assign(self._window(into, part.box, target), source, dtype)

    def _window(self, into: torch.Tensor, part: Box, target: int) -> torch.Tensor:
        """Return a box of the global tensor as a view of the target's local tensor."""
        targets = self._targets
        n = part.ndim
        place = Place(
            int(targets.local_start[target]), tuple(targets.local_shape[target, :n].tolist())
        )
        within = zip(part.offsets, targets.offsets[target, :n].tolist(), strict=True)
        return place.window(into, [a - b for a, b in within], part.lengths)


def _assign(window: torch.Tensor, source: torch.Tensor, dtype: torch.dtype) -> None:
    if window.dtype == dtype and not window.is_conj() and not window.is_neg():
        as_bits(window).copy_(source)
    else:
        window.copy_(source.view(dtype))
