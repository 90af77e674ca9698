"""What an image that is written comes from: its chunks, handed out one by one; and chunks that lie
in memory as an image already."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ...planner.image import ImageLayout
from ..arenas.memory import Memory
from ..runtime.buffers import HostBuffer, HostPool

__all__ = ["ChunkSource", "MemoryChunks", "chunks_to_write"]


class ChunkSource(Protocol):
    """Hands out the chunks of one image, each once, in any order."""

    @property
    def reads(self) -> int | None:
        """How many chunks are read from storage at a time; None where chunks are copied, which
        takes a processor."""

    @property
    def pool(self) -> HostPool:
        """Where the buffers of the chunks come from, and go when they are no longer used."""

    async def take(self, chunk: int) -> HostBuffer:
        """A buffer that begins with the bytes of ``chunk``. It is the caller's, which gives it
        back to the pool."""

    def close(self) -> None:
        """Let go of everything that was not taken. Does no harm where it is called twice."""


@dataclass
class _Lent(HostPool):
    """A pool that buffers are not given back to, since they are parts of an image."""

    def give(self, buffer: HostBuffer) -> None:
        """Keep nothing."""


class MemoryChunks:
    """The chunks of an image in ``memory``: they are written from where they are."""

    reads = None

    def __init__(self, layout: ImageLayout, memory: Memory) -> None:
        self.pool: HostPool = _Lent(layout.chunk_nbytes)
        self._layout = layout
        self._memory: Memory | None = memory

    async def take(self, chunk: int) -> HostBuffer:
        """See :class:`ChunkSource`."""
        assert self._memory is not None
        start, stop = self._layout.chunk_range(chunk)
        return self._memory.buffer(start, stop - start)

    def close(self) -> None:
        """See :class:`ChunkSource`."""
        self._memory = None


def chunks_to_write(layout: ImageLayout) -> int:
    """The number of chunks of the image; none where it has no shard, for then no file is
    written."""
    if len(layout.start) == 0:
        return 0
    return layout.chunks
