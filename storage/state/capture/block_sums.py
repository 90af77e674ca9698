"""Sums over a tensor's bits, block by block, to check that a copy matches an earlier state.

Nothing tracks writes to accelerator tensors, but reading these is cheap. A tensor is seen as rows
of 4 KiB, and as blocks of 512 rows. There is one sum per row, over its words, and one sum per
column of each block. Both are needed, since one sum does not depend on the order of the words. They
detect accidents, not forgery.

The check covers the copied bytes, not the tensor afterwards: a copy may have caught a value that
was changed back since.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....core.units import round_up

__all__ = ["BLOCK_NBYTES", "ROW_NBYTES", "BlockSums", "as_bytes"]

ROW_NBYTES = 4096
ROWS = 512
"""Rows per block."""
BLOCK_NBYTES = ROW_NBYTES * ROWS

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, slots=True)
class BlockSums:
    """The sums of one tensor's bytes, over words of ``word_nbytes``."""

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


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor without lazy bits as 1-D uint8."""
    # Normalize the strides: a dimension of one element may have any stride, but viewing as another
    # dtype needs a stride of 1.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
