"""Verifies a checkpoint by reading every byte."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ...core.units import ceil_div
from ...drivers.contract import Driver
from ...errors import DamagedError, NotFoundError
from ...planner.image import DIGEST_NBYTES
from ..format.chunks import Chunk, chunks_of, damaged_ranges, page_range, tensors_at
from ..format.digest import digest, page_of
from ..format.manifest import Manifest
from ..runtime.engine import CPU_THREADS, offload
from ..runtime.executor import Pipeline, Stage
from ..runtime.read_buffers import ReadBuffers
from ..runtime.scheduler import Budget


@dataclass(frozen=True, slots=True)
class Damage:
    """Damaged bytes [start, stop) of a file, and the tensors they belong to."""

    key: str
    start: int
    stop: int
    what: str
    tensors: tuple[str, ...]


@dataclass
class VerifyReport:
    """Result of a verification: ``ok`` if nothing is damaged. ``nbytes`` were read, in ``files``
    images."""

    files: int
    nbytes: int
    damages: list[Damage] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if every byte matches its checksum."""
        return not self.damages


async def verify_images(
    driver: Driver, manifest: Manifest, budget_nbytes: int, progress: Callable[[int, int], None]
) -> VerifyReport:
    """Check every chunk and page of every image, and the sizes of the files.

    ``driver`` must be the driver for images (``image_driver``).
    """
    verifier = _Verifier(driver, manifest, progress)
    await verifier.run(budget_nbytes)
    verifier.report.damages.sort(key=lambda d: (d.key, d.start))
    return verifier.report


class _Verifier:
    """One verification. Only one thread at a time checks chunks and writes the report."""

    def __init__(
        self, driver: Driver, manifest: Manifest, progress: Callable[[int, int], None]
    ) -> None:
        self.report = VerifyReport(len(manifest.images), 0)
        self._driver = driver
        self._m = manifest
        self._progress = progress
        self._total_nbytes = 0
        self._buffers = ReadBuffers(driver, manifest.chunk_nbytes)
        self._stored_pages: dict[Chunk, bytes] = {}
        self._unreadable: dict[Chunk, str] = {}

    async def run(self, budget_nbytes: int) -> None:
        sizes = await self._present_nbytes()
        chunks = [chunk for image, nbytes in sizes.items() for chunk in self._whole(image, nbytes)]
        self._total_nbytes = sum(chunk.stop - chunk.start for chunk in chunks)
        pages = StoredPages(self._driver, self._m, sizes)
        chunk_nbytes = self._m.chunk_nbytes
        reads = self._driver.traits.concurrency
        allowed = max(1, budget_nbytes // self._buffers.job_nbytes)
        jobs = min(allowed, reads + 2 * CPU_THREADS)

        async def read(chunk: Chunk) -> None:
            self._stored_pages[chunk] = await pages.of(chunk)
            await self._read(chunk)

        await Pipeline(
            [Stage("read", "io", read), Stage("check", "cpu", self._check)],
            Budget(jobs * chunk_nbytes, {"io": reads, "cpu": 1}),
            release=self._buffers.release,
        ).run(chunks, [chunk_nbytes] * len(chunks))

    async def _present_nbytes(self) -> dict[int, int]:
        """Return the present bytes of each image that has a file. Reports missing files and
        wrong sizes."""
        m = self._m
        present: dict[int, int] = {}
        image_sizes = m.images.nbytes(m.block_nbytes).tolist()
        file_sizes = m.images.file_nbytes(m.block_nbytes).tolist()
        for image, (image_nbytes, file_nbytes) in enumerate(
            zip(image_sizes, file_sizes, strict=True)
        ):
            try:
                found = (await self._driver.stat(m.image_key(image))).nbytes
            except NotFoundError:
                self._add(image, 0, image_nbytes, "the file is missing")
                continue
            what = f"the file has {found:,} bytes, not {file_nbytes:,}"
            if m.compression is None:
                present[image] = found
                if found != file_nbytes:
                    self._add(image, min(found, file_nbytes), max(found, file_nbytes), what)
            else:
                # A truncated file has lost its index, and its offsets do not map to the image.
                present[image] = image_nbytes if found >= file_nbytes else 0
                if found != file_nbytes:
                    self._add(image, 0, image_nbytes, what)
        return present

    def _whole(self, image: int, nbytes: int) -> list[Chunk]:
        """Return the chunks that a file of ``nbytes`` contains completely. Reports the others."""
        chunks = chunks_of(self._m, image)
        whole = [chunk for chunk in chunks if chunk.stop <= nbytes]
        if len(whole) < len(chunks):
            what = "cannot be checked: the file ends before their chunks do"
            self._add(image, chunks[len(whole)].start, chunks[-1].stop, what)
        return whole

    async def _read(self, chunk: Chunk) -> None:
        key = self._m.image_key(chunk.image)
        try:
            await self._buffers.read(chunk, key, chunk.start, chunk.stop - chunk.start)
        except DamagedError as error:
            if self._m.compression is None:  # the only possible problem
                self._unreadable[chunk] = "cannot be checked: the file ends before"
            else:
                self._unreadable[chunk] = error.message

    async def _check(self, chunk: Chunk) -> None:
        await offload(self._check_now, chunk)

    def _check_now(self, chunk: Chunk) -> None:
        stored_page = self._stored_pages.pop(chunk)
        if chunk in self._unreadable:
            self._add(chunk.image, chunk.start, chunk.stop, self._unreadable.pop(chunk))
            return
        nbytes = chunk.stop - chunk.start
        page = page_of(self._buffers[chunk].view[:nbytes], self._m.block_nbytes)
        self._compare(chunk, page, stored_page)
        self.report.nbytes += nbytes
        self._progress(self.report.nbytes, self._total_nbytes)

    def _compare(self, chunk: Chunk, page: bytes, stored_page: bytes) -> None:
        """Report the damage of a chunk.

        The manifest's digest covers the whole chunk. The stored page, if intact, locates the
        damaged blocks.
        """
        page_is_whole = digest(stored_page) == chunk.digest
        verified_page = stored_page if page_is_whole else None
        bad = damaged_ranges(chunk, chunk.start, page, self._m.block_nbytes, verified_page)
        for start, stop in bad:
            self._add(chunk.image, start, stop, "not what was written")
        if not bad and not page_is_whole:
            what = "checksums are not what was written"
            self._add(chunk.image, *page_range(self._m, chunk), what)

    def _add(self, image: int, start: int, stop: int, what: str) -> None:
        tensors = tuple(tensors_at(self._m, image, start, stop))
        self.report.damages.append(Damage(self._m.image_key(image), start, stop, what, tensors))


PAGES_NBYTES = 256 << 10
"""Bytes of stored digests read at a time: those of a gigabyte of data."""


class StoredPages:
    """Caches stored pages until the last of their chunks has fetched its page."""

    def __init__(self, driver: Driver, m: Manifest, present_nbytes: Mapping[int, int]) -> None:
        """Take the number of existing bytes of each image, ``present_nbytes``."""
        self._driver = driver
        self._m = m
        self._present_nbytes = present_nbytes
        self._page_nbytes = m.chunk_nbytes // m.block_nbytes * DIGEST_NBYTES
        self._chunks = max(1, PAGES_NBYTES // self._page_nbytes)
        self._locks: dict[tuple[int, int], asyncio.Lock] = {}
        self._read: dict[tuple[int, int], bytes] = {}
        self._asked: dict[tuple[int, int], int] = {}

    @property
    def held_nbytes(self) -> int:
        return sum(map(len, self._read.values()))

    async def of(self, chunk: Chunk) -> bytes:
        """Return the page of a chunk; shorter or empty if the file ends early. Call once per
        chunk."""
        number = chunk.start // self._m.chunk_nbytes
        index, position = divmod(number, self._chunks)
        group = (chunk.image, index)
        async with self._locks.setdefault(group, asyncio.Lock()):
            if group not in self._read:
                self._read[group] = await self._fetch(*group)
        first = position * self._page_nbytes
        page = self._read[group][first : first + self._page_nbytes]
        self._asked[group] = self._asked.get(group, 0) + 1
        if self._asked[group] == min(self._chunks, self._count(chunk.image) - index * self._chunks):
            del self._locks[group]
            del self._read[group]
            del self._asked[group]
        return page

    def _count(self, image: int) -> int:
        return ceil_div(int(self._m.images.hashed_nbytes[image]), self._m.chunk_nbytes)

    async def _fetch(self, image: int, index: int) -> bytes:
        m = self._m
        group_nbytes = self._chunks * self._page_nbytes
        pages_start = int(m.images.hashed_nbytes[image])
        pages_stop = pages_start + ceil_div(pages_start, m.block_nbytes) * DIGEST_NBYTES
        if self._present_nbytes[image] < pages_stop:
            return b""
        start = pages_start + index * group_nbytes
        into = bytearray(min(group_nbytes, pages_stop - start))
        try:
            await self._driver.read(m.image_key(image), start, memoryview(into))
        except DamagedError:
            return b""  # truncated after its size was checked
        return bytes(into)
