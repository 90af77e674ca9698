"""Capture: copies the chunks of an image out of the tensors.

Either into buffers, as an :class:`~.image_writer.ImageWriter` requests them; or a whole image into
a keeper's memory, after which the state may change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ...core.aio import side_by_side
from ...core.spans import Where, counting
from ...planner.image import ImageLayout
from ..arenas.memory import Memory
from ..runtime.buffers import HostBuffer, host_pool
from ..runtime.engine import CPU_THREADS, offload
from ..runtime.executor import Pipeline, Stage
from ..runtime.scheduler import Budget
from ..state.capture.switch_interval import short_switch_interval
from ..state.capture.write_tracking import overlaps, without
from ..state.source import ImageSource
from .chunks import Parts, chunks_to_write

PIECE_NBYTES = 64 << 20
"""Most bytes of an image copied by one call."""
_PIECES_PER_THREAD = 4
"""Minimum number of pieces per thread, so that threads finish at about the same time."""


class TensorChunks:
    """A :class:`.chunks.ChunkSource` that copies chunks out of the tensors on demand."""

    reads = None

    def __init__(self, layout: ImageLayout, source: ImageSource) -> None:
        self.pool = host_pool(layout.chunk_nbytes, source.allocate)
        self._layout = layout
        self._source: ImageSource | None = source
        self._on_device = source.allocate is not None
        self._counted = counting("device_copy")

    async def take(self, chunk: int, parts: Parts | None = None) -> HostBuffer:
        """Copy a chunk, or its ``parts``, into a new buffer; see :class:`.chunks.ChunkSource`."""
        buffer = self.pool.take()
        whole = self._layout.chunk_range(chunk)
        try:
            await offload(self._copy_parts, parts or [whole], whole[0], buffer)
        except BaseException:
            self.pool.give(buffer)
            raise
        return buffer

    def _copy_parts(self, parts: Parts, start: int, buffer: HostBuffer) -> None:
        for begin, end in parts:
            self._copy(begin, end, buffer.part(begin - start, end - start))

    async def known(self, pages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return the digests of chunks that had the digests ``pages`` in the save before, except
        where finding out would take long. Only blocks in doubt are read."""
        source = self._source
        assert source is not None
        proven = source.proven()
        ranges = {chunk: self._layout.chunk_range(chunk) for chunk in pages}
        doubts = {c: without([range_], overlaps(proven, [range_])) for c, range_ in ranges.items()}
        half_nbytes = self._layout.chunk_nbytes // 2
        asked = [chunk for chunk in pages if _nbytes_of(doubts[chunk]) <= half_nbytes]

        def found(chunks: Sequence[int]) -> dict[int, bytes]:
            spare = self.pool.take()
            try:
                return {c: source.page(pages[c], ranges[c][0], doubts[c], spare) for c in chunks}
            finally:
                self.pool.give(spare)

        shares = (asked[thread::CPU_THREADS] for thread in range(CPU_THREADS))
        answers = await side_by_side(*(offload(found, share) for share in shares))
        return dict(sorted(item for answer in answers for item in answer.items()))

    async def copy_range(self, start: int, stop: int, buffer: HostBuffer) -> None:
        """Copy bytes [start, stop) of the image to the beginning of ``buffer``."""
        await offload(self._copy, start, stop, buffer)

    def _copy(self, start: int, stop: int, buffer: HostBuffer) -> None:
        source = self._source
        assert source is not None
        if not self._on_device:
            source.copy(start, stop, buffer)
            return
        with self._counted(Where(nbytes=stop - start)):
            source.copy(start, stop, buffer)

    def close(self) -> None:
        """Release the trainer's tensors."""
        self._source = None


async def capture_into(
    memory: Memory,
    layout: ImageLayout,
    chunks: TensorChunks,
    moved: Callable[[], None] = lambda: None,
    *,
    beside: bool = False,
) -> None:
    """Copy a whole image except its pages into ``memory``, then close ``chunks``.

    ``moved`` is called for each copied piece. ``beside``: training continues meanwhile, so leave it
    a processor.
    """

    def range_of(piece: range) -> tuple[int, int]:
        return layout.chunk_range(piece[0])[0], layout.chunk_range(piece[-1])[1]

    async def capture(piece: range) -> None:
        start, stop = range_of(piece)
        if not memory.is_populated:
            await offload(memory.allocate, start, stop)
        await chunks.copy_range(start, stop, memory.buffer(start, stop - start))
        moved()

    def where(piece: range) -> Where:
        start, stop = range_of(piece)
        return Where("", start, stop - start)

    pieces = _pieces(layout)
    budget = Budget(max(1, len(pieces)), {"cpu": CPU_THREADS - int(beside)})
    stages = [Stage("capture", "cpu", capture)]
    try:
        with short_switch_interval():
            await Pipeline(stages, budget, where=where).run(pieces, [1] * len(pieces))
        memory.is_populated = True
    finally:
        chunks.close()


def _nbytes_of(ranges: Parts) -> int:
    return sum(stop - start for start, stop in ranges)


def _pieces(layout: ImageLayout) -> list[range]:
    """Return the chunks of an image in groups that are copied by one call.

    The C library copies a long run of memory past the processor's cache. That is faster by half,
    and leaves the trainer's data in the cache.
    """
    count = chunks_to_write(layout)
    at_once = min(PIECE_NBYTES // layout.chunk_nbytes, count // (_PIECES_PER_THREAD * CPU_THREADS))
    step = max(1, at_once)
    return [range(first, min(first + step, count)) for first in range(0, count, step)]
