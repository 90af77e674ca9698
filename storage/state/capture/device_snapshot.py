"""Snapshots of tensors on an accelerator, verified by sums over their bits.

At the moment of the snapshot, the sums are queued on the trainer's stream, which orders them after
all earlier work and before all later work. Later, bytes are first copied on the device, on a
separate stream. The copy is summed, compared, and then sent to host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ....core.units import round_up
from ..bits import byte_view

ROW_NBYTES = 4096
ROWS = 512
"""Rows per block."""
BLOCK_NBYTES = ROW_NBYTES * ROWS

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, slots=True)
class BlockSums:
    """The sums of one tensor's bytes, over words of ``word_nbytes``.

    A tensor is seen as rows of 4 KiB, and as blocks of 512 rows. There is one sum per row, over its
    words, and one per column of each block: one alone does not depend on the order of the words.
    They detect accidents, not forgery; and a copy may have caught a value that was changed back.
    """

    nbytes: int
    word_nbytes: int
    rows: torch.Tensor
    """(R,): one sum per whole row."""
    columns: torch.Tensor
    """(B, C): one per block and column. The last block may have fewer rows."""
    end: torch.Tensor
    """Bytes after the last whole row, verbatim."""

    @classmethod
    def of(cls, data: torch.Tensor) -> BlockSums:
        """Compute the sums of a contiguous uint8 tensor, on its device and current stream.

        Allocates about 0.4 % of the tensor's size.
        """
        # A storage of another library may begin at any address, and a misaligned read is a CUDA
        # error that makes the device unusable for this process.
        begins = data.storage_offset() | data.data_ptr()
        word_nbytes = next(n for n in _WORDS if begins % n == 0)
        return cls(
            len(data),
            word_nbytes,
            *_sums(data, word_nbytes),
            data[len(data) // ROW_NBYTES * ROW_NBYTES :].clone(),
        )

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Return the whole blocks that hold bytes [start, stop); the last one ends with the
        tensor."""
        return start // BLOCK_NBYTES * BLOCK_NBYTES, min(self.nbytes, round_up(stop, BLOCK_NBYTES))

    def same(self, start: int, copied: torch.Tensor) -> torch.Tensor:
        """Return whether ``copied`` equals the tensor from byte ``start`` on, as a scalar on its
        device.

        ``copied`` consists of whole blocks, see :meth:`span`, and begins at a multiple of eight
        bytes.
        """
        rows, columns = _sums(copied, self.word_nbytes)
        first = start // ROW_NBYTES
        block = start // BLOCK_NBYTES
        at = copied.device
        same = (rows == self.rows[first : first + len(rows)].to(at)).all()
        same &= (columns == self.columns[block : block + len(columns)].to(at)).all()
        if start + len(copied) == self.nbytes:
            same &= (copied[len(copied) - len(self.end) :] == self.end.to(at)).all()
        return same

    def equals(self, other: BlockSums) -> bool:
        """Return whether both are sums of the same bytes."""
        mine = (self.rows, self.columns, self.end)
        theirs = (other.rows, other.columns, other.end)
        return self.nbytes == other.nbytes and all(map(torch.equal, mine, theirs))


def _sums(data: torch.Tensor, word_nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of whole rows, and of the columns of each block."""
    columns = ROW_NBYTES // word_nbytes
    count = len(data) // ROW_NBYTES
    words = data[: count * ROW_NBYTES].view(_WORDS[word_nbytes]).view(count, columns)
    blocks = count // ROWS
    of_rows = words.sum(1, dtype=torch.int64)
    of_columns = words[: blocks * ROWS].view(blocks, ROWS, columns).sum(1, dtype=torch.int64)
    if count > blocks * ROWS:
        last = words[blocks * ROWS :].sum(0, dtype=torch.int64)
        of_columns = torch.cat([of_columns, last[None]])
    return of_rows, of_columns


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
        self, tensors: Mapping[int, torch.Tensor], empty: Callable[..., torch.Tensor] = torch.empty
    ) -> None:
        """Queue the sums of ``tensors``, contiguous ones by row. ``empty`` allocates the copies."""
        self._held: dict[int, _Held] = {}
        self._empty = empty
        self.without_room: list[int] = []
        """Rows that are not in the snapshot, because the device had no memory for their sums."""
        with torch.no_grad():
            for row, tensor in tensors.items():
                data = byte_view(tensor.detach())
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
        same = torch.zeros((), dtype=torch.bool, device="cpu")
        if self._is_there(held):
            copied.copy_(held.data[first:last], non_blocking=device == held.data.device)
            same = held.sums.same(first, copied)
        return copied[start - first : stop - first], Doubt(row, same)

    def sums(self, row: int) -> BlockSums:
        return self._held[row].sums

    @staticmethod
    def _is_there(held: _Held) -> bool:
        storage = held.data.untyped_storage()
        return (storage.data_ptr(), storage.nbytes()) == (held.address, held.nbytes)
