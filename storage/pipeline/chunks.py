"""Sources of an image's chunks: the protocol, and chunks that are already in memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ...planner.image import ImageLayout
from ..arenas.memory import Memory
from ..runtime.buffers import HostBuffer, HostPool, host_pool
from ..runtime.engine import offload

Parts = Sequence[tuple[int, int]]
"""Ranges [start, stop) of bytes of an image."""


class ChunkSource(Protocol):
    """Hands out the chunks of one image, each once, in any order."""

    @property
    def reads(self) -> int | None:
        """Number of chunks read from storage at a time; None if chunks are copied by a
        processor."""

    @property
    def pool(self) -> HostPool:
        """The pool that the chunks' buffers come from and return to."""

    async def take(self, chunk: int, parts: Parts | None = None) -> HostBuffer:
        """Return a buffer that begins with the bytes of ``chunk``. The caller returns it to the
        pool. ``parts``: the only bytes needed, as ranges of the image; a source may ignore it."""

    def close(self) -> None:
        """Release everything that was not taken. Idempotent."""


@dataclass
class _Lent(HostPool):
    """A pool that does not take buffers back, because they are parts of an image."""

    def give(self, buffer: HostBuffer) -> None:
        """Keep nothing."""


class MemoryChunks:
    """The chunks of an image in ``memory``, written from there without a copy. ``packed``: hand out
    copies, because chunks are packed in place."""

    reads = None

    def __init__(self, layout: ImageLayout, memory: Memory, *, packed: bool = False) -> None:
        self._packed = packed
        self.pool = host_pool(layout.chunk_nbytes) if packed else _Lent(layout.chunk_nbytes)
        self._layout = layout
        self._memory: Memory | None = memory

    async def take(self, chunk: int, parts: Parts | None = None) -> HostBuffer:
        """Return the chunk's memory; see :class:`ChunkSource`."""
        assert self._memory is not None
        start, stop = self._layout.chunk_range(chunk)
        whole = self._memory.buffer(start, stop - start)
        if not self._packed:
            return whole
        buffer = self.pool.take()
        await offload(ctypes.memmove, buffer.address, whole.address, stop - start)
        return buffer

    def close(self) -> None:
        """Release the memory; see :class:`ChunkSource`."""
        self._memory = None


def fill_frame(layout: ImageLayout, view: memoryview, start: int) -> None:
    """Fill in the bytes of ``view``, at offset ``start`` of an image, that belong to no shard: the
    header, and zeros after the data."""
    header = layout.header[start : start + len(view)]
    view[: len(header)] = header
    padding = max(layout.data_end - start, 0)
    if padding < len(view):
        view[padding:] = bytes(len(view) - padding)


def chunks_to_write(layout: ImageLayout) -> int:
    """Return the number of chunks to write; 0 for an image without shards, which has no file."""
    if len(layout.start) == 0:
        return 0
    return layout.chunks
