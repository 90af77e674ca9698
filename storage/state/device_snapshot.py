"""Tensors on an accelerator as they were at one moment, known by sums over their bits.

At that moment the sums are computed on the trainer's stream, where they come after all that was
queued before, and ahead of all that follows. Later, bytes are copied on the device first, on a
stream of our own. What was copied is summed again, and then goes to host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .block_sums import BlockSums, as_bytes

__all__ = ["DeviceSnapshot", "Doubt"]


@dataclass(frozen=True, slots=True)
class Doubt:
    """Whether a copy of ``row`` is good: a scalar on its device, which need not be known yet."""

    row: int
    same: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Held:
    data: torch.Tensor
    """Its bytes. A view of its own: giving the tensor other memory does not change this."""
    address: int
    nbytes: int
    """Of the storage."""
    sums: BlockSums


class DeviceSnapshot:
    """Made at the moment, in the trainer's thread; used by threads that copy."""

    def __init__(
        self,
        tensors: Mapping[int, torch.Tensor],
        empty: Callable[..., torch.Tensor] = torch.empty,
    ) -> None:
        """``tensors``: contiguous ones, by row. ``empty`` allocates the copies."""
        self._held: dict[int, _Held] = {}
        self._empty = empty
        self.without_room: list[int] = []
        """Rows whose sums the device had no memory for: they are not in the snapshot."""
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
        """Copy bytes [start, stop) of ``row`` on its device, or to the host if the device is full;
        return the copy, and whether the bytes are what they were."""
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
        """What is known of ``row``."""
        return self._held[row].sums

    @staticmethod
    def _is_there(held: _Held) -> bool:
        """Whether its storage was neither freed nor moved."""
        storage = held.data.untyped_storage()
        return (storage.data_ptr(), storage.nbytes()) == (held.address, held.nbytes)
