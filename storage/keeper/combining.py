"""Ranges of bytes that are made of blocks which other hosts hold: several pulls are under way while
others that have come are combined, piece by piece, in memory of bounded size.

Scope: neither which blocks make what, nor how bytes come from another host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from ...core.aio import all_or_none
from ...core.units import MIB
from ...planner.parity import BLOCK_ALIGN, DataBlock, ParityBlock
from ..arenas.memory import Memory
from ..runtime.buffers import HostBuffer
from ..runtime.engine import offload
from .galois import Bytes

__all__ = [
    "BUFFERS_NBYTES",
    "PULLED_NBYTES_MAX",
    "WORKERS",
    "Block",
    "Combine",
    "Pull",
    "Range",
    "make_all",
]

Block: TypeAlias = DataBlock | ParityBlock

BUFFERS_NBYTES = 64 * MIB
"""Of all that is pulled and not combined yet."""
PULLED_NBYTES_MAX = 16 * MIB
"""Of one pull: larger ones are no faster."""
WORKERS = 2
"""Parts that are made at the same time: while one is combined, another is pulled. More of them take
no less time, and more processor time, since each of their pulls is smaller."""
_COMBINED_NBYTES = MIB
"""What is made of so many bytes stays in a processor's cache until the last of them is added."""
Combine: TypeAlias = Callable[[Bytes, Sequence[Bytes]], None]


class Pull(Protocol):
    """Gets bytes of one block from the member that holds it. Several calls are under way at a time.
    Once a call has ended, also by cancellation, nothing writes to its ``into`` any more."""

    async def __call__(
        self, member: int, lane: int, block: Block, start: int, into: memoryview
    ) -> None:
        """Fill ``into``, which has a byte at least, with bytes of ``block`` of ``lane``, from
        ``start`` within the block. The block may end before the one that the member holds does.
        Whoever asked for the whole raises what this raises: StorageError, DamagedError."""


@dataclass(frozen=True, eq=False)
class Range:
    """Bytes to be made, ``nbytes`` of them from ``at`` on in ``memory``, out of the bytes from
    ``start`` on of ``blocks`` of a lane: by ``combine``, or else they are those of the only
    block."""

    memory: Memory
    at: int
    nbytes: int
    lane: int
    blocks: tuple[Block, ...]
    combine: Combine | None
    start: int = 0

    def parts(self, nbytes: int) -> Iterator[Range]:
        """The same, in parts of at most ``nbytes``."""
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
        """How many bytes of ``block`` go into this part."""
        return max(0, min(self.nbytes, block.nbytes - self.start))

    def fill(self, pulled: Sequence[memoryview]) -> None:
        """Combine what was pulled of each block; no more is touched at a time than a cache
        holds."""
        assert self.combine is not None
        out = np.frombuffer(self.memory.view[self.at : self.at + self.nbytes], np.uint8)
        arrays = [np.frombuffer(view, np.uint8) for view in pulled]
        for start in range(0, self.nbytes, _COMBINED_NBYTES):
            piece = slice(start, start + _COMBINED_NBYTES)
            self.combine(out[piece], [array[piece] for array in arrays])


async def make_all(ranges: Sequence[Range], pull: Pull) -> None:
    """Make all ranges. Several workers take parts of them in turn, each with buffers of its own:
    ``BUFFERS_NBYTES`` together, so what is made of many blocks is pulled in smaller parts. Raises
    what ``pull`` and combining raise, at the first failure, when no pull is under way any more."""
    width = max((len(one.blocks) for one in ranges if one.combine is not None), default=0)
    nbytes = PULLED_NBYTES_MAX
    if width:
        share_nbytes = BUFFERS_NBYTES // (WORKERS * width)
        nbytes = min(nbytes, share_nbytes // BLOCK_ALIGN * BLOCK_ALIGN)
    parts = (part for one in ranges for part in one.parts(nbytes))

    async def work() -> None:
        buffers: list[memoryview] = []
        for part in parts:  # what one worker has taken no other one sees
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
