"""Reading every byte of a checkpoint again, to see whether it is what was written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..drivers.contract import Driver
from ..errors import DamagedError, NotFoundError
from ..planner.image import DIGEST_NBYTES, blocks_of
from .buffers import HostBuffer, host_pool
from .damage import tensors_at
from .digest import damaged_blocks, digest, page_of
from .engine import CPU_THREADS, offload
from .executor import execute
from .manifest import Manifest
from .scheduler import Budget, Scheduler, Stage

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
    """Check every chunk of every image, their pages, and the files' sizes."""
    m = manifest
    report = VerifyReport(len(m.images), 0)
    stored = await _stored_pages(driver, m, report)
    chunks = [chunk for i in range(len(m.images)) if stored[i] is not None for chunk in chunks_of(m, i)]
    total = sum(c.stop - c.start for c in chunks)
    pool, buffers = host_pool(m.chunk_nbytes), dict[int, HostBuffer]()

    def check(job: int) -> None:
        c = chunks[job]
        page = page_of(buffers[job].view[: c.stop - c.start], m.block_nbytes)
        _compare(m, c, page, stored[c.image] or b"", report)
        report.nbytes += c.stop - c.start
        progress(report.nbytes, total)

    async def perform(job: int, stage: str) -> None:
        c = chunks[job]
        if stage == "check":
            await offload(check, job)
            return
        buffers[job] = pool.take()
        try:
            await driver.read(m.image_key(c.image), c.start, buffers[job].view[: c.stop - c.start])
        except DamagedError:
            buffers[job].view[: c.stop - c.start] = bytes(c.stop - c.start)  # the size was reported already

    def release(job: int) -> None:
        pool.give(buffers.pop(job))

    io = driver.traits.concurrency
    jobs = min(max(1, budget_nbytes // m.chunk_nbytes), io + 2 * CPU_THREADS)
    lanes = {"io": io, "cpu": 1}  # one checker: the report is written by one thread
    scheduler = Scheduler((Stage("read", "io"), Stage("check", "cpu")), Budget(jobs * m.chunk_nbytes, lanes))
    await execute(scheduler, [m.chunk_nbytes] * len(chunks), perform, release)
    report.damages.sort(key=lambda d: (d.key, d.start))
    return report


async def _stored_pages(driver: Driver, m: Manifest, report: VerifyReport) -> list[bytes | None]:
    """Per image the digests of its blocks, as stored behind the data; None where the file is missing."""
    stored: list[bytes | None] = []
    for image, nbytes in enumerate(m.images.nbytes(m.block_nbytes).tolist()):
        key, hashed = m.image_key(image), int(m.images.hashed_nbytes[image])
        pages = bytearray(nbytes - hashed)
        try:
            found = (await driver.stat(key)).nbytes
            if found != nbytes:
                report.damages.append(
                    _damage(
                        m,
                        image,
                        min(found, nbytes),
                        max(found, nbytes),
                        f"the file has {found:,} bytes, not {nbytes:,}",
                    )
                )
            if found >= nbytes:
                await driver.read(key, hashed, memoryview(pages))
        except NotFoundError:
            report.damages.append(_damage(m, image, 0, nbytes, "the file is missing"))
            stored.append(None)
            continue
        stored.append(bytes(pages))
    return stored


def chunks_of(m: Manifest, image: int) -> list[Chunk]:
    """The chunks of one image, in order."""
    end, first = int(m.images.hashed_nbytes[image]), int(m.first_chunk[image])
    starts = range(0, end, m.chunk_nbytes)
    return [Chunk(image, a, min(a + m.chunk_nbytes, end), first + i) for i, a in enumerate(starts)]


def _compare(m: Manifest, c: Chunk, page: bytes, stored: bytes, report: VerifyReport) -> None:
    """The manifest vouches for the chunk as a whole; the stored page, if it is whole, tells which blocks are bad."""
    first = blocks_of(c.start, m.block_nbytes) * DIGEST_NBYTES
    told = stored[first : first + len(page)]
    expected = m.images.digests[c.row].tobytes()
    told_whole = digest(told) == expected
    if digest(page) != expected:
        bad = damaged_blocks(page, told) if told_whole else None
        for a, b in _ranges(c, bad, m.block_nbytes):
            report.damages.append(_damage(m, c.image, a, b, "not what was written"))
    elif not told_whole:
        at = int(m.images.hashed_nbytes[c.image]) + first
        report.damages.append(_damage(m, c.image, at, at + len(page), "checksums are not what was written"))


def _ranges(c: Chunk, bad: list[int] | None, block_nbytes: int) -> list[tuple[int, int]]:
    if bad is None:  # which blocks is not known
        return [(c.start, c.stop)]
    return [(c.start + i * block_nbytes, min(c.start + (i + 1) * block_nbytes, c.stop)) for i in bad]


def _damage(m: Manifest, image: int, start: int, stop: int, what: str) -> Damage:
    return Damage(m.image_key(image), start, stop, what, tuple(tensors_at(m, image, start, stop)))
