"""Snapshots of tensors on an accelerator, verified by sums over their bits.

At the moment of the snapshot, the sums are queued on the trainer's stream, which orders them after
all earlier work and before all later work. Later, bytes are first copied on the device, on a
separate stream. The copy is summed, compared, and then sent to host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .block_sums import BlockSums, as_bytes

__all__ = ["DeviceSnapshot", "Doubt"]


@dataclass(frozen=True, slots=True)
class Doubt:
    """Validity of one copy of ``row``: a scalar on its device that may still be pending."""

    row: int
    same: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Held:
    data: torch.Tensor
    """The bytes, as a separate view: swapping the tensor's memory does not affect it."""
    address: int
    nbytes: int
    """Size of the storage."""
    sums: BlockSums


class DeviceSnapshot:
    """Sums of tensors on an accelerator as of one moment.

    Created in the trainer's thread at that moment; used by copying threads.
    """

    def __init__(
        self,
        tensors: Mapping[int, torch.Tensor],
        empty: Callable[..., torch.Tensor] = torch.empty,
    ) -> None:
        """Queue the sums of ``tensors``, contiguous ones by row. ``empty`` allocates the copies."""
        self._held: dict[int, _Held] = {}
        self._empty = empty
        self.without_room: list[int] = []
        """Rows that are not in the snapshot, because the device had no memory for their sums."""
        with torch.no_grad():
            for row, tensor in tensors.items():
                data = as_bytes(tensor)
                storage = data.untyped_storage()
                try:
                    sums = BlockSums.of(data)
                except torch.OutOfMemoryError:
                    self.without_room.append(row)
                    continue
                self._held[row] = _Held(data, storage.data_ptr(), storage.nbytes(), sums)

    def __contains__(self, row: int) -> bool:
        return row in self._held

    def staged(self, row: int, start: int, stop: int) -> tuple[torch.Tensor, Doubt]:
        """Copy bytes [start, stop) of ``row`` on its device, or to the host if the device is full.

        Returns the copy, and whether its bytes are as of the snapshot.
        """
        held = self._held[row]
        try:
            return self._staged_on(held.data.device, row, start, stop)
        except torch.OutOfMemoryError:
            # The trainer has filled its device. The host has room for a chunk.
            return self._staged_on(torch.device("cpu"), row, start, stop)

    def _staged_on(
        self, device: torch.device, row: int, start: int, stop: int
    ) -> tuple[torch.Tensor, Doubt]:
        held = self._held[row]
        first, last = held.sums.span(start, stop)
        copied = self._empty(last - first, dtype=torch.uint8, device=device)
        if self._is_there(held):
            copied.copy_(held.data[first:last], non_blocking=device == held.data.device)
        else:
            return copied[start - first : stop - first], Doubt(
                row, torch.zeros((), dtype=torch.bool, device="cpu")
            )
        return copied[start - first : stop - first], Doubt(row, held.sums.same(first, copied))

    def sums(self, row: int) -> BlockSums:
        """Return the sums of ``row``."""
        return self._held[row].sums

    @staticmethod
    def _is_there(held: _Held) -> bool:
        """Return whether the storage was neither freed nor moved."""
        storage = held.data.untyped_storage()
        return (storage.data_ptr(), storage.nbytes()) == (held.address, held.nbytes)
