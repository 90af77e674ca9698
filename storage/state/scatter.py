"""Copies verified bytes into the caller's tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...core.spans import Where, counting
from ...planner.box import Box
from ...planner.loading import LoadPlan, Targets, strided_copies
from ...planner.table import ShardTable, TensorTable
from ..runtime.buffers import HostBuffer
from .bits import address_of, as_bits, copy_memory, typed_storage, writable
from .device import devices_of
from .dtypes import dtype_of
from .windows import Place

__all__ = ["Scatter"]


class Scatter:
    """Carries out the copies of a load plan. ``buffers`` are the local tensors that
    ``targets.buffer`` counts."""

    def __init__(
        self,
        tensors: TensorTable,
        shards: ShardTable,
        targets: Targets,
        plan: LoadPlan,
        buffers: Sequence[torch.Tensor],
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
        self._addresses: dict[int, int | None] = {}  # of buffers that were asked for
        self._on_device = bool(devices_of(buffers))
        self._counted = counting("device_copy")

    def deliver(self, read: int, buffer: HostBuffer) -> None:
        """Copy everything that read number ``read`` holds to where it is wanted. Thread-safe for
        distinct reads."""
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
        columns = (plan.target[plan.pair[rows]], plan.src[rows], plan.nbytes[rows], plan.dst[rows])
        listed = (column.tolist() for column in columns)
        for copy, target, src, nbytes, dst in zip(copies, *listed, strict=True):
            address = self._address_of(target)
            if address is not None and dst >= 0:
                copy_memory(address + dst, base + src, nbytes)
            else:
                self._copy_strided(copy, target, buffer, start)

    def _address_of(self, target: int) -> int | None:
        """Where a target's elements lie as they are stored; None where they lie otherwise. Asked
        when its bytes are there: no read waits for the addresses of all others."""
        number = self._buffer_of[target]
        if number not in self._addresses:
            buffer = self._buffers[number]
            is_as_stored = buffer.dtype == self._dtypes[self._codes[target]]
            self._addresses[number] = address_of(buffer) if is_as_stored else None
        return self._addresses[number]

    def _copy_strided(self, copy: int, target: int, buffer: HostBuffer, start: int) -> None:
        """``buffer`` holds the image from byte ``start`` on."""
        dtype = self._dtypes[self._codes[target]]
        data = typed_storage(buffer.view, dtype.itemsize)
        into = self._buffers[self._buffer_of[target]]
        for part in strided_copies(self._tensors, self._shards, self._plan, copy):
            at = (part.start - start) // dtype.itemsize
            source = data.as_strided(part.box.lengths, part.strides, at)
            with writable(into):
                _assign(self._window(into, part.box, target), source, dtype)

    def _window(self, into: torch.Tensor, part: Box, target: int) -> torch.Tensor:
        """A box of the global tensor, in the target's local tensor."""
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
