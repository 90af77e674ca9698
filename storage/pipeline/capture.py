"""Where the chunks of an image come from when it is written: out of the tensors, out of an image
that was captured into host memory before, or out of files (:mod:`.file_chunks`).

The second way cuts a save in two: :func:`capture_image` copies the image, after which the state may
change; an ``ImageWriter`` hashes and writes it later. Saves do not do so: it is there for what
would keep images in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ...core.spans import Where, counting
from ...planner.image import ImageLayout
from ..runtime.buffers import HostBuffer, HostPool, host_pool
from ..runtime.engine import CPU_THREADS, offload
from ..runtime.executor import Pipeline, Stage
from ..runtime.scheduler import Budget
from ..state.source import ImageSource

__all__ = ["CapturedImage", "ChunkSource", "TensorChunks", "capture_image", "chunks_to_write"]


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


class TensorChunks:
    """Chunks that are copied out of the tensors when they are taken."""

    reads = None

    def __init__(self, layout: ImageLayout, source: ImageSource) -> None:
        self.pool = host_pool(layout.chunk_nbytes, source.allocate)
        self._layout = layout
        self._source: ImageSource | None = source
        self._on_device = source.allocate is not None
        self._counted = counting("device_copy")

    async def take(self, chunk: int) -> HostBuffer:
        """See :class:`ChunkSource`."""
        assert self._source is not None
        buffer = self.pool.take()
        try:
            await offload(self._copy, *self._layout.chunk_range(chunk), buffer)
        except BaseException:
            self.pool.give(buffer)
            raise
        return buffer

    def _copy(self, start: int, stop: int, buffer: HostBuffer) -> None:
        source = self._source
        assert source is not None
        if not self._on_device:
            source.copy(start, stop, buffer)
            return
        with self._counted(Where(nbytes=stop - start)):
            source.copy(start, stop, buffer)

    def close(self) -> None:
        """Let go of the trainer's tensors."""
        self._source = None


class CapturedImage:
    """An image in host memory, captured but not hashed. Written once: the memory of a chunk is
    freed when the chunk has been written."""

    reads = None

    def __init__(self, pool: HostPool) -> None:
        self.pool = pool
        self._buffers: dict[int, HostBuffer] = {}

    def put(self, chunk: int, buffer: HostBuffer) -> None:
        """Keep a chunk that was taken from its source."""
        self._buffers[chunk] = buffer

    async def take(self, chunk: int) -> HostBuffer:
        """See :class:`ChunkSource`."""
        return self._buffers.pop(chunk)

    def close(self) -> None:
        """Free the memory of the chunks that were not taken."""
        while self._buffers:
            _chunk, buffer = self._buffers.popitem()
            self.pool.give(buffer)


async def capture_image(
    layout: ImageLayout, chunks: ChunkSource, moved: Callable[[], None] = lambda: None
) -> CapturedImage:
    """Copy a whole image into host memory, and close ``chunks``. ``moved`` is called for each chunk
    that is copied. After an error nothing of the image stays in memory."""
    image = CapturedImage(chunks.pool)

    async def capture(chunk: int) -> None:
        image.put(chunk, await chunks.take(chunk))
        moved()

    count = chunks_to_write(layout)
    budget = Budget(max(1, count), {"cpu": CPU_THREADS})
    chunks.pool.keep(count * layout.chunk_nbytes)
    try:
        await Pipeline([Stage("capture", "cpu", capture)], budget).run(range(count), [1] * count)
    except BaseException:
        image.close()
        raise
    finally:
        chunks.close()
    return image


def chunks_to_write(layout: ImageLayout) -> int:
    """The number of chunks of the image; none where it has no shard, for then no file is
    written."""
    if len(layout.start) == 0:
        return 0
    return layout.chunks
