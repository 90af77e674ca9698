"""Reads planned ranges of images, verifies and delivers them, in parallel within a budget."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from ...core.aio import at_most
from ...core.spans import Where, counting, span
from ...drivers.contract import Driver
from ...errors import DamagedError, NotFoundError, StorageError
from ...planner.coverage import flawed
from ...planner.image import DIGEST_NBYTES
from ...planner.loading import LoadPlan, Targets, plan_load
from ..format.chunks import Chunk, chunk_at, damaged, damaged_ranges, page_range
from ..format.digest import digest, page_of
from ..format.manifest import MANIFEST_KEY, Manifest
from ..runtime.buffers import HostBuffer, ReadBuffers
from ..runtime.engine import CPU_THREADS, offload
from ..runtime.executor import Pipeline, Stage
from ..runtime.scheduler import Budget
from .unpacking import Stored, Unpacked

Deliver = Callable[[int, HostBuffer], None]
"""Called on a worker thread with a read's number and a buffer that begins with its verified
bytes."""

Forward = Callable[[int, HostBuffer], Awaitable[None]]
"""Called with the same arguments after the delivery; the buffer is free once it returns."""

_RUN_NBYTES = 64 << 20
_RUNS_PER_THREAD = 4
"""Number of runs per thread, at least: fewer would leave threads idle at the end."""

NOT_WHAT_WAS_WRITTEN = "are not what was written"


def plan_reads(
    driver: Driver, manifest: Manifest, targets: Targets, read_nbytes: int | None = None
) -> LoadPlan:
    """Plan the reads that fill ``targets``.

    Each reads at most ``read_nbytes``, a divisor or a multiple of the chunk size (None: a size that
    suits the driver, usually a chunk). Raises DamagedError if the manifest contradicts itself.
    """
    m = manifest
    _check_coverage(m, targets)
    if read_nbytes is None:
        read_nbytes = _read_nbytes(m, driver)
    return plan_load(
        m.tensors,
        m.shards,
        targets,
        m.images.hashed_nbytes,
        chunk_nbytes=read_nbytes,
        block_nbytes=m.block_nbytes,
        gap_nbytes=driver.traits.coalesce_nbytes,
    )


def _read_nbytes(m: Manifest, driver: Driver) -> int:
    """Return the read size: a piece if the driver's pieces divide chunks into whole blocks;
    otherwise a chunk."""
    piece_nbytes = driver.traits.piece_nbytes
    if m.compression is not None or not piece_nbytes:
        return m.chunk_nbytes
    if m.chunk_nbytes % piece_nbytes or piece_nbytes % m.block_nbytes:
        return m.chunk_nbytes
    return piece_nbytes


def _check_coverage(m: Manifest, targets: Targets) -> None:
    """Raise DamagedError if shards of a wanted tensor overlap: another part of it would not be
    filled."""
    wanted = np.zeros(len(m.tensors), bool)
    wanted[targets.tensor] = True
    s = m.shards
    rows = np.flatnonzero(wanted[s.tensor])
    number = np.cumsum(wanted) - 1
    overlapping = flawed(
        m.tensors.shape[wanted], number[s.tensor[rows]], s.offsets[rows], s.lengths[rows]
    )
    if overlapping.any():
        raise DamagedError(
            "the manifest contradicts itself: shards of a tensor overlap", key=MANIFEST_KEY
        )


@dataclass
class ImageReader:
    """Reads the images of one checkpoint; ``driver`` must be the driver for images
    (``image_driver``).

    ``bytes_read`` counts bytes requested from the driver, checksums included; ``bytes_received``
    counts bytes that other ranks read and sent here.
    """

    driver: Driver
    manifest: Manifest
    budget_nbytes: int
    bytes_read: int = 0
    bytes_wanted: int = 0
    bytes_received: int = 0
    _chunks: dict[tuple[int, int], Chunk] = field(default_factory=dict)

    async def run(
        self,
        plan: LoadPlan,
        deliver: Deliver,
        *,
        jobs: int | None = None,
        forward: Forward | None = None,
        places: Mapping[Hashable, HostBuffer] | None = None,
    ) -> None:
        """Perform all reads of ``plan``.

        ``jobs``: number of reads in flight; by default, as many of the driver's reads as
        :meth:`jobs` allows. Reads with an entry in ``places``, by number, may be read into that
        memory before verification; ``deliver`` then gets that memory. Raises DamagedError before
        delivering a damaged byte, and StorageError.
        """
        self.bytes_wanted = plan.bytes_wanted
        with span("checksums"):
            pages = await self._pages(plan)
        if forward is None and are_pieces(plan, self.driver.traits.piece_nbytes):
            await self._run_in_pieces(plan, deliver, pages)
        else:
            buffers = ReadBuffers(self.driver, self.manifest.chunk_nbytes, places)
            await self._run_whole(plan, deliver, pages, buffers, jobs, forward)

    async def _run_whole(
        self,
        plan: LoadPlan,
        deliver: Deliver,
        pages: dict[tuple[int, int], bytes],
        buffers: ReadBuffers,
        jobs: int | None,
        forward: Forward | None,
    ) -> None:
        """Run the plan with one driver read per planned read."""
        images = plan.image.tolist()
        starts = plan.start.tolist()
        sizes = (plan.stop - plan.start).tolist()
        verifying = counting("verify")

        def where(job: int) -> Where:
            return Where(self.manifest.image_key(images[job]), starts[job], sizes[job])

        async def read(job: int) -> None:
            with self._reading(images[job], starts[job], sizes[job]) as key:
                await buffers.read(job, key, starts[job], sizes[job])

        def check_and_deliver(job: int) -> None:
            view = buffers[job].view[: sizes[job]]
            with verifying(where(job)):
                self._verify(images[job], starts[job], view, pages)
            deliver(job, buffers[job])

        async def deliver_verified(job: int) -> None:
            await offload(check_and_deliver, job)

        async def forward_delivered(job: int) -> None:
            if forward is not None:
                await forward(job, buffers[job])

        if jobs is None:
            jobs = self.jobs(self.driver.traits.concurrency)
        forwarding = [] if forward is None else [Stage("forward", "others", forward_delivered)]
        pipeline = Pipeline(
            [Stage("read", "io", read), Stage("deliver", "cpu", deliver_verified), *forwarding],
            _budget(jobs),
            release=buffers.release,
            where=where,
        )
        # Counts jobs instead of bytes: all buffers have one size, however short the read.
        await pipeline.run(range(len(sizes)), [1] * len(sizes))

    async def _run_in_pieces(
        self, plan: LoadPlan, deliver: Deliver, pages: dict[tuple[int, int], bytes]
    ) -> None:
        """Run the plan with one driver read per connected run; each planned read is one of its
        pieces."""
        images = plan.image.tolist()
        starts = plan.start.tolist()
        stops = plan.stop.tolist()
        sizes = (plan.stop - plan.start).tolist()
        verifying = counting("verify")

        def where(numbers: range) -> Where:
            key = self.manifest.image_key(images[numbers[0]])
            start = starts[numbers[0]]
            return Where(key, start, stops[numbers[-1]] - start)

        def check_and_deliver(number: int, piece: memoryview) -> None:
            with verifying(where(range(number, number + 1))):
                self._verify(images[number], starts[number], piece, pages)
            deliver(number, HostBuffer.over(piece))

        async def read(numbers: range) -> None:
            start = starts[numbers[0]]
            nbytes = stops[numbers[-1]] - start
            taken = 0
            failed: Exception | None = None

            def take(piece: memoryview) -> None:
                """Deliver a piece; see :data:`TakePiece`. A wrong one would look like damage."""
                nonlocal taken, failed
                if failed is not None:
                    return
                try:
                    due_nbytes = sizes[numbers[taken]] if taken < len(numbers) else 0
                    if len(piece) != due_nbytes:
                        raise _wrong_piece(taken, len(piece), due_nbytes)
                    taken += 1
                    check_and_deliver(numbers[taken - 1], piece)
                except Exception as error:
                    failed = error

            with self._reading(images[numbers[0]], start, nbytes) as key:
                await self.driver.read_pieces(key, start, nbytes, take)
            if failed is not None:
                raise failed
            if taken < len(numbers):
                raise _wrong_piece(taken, 0, sizes[numbers[taken]])

        reads = list(connected_reads(plan, self._run_nbytes(sum(sizes))))
        traits = self.driver.traits
        jobs = max(1, min(traits.concurrency, self.budget_nbytes // (2 * traits.piece_nbytes)))
        budget = Budget(jobs, {"io": jobs})
        pipeline = Pipeline([Stage("read", "io", read)], budget, where=where)
        await pipeline.run(reads, [1] * len(reads))

    def _run_nbytes(self, nbytes: int) -> int:
        """Return the most bytes of ``nbytes`` to read in one run. Remote storage gets a request for
        each chunk, to serve them in parallel. From memory, runs are longer: between two of them, a
        thread waits for the event loop, and both for the GIL."""
        chunk_nbytes = self.manifest.chunk_nbytes
        if self.driver.remote:
            return chunk_nbytes
        share_nbytes = nbytes // (_RUNS_PER_THREAD * CPU_THREADS)
        return max(1, min(_RUN_NBYTES, share_nbytes) // chunk_nbytes) * chunk_nbytes

    def jobs(self, reads: int, extra_nbytes: int = 0) -> int:
        """Return how many jobs fit the budget if each needs ``extra_nbytes`` beyond its buffer.

        At most ``reads``, plus as many as can be verified meanwhile.
        """
        buffer_nbytes = ReadBuffers(self.driver, self.manifest.chunk_nbytes).job_nbytes
        allowed = max(1, self.budget_nbytes // (buffer_nbytes + extra_nbytes))
        return min(allowed, reads + CPU_THREADS)

    async def read(self, image: int, start: int, into: memoryview) -> None:
        """Fill ``into`` from byte ``start`` of an image, unverified. Raises DamagedError if
        bytes are missing."""
        with self._reading(image, start, len(into)) as key:
            await self.driver.read(key, start, into)

    async def read_stored(self, chunk: Chunk, into: memoryview) -> Stored:
        """Fill the beginning of ``into`` with the stored form of a chunk: the chunk itself, unless
        compressed.

        Raises like :meth:`read`.
        """
        if not isinstance(self.driver, Unpacked):
            nbytes = chunk.stop - chunk.start
            await self.read(chunk.image, chunk.start, into[:nbytes])
            return Stored(chunk.start, nbytes)
        with self._reading(chunk.image, chunk.start, chunk.stop - chunk.start):
            return await self.driver.read_stored(chunk.image, chunk.start, chunk.stop, into)

    async def stored_index(self, image: int) -> bytes:
        """Return the index at the end of a compressed image's file; empty if not compressed.

        Raises like :meth:`read`.
        """
        if not isinstance(self.driver, Unpacked):
            return b""
        return (await self.driver.index(image)).encode()

    async def read_pages(self, image: int, starts: Sequence[int]) -> dict[tuple[int, int], bytes]:
        """Return the verified pages of the chunks at ``starts`` (ascending), by image and chunk
        start.

        Reads them in one request, along with the pages in between. Raises DamagedError.
        """
        m = self.manifest
        chunks = [chunk_at(m, image, start) for start in starts]
        first, _ = page_range(m, chunks[0])
        _, last = page_range(m, chunks[-1])
        data = bytearray(last - first)
        await self.read(image, first, memoryview(data))
        pages: dict[tuple[int, int], bytes] = {}
        for chunk in chunks:
            begin, end = page_range(m, chunk)
            page = bytes(data[begin - first : end - first])
            if digest(page) != chunk.digest:
                what = f"(checksums of the chunk at {chunk.start:,}) {NOT_WHAT_WAS_WRITTEN}"
                raise damaged(m, self.driver.uri, image, begin, end, what)
            pages[image, chunk.start] = page
        return pages

    @contextmanager
    def _reading(self, image: int, start: int, nbytes: int) -> Iterator[str]:
        """Count a read, and yield the key to read from. Errors for missing bytes name them."""
        self.bytes_read += nbytes
        where = (self.manifest, self.driver.uri, image, start, start + nbytes)
        key = self.manifest.image_key(image)
        try:
            yield key
        except DamagedError as error:
            if self.manifest.is_plain and error.key in (None, key):
                # The only problem that a driver can detect is that the file ends too early.
                raise damaged(*where, "are beyond the end of the file") from error
            raise damaged(*where, error.message, error.key or "") from error
        except NotFoundError as error:
            raise damaged(*where, "are lost with their whole file", error.key or "") from error

    def _verify(
        self, image: int, start: int, view: memoryview, pages: dict[tuple[int, int], bytes]
    ) -> None:
        m = self.manifest
        for chunk, first, last in self._parts(image, start, start + len(view)):
            page = page_of(view[first - start : last - start], m.block_nbytes)
            stored_page = pages.get((image, chunk.start))
            bad = damaged_ranges(chunk, first, page, m.block_nbytes, stored_page)
            if bad:
                raise damaged(m, self.driver.uri, image, *bad[0], NOT_WHAT_WAS_WRITTEN)

    def _parts(self, image: int, start: int, stop: int) -> Iterator[tuple[Chunk, int, int]]:
        """Yield the chunks that a read touches, and the range [start, stop) in each."""
        while start < stop:
            chunk = self._chunk_at(image, start)
            yield chunk, start, min(stop, chunk.stop)
            start = chunk.stop

    def _chunk_at(self, image: int, start: int) -> Chunk:
        """Cache :func:`chunk_at`, which accesses many columns, for all pieces of a chunk."""
        key = (image, start // self.manifest.chunk_nbytes)
        chunk = self._chunks.get(key)
        if chunk is None:
            chunk = chunk_at(self.manifest, image, start)
            self._chunks[key] = chunk
        return chunk

    async def _pages(self, plan: LoadPlan) -> dict[tuple[int, int], bytes]:
        """Return the verified pages of partly read chunks, by image and chunk start."""
        partial: list[Chunk] = []
        columns = (plan.image.tolist(), plan.start.tolist(), plan.stop.tolist())
        for read in zip(*columns, strict=True):
            for chunk, start, stop in self._parts(*read):
                is_whole = (start, stop) == (chunk.start, chunk.stop)
                if not is_whole and (not partial or partial[-1] != chunk):
                    partial.append(chunk)
        pages: dict[tuple[int, int], bytes] = {}

        async def fetch(image: int, starts: Sequence[int]) -> None:
            pages.update(await self.read_pages(image, starts))

        await at_most(
            self.driver.traits.concurrency, (fetch(*group) for group in self._together(partial))
        )
        return pages

    def _together(self, partial: Sequence[Chunk]) -> Iterator[tuple[int, list[int]]]:
        """Yield groups of chunks whose pages are close enough to be read in one request."""
        m = self.manifest
        page_nbytes = m.chunk_nbytes // m.block_nbytes * DIGEST_NBYTES
        gap = self.driver.traits.coalesce_nbytes // page_nbytes
        for image, chunks in groupby(partial, key=lambda chunk: chunk.image):
            run: list[int] = []
            for chunk in chunks:
                index = chunk.start // m.chunk_nbytes
                if run and index - run[-1] // m.chunk_nbytes > gap + 1:
                    yield image, run
                    run = []
                run.append(chunk.start)
            yield image, run


def _budget(jobs: int) -> Budget:
    return Budget(jobs, {"io": max(1, jobs - CPU_THREADS), "cpu": CPU_THREADS, "others": jobs})


def are_pieces(plan: LoadPlan, piece_nbytes: int) -> bool:
    """Return whether each read of ``plan`` lies within one piece of the driver."""
    if not piece_nbytes:
        return False
    return bool((plan.start // piece_nbytes == (plan.stop - 1) // piece_nbytes).all())


def connected_reads(plan: LoadPlan, run_nbytes: int) -> Iterator[range]:
    """Yield runs of reads that are adjacent to each other; none crosses a multiple of
    ``run_nbytes``."""
    images = plan.image.tolist()
    starts = plan.start.tolist()
    stops = plan.stop.tolist()
    first = 0
    for number in range(1, len(starts) + 1):
        is_connected = (
            number < len(starts)
            and images[number] == images[first]
            and starts[number] == stops[number - 1]
            and starts[number] % run_nbytes != 0
        )
        if not is_connected:
            yield range(first, number)
            first = number


def _wrong_piece(position: int, nbytes: int, due_nbytes: int) -> StorageError:
    return StorageError(
        f"piece {position} of a read has {nbytes:,} bytes instead of {due_nbytes:,}",
        advice="The driver breaks its contract; its conformance kit shows how.",
    )
