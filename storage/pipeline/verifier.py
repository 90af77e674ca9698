"""Verifies a checkpoint by reading every byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...drivers.contract import Driver
from ...errors import DamagedError, NotFoundError
from ...planner.image import DIGEST_NBYTES
from ..format.chunks import (
    Chunk,
    chunk_at,
    chunks_of,
    damaged_ranges,
    page_range,
    tensors_at,
    tensors_in,
)
from ..format.digest import digest, page_of
from ..format.manifest import Manifest
from ..runtime.buffers import ReadBuffers
from ..runtime.engine import CPU_THREADS, offload
from ..runtime.executor import Pipeline, Stage
from ..runtime.scheduler import Budget
from .image_reader import ImageReader

PAGES_NBYTES = 256 << 10
"""Bytes of stored digests read at a time: those of a gigabyte of data."""


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
    """Result of a verification: ``ok`` if nothing is damaged. ``nbytes`` of images were read, in
    ``files``."""

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


async def is_damaged_at(driver: Driver, m: Manifest, rank: int, position: int) -> bool:
    """Return whether the chunk with a byte of the image of ``rank``, or its page, is damaged.

    ``driver`` as in :func:`verify_images`; a byte behind the chunks belongs to a page. An image
    that does not exist is not damaged. Raises StorageError.
    """
    rows = np.flatnonzero(m.images.rank == rank).tolist()
    if not rows:
        return False
    hashed_nbytes = int(m.images.hashed_nbytes[rows[0]])
    if position >= hashed_nbytes:
        position = (position - hashed_nbytes) // DIGEST_NBYTES * m.block_nbytes
    chunk = chunk_at(m, rows[0], min(position, hashed_nbytes - 1))
    reader = ImageReader(driver, m, 0)
    data = memoryview(bytearray(chunk.stop - chunk.start))
    try:
        await reader.read(chunk.image, chunk.start, data)
        await reader.read_pages(chunk.image, [chunk.start])
    except DamagedError:
        return True
    return digest(await offload(page_of, data, m.block_nbytes)) != chunk.digest


class _Verifier:
    """One verification."""

    def __init__(
        self, driver: Driver, manifest: Manifest, progress: Callable[[int, int], None]
    ) -> None:
        self.report = VerifyReport(len(manifest.files), 0)
        self._driver = driver
        self._m = manifest
        self._progress = progress
        self._total_nbytes = 0
        self._buffers = ReadBuffers(driver, manifest.chunk_nbytes)
        self._reader = ImageReader(driver, manifest, 0)
        self._damaged_pages: set[Chunk] = set()
        self._unreadable: dict[Chunk, str] = {}

    async def run(self, budget_nbytes: int) -> None:
        if self._m.extents is None:
            sizes = await self._present_nbytes()
        else:
            await self._check_files()
            image_sizes = self._m.images.nbytes(self._m.block_nbytes)
            sizes = dict(enumerate(image_sizes.tolist()))
        by_image = [self._whole(image, nbytes) for image, nbytes in sizes.items()]
        chunks = [chunk for image_chunks in by_image for chunk in image_chunks]
        self._total_nbytes = sum(chunk.stop - chunk.start for chunk in chunks)
        chunk_nbytes = self._m.chunk_nbytes
        reads = self._driver.traits.concurrency
        allowed = max(1, budget_nbytes // self._buffers.job_nbytes)
        jobs = min(allowed, reads + 2 * CPU_THREADS)
        page_nbytes = chunk_nbytes // self._m.block_nbytes * DIGEST_NBYTES
        at_once = max(1, PAGES_NBYTES // page_nbytes)
        groups = [
            image_chunks[first : first + at_once]
            for image_chunks in by_image
            for first in range(0, len(image_chunks), at_once)
        ]
        await Pipeline(
            [Stage("checksums", "io", self._check_pages)],
            Budget(jobs, {"io": reads}),
        ).run(groups, [1] * len(groups))
        await Pipeline(
            [Stage("read", "io", self._read), Stage("check", "cpu", self._check)],
            Budget(jobs * chunk_nbytes, {"io": reads, "cpu": CPU_THREADS}),
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

    async def _check_files(self) -> None:
        """Report missing files and wrong sizes of files that images share."""
        for row, file in enumerate(self._m.files):
            try:
                found = (await self._driver.stat(file.key)).nbytes
            except NotFoundError:
                found = 0
                what = "the file is missing"
            else:
                what = f"the file has {found:,} bytes, not {file.nbytes:,}"
            if found != file.nbytes:
                start, stop = sorted((found, file.nbytes))
                tensors = tuple(tensors_in(self._m, row))
                self.report.damages.append(Damage(file.key, start, stop, what, tensors))

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
            if self._m.is_plain and error.key == key:  # the only possible problem of a file
                self._unreadable[chunk] = "cannot be checked: the file ends before"
            elif self._m.extents is not None:
                self._unreadable[chunk] = "cannot be checked: a part of their chunk is lost"
            else:
                self._unreadable[chunk] = error.message

    async def _check_pages(self, chunks: Sequence[Chunk]) -> None:
        """Find the damaged pages of neighbouring chunks. They are reported with the chunks' data,
        unless that is damaged too."""
        try:
            await self._reader.read_pages(chunks[0].image, [chunk.start for chunk in chunks])
        except DamagedError:
            for chunk in chunks:
                if await self._page(chunk) is None:
                    self._damaged_pages.add(chunk)

    async def _page(self, chunk: Chunk) -> bytes | None:
        """Return the stored page of a chunk; None if it is damaged."""
        try:
            pages = await self._reader.read_pages(chunk.image, [chunk.start])
        except DamagedError:
            return None
        return pages[chunk.image, chunk.start]

    async def _check(self, chunk: Chunk) -> None:
        """Report the damage of a chunk.

        The manifest's digest covers the whole chunk. The stored page, if intact, locates the
        damaged blocks.
        """
        if chunk in self._unreadable:
            self._add(chunk.image, chunk.start, chunk.stop, self._unreadable.pop(chunk))
            return
        m = self._m
        nbytes = chunk.stop - chunk.start
        page = await offload(page_of, self._buffers[chunk].view[:nbytes], m.block_nbytes)
        if digest(page) != chunk.digest:
            stored_page = await self._page(chunk)
            for bad in damaged_ranges(chunk, chunk.start, page, m.block_nbytes, stored_page):
                self._add(chunk.image, *bad, "not what was written")
        elif chunk in self._damaged_pages:
            what = "checksums are not what was written"
            self._add(chunk.image, *page_range(m, chunk), what)
        self.report.nbytes += nbytes
        self._progress(self.report.nbytes, self._total_nbytes)

    def _add(self, image: int, start: int, stop: int, what: str) -> None:
        """Report bytes [start, stop) of an image, as bytes of the files in which they lie."""
        for part in self._m.file_ranges(image, start, stop):
            end = part.image_start + part.nbytes
            tensors = tuple(tensors_at(self._m, image, part.image_start, end))
            place = (self._m.files[part.file].key, part.start, part.start + part.nbytes)
            self.report.damages.append(Damage(*place, what, tensors))
