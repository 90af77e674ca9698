"""Computes byte ranges from blocks that other hosts hold, overlapping transfers with arithmetic.

Memory is bounded. The caller decides which blocks form a range, and how bytes arrive from another
host.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ....core.aio import all_or_none
from ....core.units import MIB
from ....planner.parity import BLOCK_ALIGN, DataBlock, ParityBlock
from ...arenas.memory import Memory
from ...runtime.buffers import HostBuffer
from ...runtime.engine import offload
from .galois import Bytes

Block: TypeAlias = DataBlock | ParityBlock

BUFFERS_NBYTES = 64 * MIB
"""Limit of all bytes pulled and not yet combined."""
PULLED_NBYTES_MAX = 16 * MIB
"""Limit of a single pull; larger pulls are no faster."""
WORKERS = 2
"""Parts in progress at a time: one is combined while another is pulled. More workers take as long
and use more CPU time, since each pull gets smaller."""
_COMBINED_NBYTES = MIB
"""Output size per step, so that it stays in the CPU cache until its last block is added."""
Combine: TypeAlias = Callable[[Bytes, Sequence[Bytes]], None]


Pull: TypeAlias = Callable[[int, int, Block, int, memoryview], Coroutine[Any, Any, None]]
"""Reads bytes of one block from the member that holds it: ``pull(member, lane, block, start,
into)`` fills ``into`` from ``start`` within the block. Several calls run concurrently. After a call
has ended, even by cancellation, nothing writes to ``into``. Errors reach the caller of
:func:`make_all`."""


@dataclass(frozen=True, eq=False)
class Range:
    """``nbytes`` bytes at ``at`` in ``memory``, computed by ``combine`` from the bytes at ``start``
    of ``blocks`` in a lane. Without ``combine``, they are a copy of the only block."""

    memory: Memory
    at: int
    nbytes: int
    lane: int
    blocks: tuple[Block, ...]
    combine: Combine | None
    start: int = 0

    def parts(self, nbytes: int) -> Iterator[Range]:
        """Yield consecutive parts of at most ``nbytes``."""
        for start in range(0, self.nbytes, nbytes):
            yield Range(
                self.memory,
                self.at + start,
                min(nbytes, self.nbytes - start),
                self.lane,
                self.blocks,
                self.combine,
                start,
            )

    def nbytes_of(self, block: Block) -> int:
        """Return the number of bytes of ``block`` that this part needs."""
        return max(0, min(self.nbytes, block.nbytes - self.start))

    def fill(self, pulled: Sequence[memoryview]) -> None:
        """Combine the pulled bytes of each block, in steps that fit the CPU cache."""
        assert self.combine is not None
        out = np.frombuffer(self.memory.view[self.at : self.at + self.nbytes], np.uint8)
        arrays = [np.frombuffer(view, np.uint8) for view in pulled]
        for start in range(0, self.nbytes, _COMBINED_NBYTES):
            piece = slice(start, start + _COMBINED_NBYTES)
            self.combine(out[piece], [array[piece] for array in arrays])


async def make_all(ranges: Sequence[Range], pull: Pull) -> None:
    """Compute all ranges. Workers take parts in turn and share ``BUFFERS_NBYTES``, so ranges with
    many blocks are pulled in smaller parts. Raises the first error of ``pull`` or of combining,
    after all pulls have ended."""
    width = max((len(one.blocks) for one in ranges if one.combine is not None), default=0)
    nbytes = PULLED_NBYTES_MAX
    if width:
        share_nbytes = BUFFERS_NBYTES // (WORKERS * width)
        nbytes = min(nbytes, share_nbytes // BLOCK_ALIGN * BLOCK_ALIGN)
    parts = (part for one in ranges for part in one.parts(nbytes))

    async def work() -> None:
        buffers: list[memoryview] = []
        for part in parts:  # shared, so each part goes to one worker
            count = len(part.blocks) if part.combine is not None else 0
            while len(buffers) < count:
                buffers.append(HostBuffer.allocate(nbytes).view)
            await _make_part(part, pull, buffers)

    await all_or_none(work() for _ in range(WORKERS))


async def _make_part(part: Range, pull: Pull, buffers: Sequence[memoryview]) -> None:
    if part.combine is None:
        into = part.memory.view[part.at : part.at + part.nbytes]
        await pull(part.blocks[0].member, part.lane, part.blocks[0], part.start, into)
        return
    views = [
        buffer[: part.nbytes_of(block)] for buffer, block in zip(buffers, part.blocks, strict=False)
    ]
    await all_or_none(
        pull(block.member, part.lane, block, part.start, view)
        for block, view in zip(part.blocks, views, strict=True)
        if len(view)
    )
    await offload(part.fill, views)
