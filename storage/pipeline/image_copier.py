"""Copies images between storages, chunk by chunk: read, verify and write in parallel.

Every byte is verified against the manifest before it is written: data by the digest of its chunk;
the pages at the end of an image are recomputed. So a complete copy equals the saved image, whatever
the source returned.

With a :class:`.lender.Lender`, the destination copies equal bytes from another checkpoint there, or
shares its files: they are neither read nor sent.

Compressed images are copied in stored form and unpacked only for verification, so all copies of a
checkpoint are identical. Images that share files with other checkpoints are copied as whole files.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...core.aio import all_or_none, at_most
from ...core.units import ceil_div
from ...drivers.contract import Driver, Upload
from ...errors import DamagedError, NotFoundError
from ...planner.image import DIGEST_NBYTES
from ..format.chunks import Chunk, chunks_of, damaged, damaged_ranges
from ..format.digest import page_of
from ..format.manifest import Manifest
from ..format.packed import page_of_packed
from ..runtime.buffers import HostBuffer, host_pool
from ..runtime.engine import CPU_THREADS, offload
from ..runtime.executor import Pipeline, Stage
from ..runtime.scheduler import Budget
from .image_reader import NOT_WHAT_WAS_WRITTEN, ImageReader
from .image_writer import Opening, write_pages, writing_order
from .lender import Lender, LentImage
from .mapping import image_driver
from .unpacking import Stored


@dataclass
class ImageCopier:
    """Copies one checkpoint's images to ``destination``, under the name of ``attempt``.

    Calls ``sent(nbytes)`` after writing that many more bytes of an image.
    """

    source: ImageReader
    destination: Driver
    attempt: str
    budget_nbytes: int
    sent: Callable[[int], None]
    lender: Lender | None = None

    def __post_init__(self) -> None:
        self.target: Manifest = replace(self.source.manifest.whole, attempt=self.attempt)
        self.sizes: list[int] = self.target.images.file_nbytes(self.target.block_nbytes).tolist()

    async def whole(self) -> list[int]:
        """Return the images that the destination already has, with full size and intact digests.

        Their data is not read again: a committed upload is complete.
        """
        found: list[int] = []
        images = image_driver(self.destination, self.target)
        reader = ImageReader(images, self.target, self.budget_nbytes)

        async def check(image: int) -> None:
            starts = [chunk.start for chunk in chunks_of(self.target, image)]
            try:
                stat = await self.destination.stat(self.target.image_key(image))
                if stat.nbytes == self.sizes[image]:
                    await reader.read_pages(image, starts)
                    found.append(image)
            except (NotFoundError, DamagedError):
                return  # will be written or replaced

        await at_most(self.destination.traits.concurrency, map(check, range(len(self.sizes))))
        return sorted(found)

    def chunks(self, image: int) -> list[Chunk]:
        """Return the chunks of an image in the order in which to write them."""
        chunks = chunks_of(self.target, image)
        if self.target.compression is not None:  # stored sizes of chunks are unknown
            return chunks
        traits = self.destination.traits
        order = writing_order(len(chunks), self.target.chunk_nbytes, self.sizes[image], traits)
        return [chunks[i] for i in order]

    async def run(self, images: Sequence[int]) -> None:
        """Copy these images; each is durable and visible on return.

        After an error, images committed earlier stay and nothing of the others is left. Raises
        DamagedError, with file, bytes and tensors; StorageError.
        """
        count = min(self._pipelines(), len(images))
        by_size = sorted(images, key=lambda image: self.sizes[image])
        groups = [sorted(by_size[number::count]) for number in range(count)]
        await all_or_none(_Copies(self, group).run(count) for group in groups)

    def _pipelines(self) -> int:
        """Return the number of pipelines to run in parallel.

        One suffices if the parts of an upload are written in parallel; serial uploads need several.
        """
        traits = self.destination.traits
        if traits.part_order != "serial":
            return 1
        return max(1, min(traits.concurrency, self.budget_nbytes // self._job_nbytes))

    def budget(self, pipelines: int) -> Budget:
        source = self.source.driver.traits
        destination = self.destination.traits
        writes = ceil_div(destination.concurrency, pipelines)
        lanes = {
            "read": ceil_div(source.concurrency, pipelines),
            "cpu": CPU_THREADS,
            "write": 1 if destination.part_order == "serial" else writes,
        }
        memory_nbytes = self.budget_nbytes // pipelines - destination.upload_nbytes
        jobs = min(max(1, memory_nbytes // self._job_nbytes), sum(lanes.values()))
        return Budget(jobs * self.target.chunk_nbytes, lanes)

    @property
    def _job_nbytes(self) -> int:
        """Budget of a chunk: its buffer, which is our own because the writer may need it
        aligned, and copies held by the source."""
        return self.target.chunk_nbytes * self.source.driver.traits.read_copies


class _Copies:
    """The chunks of some images, in order, in one pipeline."""

    def __init__(self, copier: ImageCopier, images: Sequence[int]) -> None:
        self._copier = copier
        self._reader = copier.source
        self._m = copier.source.manifest
        self._pool = host_pool(self._m.chunk_nbytes)
        self._buffers: dict[Chunk, HostBuffer] = {}
        self._stored: dict[Chunk, Stored] = {}
        self._looking: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._lent: dict[int, LentImage | None] = {}
        self._runs: dict[Chunk, list[tuple[int, int, bool]]] = {}
        """Runs of the chunks that are partly or wholly lent."""
        self._uploads: dict[int, Opening] = {}
        self._chunks: list[Chunk] = []
        self._pages: dict[int, list[bytes]] = {}
        self._left: dict[int, int] = {}
        for image in images:
            chunks = copier.chunks(image)
            self._chunks += chunks
            self._pages[image] = [b""] * len(chunks)
            self._left[image] = len(chunks)

    async def run(self, pipelines: int) -> None:
        """Copy the chunks; on an error, drop the uncommitted uploads."""
        in_order = self._copier.destination.traits.part_order != "any"
        pipeline = Pipeline(
            [
                Stage("read", "read", self._read),
                Stage("check", "cpu", self._check),
                Stage("write", "write", self._write, in_order=in_order),
            ],
            self._copier.budget(pipelines),
            release=self._release,
        )
        sizes = [self._m.chunk_nbytes] * len(self._chunks)  # buffers are whole chunks
        try:
            await pipeline.run(self._chunks, sizes)
        except BaseException:
            for opening in self._uploads.values():
                await opening.drop()
            raise

    async def _read(self, chunk: Chunk) -> None:
        buffer = self._pool.take()
        self._buffers[chunk] = buffer
        lent = await self._lent_image(chunk.image)
        if lent is None:
            self._stored[chunk] = await self._reader.read_stored(chunk, buffer.view)
            return
        self._stored[chunk] = Stored(chunk.start, chunk.stop - chunk.start)
        await self._upload(chunk.image)  # links come first: they decide which blocks are lent
        self._runs[chunk] = runs = lent.runs(chunk)
        for start, stop, is_lent in runs:
            if not is_lent:
                await self._reader.read(chunk.image, start, self._run(chunk, start, stop))

    async def _lent_image(self, image: int) -> LentImage | None:
        """Return what an image may borrow, looked up for its first chunk."""
        lender = self._copier.lender
        if lender is None:
            return None
        async with self._looking[image]:
            if image not in self._lent:
                self._lent[image] = await lender.image(image)
        return self._lent[image]

    async def _check(self, chunk: Chunk) -> None:
        m = self._m
        page = await self._page_of(chunk)
        if damaged_ranges(chunk, chunk.start, page, m.block_nbytes, None):
            pages = await self._reader.read_pages(chunk.image, [chunk.start])
            self._check_page(chunk, chunk.start, page, pages[chunk.image, chunk.start])
        self._pages[chunk.image][chunk.start // m.chunk_nbytes] = page

    def _check_page(self, chunk: Chunk, start: int, page: bytes, stored_page: bytes) -> None:
        bad = damaged_ranges(chunk, start, page, self._m.block_nbytes, stored_page)
        if bad:
            uri = self._reader.driver.uri
            raise damaged(self._m, uri, chunk.image, *bad[0], NOT_WHAT_WAS_WRITTEN)

    async def _write(self, chunk: Chunk) -> None:
        upload = await self._upload(chunk.image)
        stored = self._stored[chunk]
        if chunk in self._runs:
            await self._write_runs(upload, chunk)
        else:
            await upload.write(stored.start, self._view(chunk))
        self._copier.sent(stored.nbytes)
        self._left[chunk.image] -= 1
        if not self._left[chunk.image]:
            await self._finish(chunk.image, upload, self._buffers[chunk])

    async def _write_runs(self, upload: Upload, chunk: Chunk) -> None:
        lender, lent = self._copier.lender, self._lent[chunk.image]
        assert lender is not None
        assert lent is not None
        for start, stop, is_lent in self._runs[chunk]:
            data = self._run(chunk, start, stop)
            if is_lent:
                if await lender.copy(upload, lent, start, stop):
                    continue
                await self._reader.read(chunk.image, start, data)
                page = await offload(page_of, data, self._m.block_nbytes)
                self._check_page(chunk, start, page, lent.pages[chunk.start])
            await upload.write(start, data)

    def _run(self, chunk: Chunk, start: int, stop: int) -> memoryview:
        return self._buffers[chunk].view[start - chunk.start : stop - chunk.start]

    def _release(self, chunk: Chunk) -> None:
        self._runs.pop(chunk, None)
        buffer = self._buffers.pop(chunk, None)
        self._stored.pop(chunk, None)
        if buffer is not None:
            self._pool.give(buffer)

    def _view(self, chunk: Chunk) -> memoryview:
        return self._buffers[chunk].view[: self._stored[chunk].nbytes]

    async def _page_of(self, chunk: Chunk) -> bytes:
        m = self._m
        if chunk in self._runs:
            return await self._page_of_runs(chunk)
        view = self._view(chunk)
        sizes = self._stored[chunk].sizes
        if sizes is None:
            return await offload(page_of, view, m.block_nbytes)
        nbytes = chunk.stop - chunk.start
        try:
            return await offload(page_of_packed, view, sizes, nbytes, m.block_nbytes)
        except ValueError as error:
            what = f"cannot be unpacked: {error}"
            uri = self._reader.driver.uri
            raise damaged(m, uri, chunk.image, chunk.start, chunk.stop, what) from error

    async def _page_of_runs(self, chunk: Chunk) -> bytes:
        """Return the digests of the blocks that were read, and the source's own of the others."""
        lent = self._lent[chunk.image]
        assert lent is not None
        page = bytearray(lent.pages[chunk.start])
        block_nbytes = self._m.block_nbytes
        for start, stop, is_lent in self._runs[chunk]:
            if not is_lent:
                found = await offload(page_of, self._run(chunk, start, stop), block_nbytes)
                at = (start - chunk.start) // block_nbytes * DIGEST_NBYTES
                page[at : at + len(found)] = found
        return bytes(page)

    async def _upload(self, image: int) -> Upload:
        """Return the image's upload, opening it for the first chunk."""
        if image not in self._uploads:
            key = self._copier.target.image_key(image)
            destination = self._copier.destination
            nbytes = self._copier.sizes[image]
            lent = self._lent.get(image)
            if lent is None:
                opened = destination.create(key, nbytes)
            else:
                opened = lent.base.open(destination, key, nbytes)
            self._uploads[image] = Opening(opened)
        return await self._uploads[image].upload()

    async def _finish(self, image: int, upload: Upload, buffer: HostBuffer) -> None:
        """Write the pages, and the index if any, after the chunks they cover; then commit.

        ``buffer`` is free for reuse.
        """
        trailer = b"".join(self._pages.pop(image)) + await self._reader.stored_index(image)
        await write_pages(upload, trailer, self._copier.sizes[image] - len(trailer), buffer)
        self._copier.sent(len(trailer))
        await upload.commit()
        if self._copier.lender is not None:
            self._copier.lender.committed(image, upload)
        del self._uploads[image]
        self._lent.pop(image, None)
