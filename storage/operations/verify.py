"""Reading every byte of a checkpoint again, to see whether it is what was written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ...drivers.contract import Driver
from ...errors import DamagedError, NotFoundError
from ...planner.image import DIGEST_NBYTES, blocks_of
from ..format.damage import tensors_at
from ..format.digest import damaged_blocks, digest, page_of
from ..format.manifest import Manifest
from ..runtime.engine import CPU_THREADS, offload
from ..runtime.executor import execute
from ..runtime.inbox import Inbox
from ..runtime.scheduler import Budget, Scheduler, Stage

_PAGES_NBYTES = 256 << 10
"""How much of the stored digests is read at a time: those of a gigabyte."""

__all__ = ["Chunk", "Damage", "VerifyReport", "chunks_of", "verify_images"]


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes [start, stop) of a file that are not what was written, and the tensors they belong to."""

    key: str
    start: int
    stop: int
    what: str
    tensors: tuple[str, ...]


@dataclass
class VerifyReport:
    """``ok`` if nothing is damaged. ``nbytes`` were read, in ``files`` images."""

    files: int
    nbytes: int
    damages: list[Damage] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every byte is what was written."""
        return not self.damages


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes [start, stop) of an image; ``row`` of the manifest's digests is theirs."""

    image: int
    start: int
    stop: int
    row: int


async def verify_images(
    driver: Driver, manifest: Manifest, budget_nbytes: int, progress: Callable[[int, int], None]
) -> VerifyReport:
    """Check every chunk of every image, their pages, and the files' sizes. ``driver`` is that of
    the images (``images_of``)."""
    m = manifest
    report = VerifyReport(len(m.images), 0)
    found = await _sizes(driver, m, report)
    chunks = [chunk for i, nbytes in found.items() for chunk in _whole(m, i, nbytes, report)]
    pages, told, unread = _StoredPages(driver, m, found), dict[int, bytes](), dict[int, str]()
    total = sum(c.stop - c.start for c in chunks)
    inbox = Inbox(driver, m.chunk_nbytes)

    def check(job: int) -> None:
        c = chunks[job]
        if job in unread:
            report.damages.append(_damage(m, c.image, c.start, c.stop, unread[job]))
            return
        page = page_of(inbox[job].view[: c.stop - c.start], m.block_nbytes)
        _compare(m, c, page, told.pop(job), report)
        report.nbytes += c.stop - c.start
        progress(report.nbytes, total)

    async def perform(job: int, stage: str) -> None:
        c = chunks[job]
        if stage == "check":
            await offload(check, job)
            return
        told[job] = await pages.of(c)
        try:
            await inbox.receive(job, m.image_key(c.image), c.start, c.stop - c.start)
        except DamagedError as error:
            ends = m.compression is None  # all that can be wrong then
            unread[job] = "cannot be checked: the file ends before" if ends else error.message

    io = driver.traits.concurrency
    jobs = min(max(1, budget_nbytes // inbox.job_nbytes), io + 2 * CPU_THREADS)
    lanes = {"io": io, "cpu": 1}  # one checker: the report is written by one thread
    scheduler = Scheduler(
        (Stage("read", "io"), Stage("check", "cpu")), Budget(jobs * m.chunk_nbytes, lanes)
    )
    await execute(scheduler, [m.chunk_nbytes] * len(chunks), perform, inbox.release)
    report.damages.sort(key=lambda d: (d.key, d.start))
    return report


async def _sizes(driver: Driver, m: Manifest, report: VerifyReport) -> dict[int, int]:
    """How many bytes of each image are there that has a file. Reports files that are missing, or of
    another size."""
    sizes: dict[int, int] = {}
    columns = (
        m.images.nbytes(m.block_nbytes).tolist(),
        m.images.file_nbytes(m.block_nbytes).tolist(),
    )
    for image, (whole, nbytes) in enumerate(zip(*columns, strict=True)):
        try:
            found = sizes[image] = (await driver.stat(m.image_key(image))).nbytes
        except NotFoundError:
            report.damages.append(_damage(m, image, 0, whole, "the file is missing"))
            continue
        if m.compression is not None:  # at the end of the file is its index
            sizes[image] = whole if found >= nbytes else 0
        if found != nbytes:
            what = f"the file has {found:,} bytes, not {nbytes:,}"
            # A place in a compressed file is none in the image.
            start, stop = sorted((found, nbytes)) if m.compression is None else (0, whole)
            report.damages.append(_damage(m, image, start, stop, what))
    return sizes


def _whole(m: Manifest, image: int, nbytes: int, report: VerifyReport) -> list[Chunk]:
    """The chunks of an image that a file of ``nbytes`` has whole. Reports the others."""
    chunks = chunks_of(m, image)
    whole = [c for c in chunks if c.stop <= nbytes]
    if len(whole) < len(chunks):
        lost = chunks[len(whole)]
        report.damages.append(
            _damage(
                m,
                image,
                lost.start,
                chunks[-1].stop,
                "cannot be checked: the file ends before their chunks do",
            )
        )
    return whole


class _StoredPages:
    """The digests that are stored behind the data, read for many chunks at a time, and kept until
    the last has asked."""

    def __init__(self, driver: Driver, m: Manifest, sizes: Mapping[int, int]) -> None:
        self._driver, self._m, self._sizes = driver, m, sizes
        self._page_nbytes = m.chunk_nbytes // m.block_nbytes * DIGEST_NBYTES
        self._chunks = max(1, _PAGES_NBYTES // self._page_nbytes)
        self._gates: dict[tuple[int, int], asyncio.Lock] = {}
        self._read: dict[tuple[int, int], bytes] = {}
        self._asked: dict[tuple[int, int], int] = {}

    async def of(self, c: Chunk) -> bytes:
        """The page of a chunk; shorter, or empty, where the file ends before. Each chunk asks once."""
        number = c.start // self._m.chunk_nbytes
        group = (c.image, number // self._chunks)
        async with self._gates.setdefault(group, asyncio.Lock()):
            if group not in self._read:
                self._read[group] = await self._fetch(*group)
        first = number % self._chunks * self._page_nbytes
        page = self._read[group][first : first + self._page_nbytes]
        self._asked[group] = self._asked.get(group, 0) + 1
        if self._asked[group] == min(self._chunks, self._count(c.image) - group[1] * self._chunks):
            for kept in (self._gates, self._read, self._asked):
                del kept[group]
        return page

    def _count(self, image: int) -> int:
        return blocks_of(int(self._m.images.hashed_nbytes[image]), self._m.chunk_nbytes)

    async def _fetch(self, image: int, group: int) -> bytes:
        m, span = self._m, self._chunks * self._page_nbytes
        start = int(m.images.hashed_nbytes[image])
        end = start + blocks_of(start, m.block_nbytes) * DIGEST_NBYTES
        if self._sizes[image] < end:
            return b""
        into = bytearray(min(span, end - start - group * span))
        try:
            await self._driver.read(m.image_key(image), start + group * span, memoryview(into))
        except DamagedError:
            return b""  # cut short since its size was looked at
        return bytes(into)


def chunks_of(m: Manifest, image: int) -> list[Chunk]:
    """The chunks of one image, in order."""
    end, first = int(m.images.hashed_nbytes[image]), int(m.first_chunk[image])
    starts = range(0, end, m.chunk_nbytes)
    return [Chunk(image, a, min(a + m.chunk_nbytes, end), first + i) for i, a in enumerate(starts)]


def _compare(m: Manifest, c: Chunk, page: bytes, told: bytes, report: VerifyReport) -> None:
    """The manifest vouches for the chunk as a whole; the stored page, if it is whole, tells which
    blocks are bad."""
    expected = m.images.digests[c.row].tobytes()
    told_whole = digest(told) == expected
    if digest(page) != expected:
        bad = damaged_blocks(page, told) if told_whole else None
        for a, b in _ranges(c, bad, m.block_nbytes):
            report.damages.append(_damage(m, c.image, a, b, "not what was written"))
    elif not told_whole:
        at = (
            int(m.images.hashed_nbytes[c.image])
            + blocks_of(c.start, m.block_nbytes) * DIGEST_NBYTES
        )
        report.damages.append(
            _damage(m, c.image, at, at + len(page), "checksums are not what was written")
        )


def _ranges(c: Chunk, bad: list[int] | None, block_nbytes: int) -> list[tuple[int, int]]:
    if bad is None:  # which blocks is not known
        return [(c.start, c.stop)]
    return [
        (c.start + i * block_nbytes, min(c.start + (i + 1) * block_nbytes, c.stop)) for i in bad
    ]


def _damage(m: Manifest, image: int, start: int, stop: int, what: str) -> Damage:
    return Damage(m.image_key(image), start, stop, what, tuple(tensors_at(m, image, start, stop)))
