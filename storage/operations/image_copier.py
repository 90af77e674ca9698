"""Images on their way from one storage to another: read, verified and written, chunk by chunk, all
stages at once.

Every byte that is written has been verified against the manifest: data by the digests of its chunk,
and the pages at the end of an image are made anew. So what arrives whole is what was saved,
whatever the source holds.

Compressed images are copied as they are stored, and unpacked only to be verified: so all copies are
the same, bytes and all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...core.aio import at_most
from ...core.units import ceil_div
from ...drivers.contract import Driver, Upload
from ...errors import DamagedError, NotFoundError
from ..format.damage import damaged
from ..format.digest import damaged_blocks, digest, page_of
from ..format.manifest import Manifest
from ..format.packed import page_of_packed
from ..pipeline.image_reader import ImageReader
from ..pipeline.unpacking import Stored, images_of
from ..pipeline.upload import Opening, write_pages, writing_order
from ..runtime.buffers import HostBuffer, host_pool
from ..runtime.engine import CPU_THREADS, offload
from ..runtime.executor import execute
from ..runtime.scheduler import Budget, Scheduler, Stage
from .verify import Chunk, chunks_of

__all__ = ["ImageCopier", "deal"]


@dataclass
class ImageCopier:
    """Copies of one checkpoint's images. ``destination`` gets them under the name of ``attempt``.

    ``sent(nbytes)`` is called when so many more bytes of an image have been written.
    """

    source: ImageReader
    destination: Driver
    attempt: str
    budget_nbytes: int
    sent: Callable[[int], None]

    def __post_init__(self) -> None:
        self.target: Manifest = replace(self.source.manifest, attempt=self.attempt)
        self.sizes: list[int] = self.target.images.file_nbytes(self.target.block_nbytes).tolist()

    async def whole(self) -> list[int]:
        """The images that the destination has by now: of full size, and with the digests of all
        their blocks. Their data is not read again: an upload that was committed is whole, or the
        driver breaks its contract."""
        found: list[int] = []
        reader = ImageReader(
            images_of(self.destination, self.target), self.target, self.budget_nbytes
        )

        async def look(image: int) -> None:
            starts = [chunk.start for chunk in chunks_of(self.target, image)]
            try:
                if (await self.destination.stat(self.target.image_key(image))).nbytes == self.sizes[
                    image
                ]:
                    await reader.read_pages(image, starts)
                    found.append(image)
            except (NotFoundError, DamagedError):
                return  # it will be written, or replaced

        await at_most(self.destination.traits.concurrency, map(look, range(len(self.sizes))))
        return sorted(found)

    def chunks(self, image: int) -> list[Chunk]:
        """The chunks of an image, in the order in which the destination wants them."""
        found, traits = chunks_of(self.target, image), self.destination.traits
        if (
            self.target.compression is not None
        ):  # how long their parts of the file are is not known yet
            return found
        return [
            found[i]
            for i in writing_order(len(found), self.target.chunk_nbytes, self.sizes[image], traits)
        ]

    async def run(self, images: Sequence[int]) -> None:
        """Copy these images; each is durable and visible when this returns. After an error, those
        that were committed by then stay, and of the others nothing. Raises DamagedError, with file,
        bytes and tensors; StorageError."""
        lines = deal([self.sizes[i] for i in images], self._lines())
        failed: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for line in lines:
                    group.create_task(self._run_line([images[i] for i in line], len(lines)))
        except BaseExceptionGroup as errors:
            failed = errors.exceptions[0]
        if failed is not None:
            raise failed

    def _lines(self) -> int:
        """How many pipelines run side by side. Where the parts of one upload go in parallel, one
        keeps all lanes busy; where they go one after the other, it takes several uploads."""
        traits = self.destination.traits
        if traits.part_order != "serial":
            return 1
        return max(1, min(traits.concurrency, self.budget_nbytes // self._job_nbytes))

    @property
    def _job_nbytes(self) -> int:
        """What a chunk on its way takes of the budget: its buffer, which is ours, for the writer
        may want it aligned, and what the source holds besides."""
        return self.target.chunk_nbytes * self.source.driver.traits.read_copies

    async def _run_line(self, images: Sequence[int], lines: int) -> None:
        line = _Line(self, images)
        sizes = [self.target.chunk_nbytes] * len(line.chunks)  # buffers are whole chunks
        try:
            await execute(self._scheduler(lines), sizes, line.perform, line.release)
        except BaseException:
            await line.abort()
            raise

    def _scheduler(self, lines: int) -> Scheduler:
        ours = self.destination.traits
        reads, writes = (ceil_div(t.concurrency, lines) for t in (self.source.driver.traits, ours))
        lanes = {
            "read": reads,
            "cpu": CPU_THREADS,
            "write": 1 if ours.part_order == "serial" else writes,
        }
        stages = (
            Stage("read", "read"),
            Stage("check", "cpu"),
            Stage("write", "write", in_order=ours.part_order != "any"),
        )
        budget_nbytes = self.budget_nbytes // lines - ours.upload_nbytes
        jobs = min(max(1, budget_nbytes // self._job_nbytes), sum(lanes.values()))
        return Scheduler(stages, Budget(jobs * self.target.chunk_nbytes, lanes))


class _Line:
    """One pipeline: the chunks of some images, in order."""

    def __init__(self, copier: ImageCopier, images: Sequence[int]) -> None:
        self._copier, self._reader = copier, copier.source
        self._m = copier.source.manifest
        self._pool = host_pool(self._m.chunk_nbytes)
        self._buffers: dict[int, HostBuffer] = {}
        self._stored: dict[int, Stored] = {}
        by_image = {image: copier.chunks(image) for image in images}
        self.chunks = [chunk for chunks in by_image.values() for chunk in chunks]
        self._pages = {image: [b""] * len(chunks) for image, chunks in by_image.items()}
        self._left = {image: len(chunks) for image, chunks in by_image.items()}
        self._uploads: dict[int, Opening] = {}

    async def perform(self, job: int, stage: str) -> None:
        chunk = self.chunks[job]
        if stage == "read":
            buffer = self._buffers[job] = self._pool.take()
            self._stored[job] = await self._reader.read_stored(
                chunk.image, chunk.start, chunk.stop, buffer.view
            )
        elif stage == "check":
            await self._check(chunk, self._stored[job], self._view(job))
        else:
            upload, stored = await self._upload(chunk.image), self._stored[job]
            await upload.write(stored.start, self._view(job))
            self._copier.sent(stored.nbytes)
            self._left[chunk.image] -= 1
            if not self._left[chunk.image]:
                await self._finish(chunk.image, upload, self._buffers[job])

    def release(self, job: int) -> None:
        buffer = self._buffers.pop(job, None)
        self._stored.pop(job, None)
        if buffer is not None:
            self._pool.give(buffer)

    async def abort(self) -> None:
        """Drop the uploads that are not committed."""
        for opening in self._uploads.values():
            await opening.drop()

    def _view(self, job: int) -> memoryview:
        return self._buffers[job].view[: self._stored[job].nbytes]

    async def _check(self, chunk: Chunk, stored: Stored, view: memoryview) -> None:
        page = await self._page_of(chunk, stored, view)
        if digest(page) != self._m.images.digests[chunk.row].tobytes():
            pages = await self._reader.read_pages(chunk.image, [chunk.start])
            start = (
                chunk.start
                + damaged_blocks(page, pages[chunk.image, chunk.start])[0] * self._m.block_nbytes
            )
            stop = min(start + self._m.block_nbytes, chunk.stop)
            raise damaged(
                self._m,
                self._reader.driver.uri,
                chunk.image,
                start,
                stop,
                "are not what was written",
            )
        self._pages[chunk.image][chunk.start // self._m.chunk_nbytes] = page

    async def _page_of(self, chunk: Chunk, stored: Stored, view: memoryview) -> bytes:
        if stored.sizes is None:
            return await offload(page_of, view, self._m.block_nbytes)
        where = (self._m, self._reader.driver.uri, chunk.image, chunk.start, chunk.stop)
        try:
            return await offload(
                page_of_packed, view, stored.sizes, chunk.stop - chunk.start, self._m.block_nbytes
            )
        except ValueError as error:
            raise damaged(*where, f"cannot be unpacked: {error}") from error

    async def _upload(self, image: int) -> Upload:
        """The image's upload, opened by whoever asks first."""
        if image not in self._uploads:
            key = self._copier.target.image_key(image)
            self._uploads[image] = Opening(
                self._copier.destination.create(key, self._copier.sizes[image])
            )
        return await self._uploads[image].upload()

    async def _finish(self, image: int, upload: Upload, buffer: HostBuffer) -> None:
        """Write the pages, and the index if there is one, after all that they vouch for, and
        commit. ``buffer`` is free by now."""
        pages = b"".join(self._pages.pop(image)) + await self._reader.stored_index(image)
        await write_pages(upload, pages, self._copier.sizes[image] - len(pages), buffer)
        self._copier.sent(len(pages))
        await upload.commit()
        del self._uploads[image]


def deal(nbytes: Sequence[int], hands: int) -> list[list[int]]:
    """Indices of ``nbytes`` in at most ``hands`` hands of about equal sums, each in ascending
    order; none is empty."""
    dealt: list[list[int]] = [[] for _ in range(min(hands, len(nbytes)))]
    held = [0] * len(dealt)
    for index in sorted(range(len(nbytes)), key=lambda i: -nbytes[i]):
        least = held.index(min(held))
        dealt[least].append(index)
        held[least] += nbytes[index]
    return [sorted(hand) for hand in dealt]
