"""Reading planned ranges of images, verified, and handing each on: all at once, within a budget."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from ...core.aio import at_most
from ...drivers.contract import Driver
from ...errors import DamagedError, NotFoundError
from ...planner.coverage import flawed
from ...planner.image import DIGEST_NBYTES, blocks_of
from ...planner.loading import LoadPlan, Targets, plan_load
from ..format.damage import damaged
from ..format.digest import damaged_blocks, digest, page_of
from ..format.manifest import MANIFEST_KEY, Manifest
from ..runtime.buffers import HostBuffer
from ..runtime.engine import CPU_THREADS, offload
from ..runtime.executor import execute
from ..runtime.inbox import Inbox
from ..runtime.scheduler import Budget, Scheduler, Stage
from .unpacking import Stored, Unpacked

__all__ = ["Deliver", "HandOn", "ImageReader", "plan_reads"]

STAGES = (Stage("read", "io"), Stage("deliver", "cpu"))
HAND_ON = Stage("hand on", "others")

Deliver = Callable[[int, HostBuffer], None]
"""Called in a worker thread with the number of a read, and its verified bytes at the beginning of
the buffer."""

HandOn = Callable[[int, HostBuffer], Awaitable[None]]
"""Called with the same, when it was delivered; the buffer is free when this has returned."""


def plan_reads(
    driver: Driver, manifest: Manifest, targets: Targets, read_nbytes: int | None = None
) -> LoadPlan:
    """What to read of a checkpoint to fill ``targets``, at most ``read_nbytes`` at a time, which
    divide a chunk (None: a chunk). Raises DamagedError where the manifest contradicts itself."""
    m = manifest
    _check_coverage(m, targets)
    return plan_load(
        m.tensors, m.shards, targets, m.images.hashed_nbytes,
        chunk_nbytes=read_nbytes or m.chunk_nbytes, block_nbytes=m.block_nbytes, gap_nbytes=driver.traits.coalesce_nbytes,
    )  # fmt: skip


def _check_coverage(m: Manifest, targets: Targets) -> None:
    """Raise DamagedError where shards of a wanted tensor overlap: something of it would be left as
    it is."""
    wanted = np.zeros(len(m.tensors), bool)
    wanted[targets.tensor] = True
    rows = np.flatnonzero(wanted[m.shards.tensor])
    number = np.cumsum(wanted) - 1
    s = m.shards
    if flawed(
        m.tensors.shape[wanted], number[s.tensor[rows]], s.offsets[rows], s.lengths[rows]
    ).any():
        raise DamagedError(
            "the manifest contradicts itself: shards of a tensor overlap", key=MANIFEST_KEY
        )


def _budget(jobs: int) -> Budget:
    return Budget(jobs, {"io": max(1, jobs - CPU_THREADS), "cpu": CPU_THREADS, "others": jobs})


@dataclass
class ImageReader:
    """Reads of one checkpoint, with the driver of its images (``images_of``). ``bytes_read`` counts
    what was asked of that, checksums included; ``bytes_received`` what other ranks have read and
    handed on."""

    driver: Driver
    manifest: Manifest
    budget_nbytes: int
    bytes_read: int = 0
    bytes_wanted: int = 0
    bytes_received: int = 0

    async def run(
        self,
        plan: LoadPlan,
        deliver: Deliver,
        *,
        jobs: int | None = None,
        hand_on: HandOn | None = None,
    ) -> None:
        """Perform all reads of ``plan``. Raises DamagedError before a damaged byte is delivered,
        and StorageError.

        ``jobs``: so many are at work at a time; by default what :meth:`jobs` says of all reads that
        the driver takes.
        """
        self.bytes_wanted = plan.bytes_wanted
        pages = await self._pages(plan)
        inbox = Inbox(self.driver, self.manifest.chunk_nbytes)
        sizes = (plan.stop - plan.start).tolist()
        images, starts, stops = plan.image.tolist(), plan.start.tolist(), plan.stop.tolist()

        def check_and_deliver(job: int) -> None:
            self._verify(images[job], starts[job], stops[job], inbox[job].view[: sizes[job]], pages)
            deliver(job, inbox[job])

        async def perform(job: int, stage: str) -> None:
            if stage == "read":
                with self._reading(images[job], starts[job], sizes[job]) as key:
                    await inbox.receive(job, key, starts[job], sizes[job])
            elif stage == "deliver":
                await offload(check_and_deliver, job)
            elif hand_on is not None:
                await hand_on(job, inbox[job])

        stages = (*STAGES, HAND_ON) if hand_on else STAGES
        # Jobs are counted, not bytes: buffers are of one size, however short the read.
        scheduler = Scheduler(stages, _budget(jobs or self.jobs(self.driver.traits.concurrency)))
        await execute(scheduler, [1] * len(sizes), perform, inbox.release)

    def jobs(self, reads: int, besides_nbytes: int = 0) -> int:
        """How many jobs the budget allows, each with so much memory besides: at most so many
        ``reads``, and what is looked at meanwhile."""
        job_nbytes = Inbox(self.driver, self.manifest.chunk_nbytes).job_nbytes + besides_nbytes
        return min(max(1, self.budget_nbytes // job_nbytes), reads + CPU_THREADS)

    async def read(self, image: int, start: int, into: memoryview) -> None:
        """Fill ``into`` from byte ``start`` of an image, unverified. Raises DamagedError where the
        bytes are not there."""
        with self._reading(image, start, len(into)) as key:
            await self.driver.read(key, start, into)

    async def read_stored(self, image: int, start: int, stop: int, into: memoryview) -> Stored:
        """Fill the beginning of ``into`` with what is stored of the chunk [start, stop); it is the
        chunk, unless images are compressed. Raises as :meth:`read` does."""
        if not isinstance(self.driver, Unpacked):
            await self.read(image, start, into[: stop - start])
            return Stored(start, stop - start)
        with self._reading(image, start, stop - start):
            return await self.driver.read_stored(image, start, stop, into)

    async def stored_index(self, image: int) -> bytes:
        """The end of a compressed image's file; nothing of one that is not. Raises as :meth:`read`
        does."""
        return (
            (await self.driver.index(image)).encode() if isinstance(self.driver, Unpacked) else b""
        )

    @contextmanager
    def _reading(self, image: int, start: int, nbytes: int) -> Iterator[str]:
        """The key to read from. Counts the read, and says of bytes that are not there which they
        are."""
        self.bytes_read += nbytes
        where = (self.manifest, self.driver.uri, image, start, start + nbytes)
        try:
            yield self.manifest.image_key(image)
        except DamagedError as error:
            # Else all that a driver can find wrong is that the file ends too early.
            what = (
                "are beyond the end of the file"
                if self.manifest.compression is None
                else error.message
            )
            raise damaged(*where, what) from error
        except NotFoundError as error:
            raise damaged(*where, "are lost with their whole file") from error

    def _chunk(self, image: int, start: int) -> tuple[int, int, bytes]:
        """The chunk around ``start``: its range in the file, and its digest."""
        m = self.manifest
        index = start // m.chunk_nbytes
        stop = min((index + 1) * m.chunk_nbytes, int(m.images.hashed_nbytes[image]))
        return (
            index * m.chunk_nbytes,
            stop,
            m.images.digests[int(m.first_chunk[image]) + index].tobytes(),
        )

    def _verify(
        self,
        image: int,
        start: int,
        stop: int,
        view: memoryview,
        pages: dict[tuple[int, int], bytes],
    ) -> None:
        page, block_nbytes = page_of(view, self.manifest.block_nbytes), self.manifest.block_nbytes
        chunk_start, chunk_stop, expected = self._chunk(image, start)
        if (start, stop) == (chunk_start, chunk_stop):
            if digest(page) != expected:
                raise damaged(
                    self.manifest, self.driver.uri, image, start, stop, "are not what was written"
                )
            return
        first = (start - chunk_start) // block_nbytes * DIGEST_NBYTES
        bad = damaged_blocks(page, pages[image, chunk_start][first : first + len(page)])
        if bad:
            a = start + bad[0] * block_nbytes
            raise damaged(
                self.manifest,
                self.driver.uri,
                image,
                a,
                min(a + block_nbytes, stop),
                "are not what was written",
            )

    async def _pages(self, plan: LoadPlan) -> dict[tuple[int, int], bytes]:
        """The verified pages of the chunks that are read in part, by image and start of the chunk."""
        partial: list[tuple[int, int]] = []
        for image, start, stop in zip(
            plan.image.tolist(), plan.start.tolist(), plan.stop.tolist(), strict=True
        ):
            chunk_start, chunk_stop, _ = self._chunk(image, start)
            if (start, stop) != (chunk_start, chunk_stop) and (
                not partial or partial[-1] != (image, chunk_start)
            ):
                partial.append((image, chunk_start))
        pages: dict[tuple[int, int], bytes] = {}

        async def fetch(image: int, starts: Sequence[int]) -> None:
            pages.update(await self.read_pages(image, starts))

        await at_most(
            self.driver.traits.concurrency, (fetch(*group) for group in self._together(partial))
        )
        return pages

    def _together(self, partial: Sequence[tuple[int, int]]) -> Iterator[tuple[int, list[int]]]:
        """Pages that lie close enough to each other in a file to be read as one."""
        m = self.manifest
        page_nbytes = m.chunk_nbytes // m.block_nbytes * DIGEST_NBYTES
        gap = self.driver.traits.coalesce_nbytes // page_nbytes
        for image, members in groupby(partial, key=lambda p: p[0]):
            run: list[int] = []
            for _, start in members:
                if run and start // m.chunk_nbytes - run[-1] // m.chunk_nbytes > gap + 1:
                    yield image, run
                    run = []
                run.append(start)
            yield image, run

    async def read_pages(self, image: int, starts: Sequence[int]) -> dict[tuple[int, int], bytes]:
        """The verified pages of the chunks that begin at ``starts``, ascending: read as one, with
        what lies between.

        Raises DamagedError.
        """
        m = self.manifest
        _, last_stop, _ = self._chunk(image, starts[-1])
        first, last = blocks_of(starts[0], m.block_nbytes), blocks_of(last_stop, m.block_nbytes)
        data = bytearray((last - first) * DIGEST_NBYTES)
        position = int(m.images.hashed_nbytes[image]) + first * DIGEST_NBYTES
        await self.read(image, position, memoryview(data))
        pages = {}
        for start in starts:
            _, stop, expected = self._chunk(image, start)
            a, b = ((blocks_of(x, m.block_nbytes) - first) * DIGEST_NBYTES for x in (start, stop))
            pages[image, start] = page = bytes(data[a:b])
            if digest(page) != expected:
                raise damaged(
                    m,
                    self.driver.uri,
                    image,
                    position + a,
                    position + b,
                    f"(checksums of the chunk at {start:,}) are not what was written",
                )
        return pages
