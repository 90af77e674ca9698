"""Sums over a tensor's bits, block by block: was a copy made of the tensor as it was before?

Nothing tracks writes to tensors on an accelerator, but reading these is cheap. A tensor is seen as
rows of 4 KiB, and blocks of 512 rows. Per row there is the sum of its words, and per block the sum
of each column. Both are needed, since one sum does not depend on the order of the words. They
detect accidents, not forgery.

What is compared are the bytes that were copied, not the tensor afterwards: a tensor that was
changed and changed back is not what the copy may have caught.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...core.units import round_up

__all__ = ["BLOCK_NBYTES", "ROW_NBYTES", "BlockSums", "as_bytes"]

ROW_NBYTES = 4096
ROWS = 512
"""Of a block."""
BLOCK_NBYTES = ROW_NBYTES * ROWS

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, slots=True)
class BlockSums:
    """What is known of one tensor's bytes. ``word_nbytes``: of what the sums are."""

    nbytes: int
    word_nbytes: int
    rows: torch.Tensor
    """(R,): of each whole row."""
    columns: torch.Tensor
    """(B, C): of each block, the last of which may have fewer rows."""
    end: torch.Tensor
    """What is left behind the last whole row, as it is."""

    @classmethod
    def of(cls, data: torch.Tensor) -> BlockSums:
        """Of a contiguous uint8 tensor, on its device, by its current stream. Allocates about 0.4 %
        of it."""
        # A storage made by another library may begin anywhere: a misaligned read is an error of
        # CUDA that ends the process's use of the device.
        begins = data.storage_offset() | data.data_ptr()
        word_nbytes = next(n for n in _WORDS if begins % n == 0)
        return cls(
            len(data),
            word_nbytes,
            *_sums(data, word_nbytes),
            data[len(data) // ROW_NBYTES * ROW_NBYTES :].clone(),
        )

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """The whole blocks that hold bytes [start, stop); the last one ends with the tensor."""
        return start // BLOCK_NBYTES * BLOCK_NBYTES, min(self.nbytes, round_up(stop, BLOCK_NBYTES))

    def same(self, start: int, copied: torch.Tensor) -> torch.Tensor:
        """Whether ``copied`` is what the tensor held from byte ``start`` on: a scalar on the
        device of ``copied``, which are whole blocks, see :meth:`span`, and begin at a multiple of
        eight bytes."""
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
        """Whether the two are of the same bytes."""
        mine = (self.rows, self.columns, self.end)
        theirs = (other.rows, other.columns, other.end)
        return self.nbytes == other.nbytes and all(map(torch.equal, mine, theirs))


def _sums(data: torch.Tensor, word_nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of whole rows, and of the columns of blocks of them."""
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


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor without lazy bits, as uint8."""
    # Strided anew: a dimension of one element may have any stride, and other dtypes are only seen
    # through a stride of 1.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
