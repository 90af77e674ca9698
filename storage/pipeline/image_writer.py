"""One image on its way to storage: capture, hash, perhaps pack, and write, chunk by chunk, all
stages at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...drivers.contract import AtMost, Driver, Upload
from ...planner.image import CHUNK_NBYTES, DIGEST_NBYTES, ImageLayout
from ..format.digest import digest, page_of
from ..format.packed import Compression
from ..runtime.buffers import HostBuffer, host_pool
from ..runtime.engine import CPU_THREADS, offload
from ..runtime.executor import execute
from ..runtime.scheduler import Budget, Scheduler, Stage
from ..state.source import ImageSource
from .packing import Packing
from .upload import Opening, write_pages, writing_order

__all__ = ["ImageWriter", "Progress"]


@dataclass(frozen=True, slots=True)
class Progress:
    """Called on the engine's thread, once each: when all bytes are copied, and when all are
    checksummed too; and ``moved``, for each chunk that is copied or checksummed; ``wrote``, for
    each one that is written, with the bytes of the image that have been, and all of them."""

    captured: Callable[[], None]
    sealed: Callable[[], None]
    moved: Callable[[], None] = lambda: None
    wrote: Callable[[int, int], None] = lambda done_nbytes, total_nbytes: None


class ImageWriter:
    """Writes one image, once. With ``budget_nbytes`` None there is host memory for the whole of it,
    and copying comes first: the trainer waits for that. Otherwise memory stays within the budget,
    and storage sets the pace."""

    def __init__(
        self,
        driver: Driver,
        layout: ImageLayout,
        source: ImageSource,
        budget_nbytes: int | None,
        progress: Progress,
        compression: Compression | None = None,
    ) -> None:
        self._driver = driver
        self._layout = layout
        self._source: ImageSource | None = source
        self._budget_nbytes = budget_nbytes
        self._progress = progress
        self._pool = host_pool(CHUNK_NBYTES, source.allocate)
        self._buffers: dict[int, HostBuffer] = {}
        n = layout.chunks if len(layout.start) else 0  # a rank without a shard writes no file
        self._pages = [b""] * n
        self._packing = None if compression is None else Packing(layout)
        # Where a packed chunk goes is known when those before it are packed.
        self._order = (
            list(range(n))
            if self._packing
            else writing_order(n, CHUNK_NBYTES, layout.nbytes, driver.traits)
        )
        self.stored_nbytes = 0
        """Size of the file, when it is written."""
        self._to_capture = self._to_seal = n
        self._written_nbytes = 0

    async def write(self, key: Callable[[], Awaitable[str]]) -> npt.NDArray[np.uint8]:
        """Write the image to ``key()``, which may become known while chunks are being captured.

        Returns the chunks' digests (C, 16); (0, 16), and writes nothing, where there is no shard.
        The image is durable on return. After an error, nothing of it is visible.
        """
        if not self._pages:
            self._report()
            return np.empty((0, DIGEST_NBYTES), np.uint8)
        opening = Opening(self._open(key))
        try:
            await self._stream(opening)
            upload = await opening.upload()
            await self._finish(upload)
        except BaseException:
            self._source = None
            await opening.drop()
            raise
        return np.frombuffer(b"".join(map(digest, self._pages)), np.uint8).reshape(
            -1, DIGEST_NBYTES
        )

    async def _open(self, key: Callable[[], Awaitable[str]]) -> Upload:
        nbytes = AtMost(self._packing.nbytes_max) if self._packing else self._layout.nbytes
        return await self._driver.create(await key(), nbytes)

    async def _stream(self, opening: Opening) -> None:
        sizes = [b - a for a, b in map(self._layout.chunk_range, self._order)]
        stages = {"capture": self._capture, "hash": self._hash, "pack": self._pack}

        async def perform(job: int, stage: str) -> None:
            chunk = self._order[job]
            if stage == "write":
                place = self._place(chunk)  # before anything is waited for: writes begin in order
                await self._write(chunk, place, await opening.upload())
            else:
                await stages[stage](chunk)

        await execute(
            self._scheduler(), sizes, perform, lambda job: self._release(self._order[job])
        )

    def _scheduler(self) -> Scheduler:
        traits, cpu = self._driver.traits, CPU_THREADS
        io = 1 if traits.part_order == "serial" else traits.concurrency
        packed = self._packing is not None
        stages = (
            Stage("capture", "cpu"),
            Stage("hash", "cpu"),
            *((Stage("pack", "cpu"),) if packed else ()),
            Stage("write", "io", in_order=packed or traits.part_order != "any"),
        )
        if self._budget_nbytes is None:
            memory_nbytes = len(self._pages) * CHUNK_NBYTES
            self._pool.keep(memory_nbytes)
        else:  # more than every lane busy gains nothing: copying is faster than any storage
            ours_nbytes = max(CHUNK_NBYTES, self._budget_nbytes - traits.upload_nbytes)
            memory_nbytes = min(ours_nbytes, (io + cpu) * CHUNK_NBYTES)
        return Scheduler(
            stages,
            Budget(memory_nbytes, {"cpu": cpu, "io": io}),
            drain=self._budget_nbytes is not None,
        )

    async def _capture(self, chunk: int) -> None:
        assert self._source is not None
        buffer = self._buffers[chunk] = self._pool.take()
        await offload(self._source.copy, *self._layout.chunk_range(chunk), buffer)
        self._to_capture -= 1
        self._progress.moved()
        self._report()

    async def _hash(self, chunk: int) -> None:
        self._pages[chunk] = await offload(page_of, self._filled(chunk), self._layout.block_nbytes)
        self._to_seal -= 1
        self._progress.moved()
        self._report()

    async def _pack(self, chunk: int) -> None:
        assert self._packing is not None
        await offload(self._packing.pack, chunk, self._filled(chunk))

    def _place(self, chunk: int) -> tuple[int, int]:
        """Where in the file a chunk begins, and its size there."""
        if self._packing:
            return self._packing.place(chunk)
        start, stop = self._layout.chunk_range(chunk)
        return start, stop - start

    async def _write(self, chunk: int, place: tuple[int, int], upload: Upload) -> None:
        start, nbytes = place
        await upload.write(start, self._buffers[chunk].view[:nbytes])
        self._written_nbytes += len(self._filled(chunk))
        self._progress.wrote(self._written_nbytes, self._layout.hashed_end)

    def _filled(self, chunk: int) -> memoryview:
        start, stop = self._layout.chunk_range(chunk)
        return self._buffers[chunk].view[: stop - start]

    def _release(self, chunk: int) -> None:
        buffer = self._buffers.pop(chunk, None)
        if buffer is not None:
            self._pool.give(buffer)

    def _report(self) -> None:
        if self._to_capture == 0 and self._source is not None:
            self._source = None  # lets go of the trainer's tensors
            self._progress.captured()
            self._to_capture = -1
        if self._to_seal == 0:
            self._progress.sealed()
            self._to_seal = -1

    async def _finish(self, upload: Upload) -> None:
        """Write what vouches for the chunks, and commit."""
        start, trailer, ends = self._layout.hashed_end, b"".join(self._pages), None
        if self._packing:
            start, trailer = self._packing.end, trailer + self._packing.index()
            ends = start + len(trailer)
        buffer = self._pool.take()
        try:
            await write_pages(upload, trailer, start, buffer)
        finally:
            self._pool.give(buffer)
        await upload.commit(ends)
        self.stored_nbytes = start + len(trailer)
