"""Writes one image to storage: captures, hashes, optionally packs and writes chunks, in
parallel."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from ...core.aio import at_most, wait_out
from ...core.spans import Where, span
from ...drivers.contract import AtMost, Driver, Traits, Upload, UploadLostError, segments
from ...errors import HoldfastError, StorageError
from ...planner.image import DIGEST_NBYTES, ImageLayout
from ..format.digest import digest, page_of, page_with
from ..format.extents import Extents
from ..format.manifest import PATCH
from ..format.packed import Compression, Index, PackedChunk, index_nbytes, pack
from ..format.patches import PatchBases
from ..runtime.buffers import HostBuffer
from ..runtime.engine import CPU_THREADS, offload
from ..runtime.executor import Pipeline, Stage
from ..runtime.scheduler import Budget
from ..state.capture.write_tracking import merged, overlaps, without
from .borrowing import BaseImage, pages_of
from .chunks import ChunkSource, chunks_to_write
from .linking import LinkedUpload
from .patching import PatchPacking, PublishedImage

COPY_NBYTES_MAX = 1 << 30
"""Most bytes of the base copied by one call. Storage that does not clone should show progress."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Callbacks of a save, called on the engine's thread.

    ``captured``: once, when all bytes are copied; ``sealed``: once, when all are hashed too;
    ``moved``: after each chunk is copied or hashed; ``wrote(done_nbytes, total_nbytes)``: after
    each chunk is written.
    """

    captured: Callable[[], None]
    sealed: Callable[[], None]
    moved: Callable[[], None] = lambda: None
    wrote: Callable[[int, int], None] = lambda done_nbytes, total_nbytes: None


@dataclass(frozen=True, slots=True)
class WrittenImage:
    """A stored image: the digests of its chunks (C, 16), the size of its file, how many of these
    bytes were borrowed, and the ``unchanged`` ranges that were, in order."""

    digests: npt.NDArray[np.uint8]
    stored_nbytes: int
    borrowed_nbytes: int = 0
    unchanged: Sequence[tuple[int, int]] = ()
    extents: Extents | None = None
    """Places of its blocks, if it shares files with earlier images."""


async def stored_image(driver: Driver, key: str, layout: ImageLayout) -> WrittenImage | None:
    """Return the image if it exists in full size, as :func:`pages_of`."""
    pages = await pages_of(driver, key, layout)
    if pages is None:
        return None
    page_nbytes = layout.chunk_nbytes // layout.block_nbytes * DIGEST_NBYTES
    digests = page_of(memoryview(pages), page_nbytes)
    table = np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_NBYTES)
    return WrittenImage(table, layout.nbytes)


class ImageWriter:
    """Writes one image, once, from the chunks that ``chunks`` hands out.

    ``budget_nbytes`` limits host memory; writing then has priority, so the storage sets the pace.
    None: there is memory for the whole image; capturing has priority, because the trainer waits for
    it. ``base()``: called once the key is known, returns the image to borrow equal bytes from, if
    any; not with ``compression``.
    """

    def __init__(
        self,
        driver: Driver,
        layout: ImageLayout,
        chunks: ChunkSource,
        budget_nbytes: int | None,
        callbacks: Callbacks,
        compression: Compression | None = None,
        base: Callable[[], Awaitable[BaseImage | None]] | None = None,
    ) -> None:
        self.awaits_base = False
        """True to find the base before the first chunk is taken, and take none that it holds."""
        self._driver = driver
        self._find_base = base
        self._base: BaseImage | None = None
        self._layout = layout
        self._chunks = chunks
        self._budget_nbytes = budget_nbytes
        self._callbacks = callbacks
        self._published: PublishedImage | None = None
        self._patching: PatchPacking | None = None
        """Set if patches are written: instead of the image, or beside it."""
        self._packing: Packing | PatchPacking | None = None
        if compression is not None:
            self._packing = Packing(layout)
        check_image_size(driver, layout.nbytes)
        self._buffers: dict[int, HostBuffer] = {}
        count = chunks_to_write(layout)
        fits = count * layout.chunk_nbytes <= self._memory_nbytes(count)
        self._keeps_buffers = driver.remote and self._packing is None and fits
        """Whether to keep buffers until the image is durable, so that a lost upload can be
        repeated. Only if the whole image fits in memory anyway. Packing modifies buffers."""
        self._pages = [b""] * count
        self._left: dict[int, list[tuple[int, int]]] = {}
        """Bytes that are left to take of chunks with borrowed blocks, as ranges of the image."""
        self._uncaptured = count
        self._unhashed = count
        self._written_nbytes = 0
        self._borrowed_nbytes = 0
        self._unchanged: set[tuple[int, int]] = set()
        self._extents: Extents | None = None
        self._key = ""
        self._beside: Opening | None = None

    def publish(self, image: PublishedImage, bases: PatchBases | None) -> None:
        """Store the image whole, as a patch of ``image``, or both, as ``bases`` says; it replaces
        ``image``. Call it before :meth:`write`."""
        image.begin(self._chunks.pool, self._layout, bases)
        self._published = image
        if bases is None:
            return
        self._keeps_buffers = False
        self._patching = PatchPacking(self._layout, image, bases)
        if not bases.whole:
            self._packing = self._patching

    async def write(self, key: Callable[[], Awaitable[str]]) -> WrittenImage:
        """Write the image to ``key()``, which may become known while chunks are being captured.

        Durable on return; after an error, nothing of it is visible. An image without shards has no
        digests and no file.
        """
        if not self._pages:
            self._end_capture()
            self._callbacks.sealed()
            return WrittenImage(np.empty((0, DIGEST_NBYTES), np.uint8), 0)
        try:
            stored_nbytes = await self._write_image(key)
        except UploadLostError as error:
            if not self._keeps_buffers:
                raise
            _log.warning("retrying the write of an image: %s", error)
            stored_nbytes = await self._write_image(key)
        finally:
            self._chunks.close()
            for chunk in list(self._buffers):
                self._put_away(chunk)
        digests = b"".join(map(digest, self._pages))
        table = np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_NBYTES)
        return WrittenImage(
            *(table, stored_nbytes, self._borrowed_nbytes, sorted(self._unchanged), self._extents)
        )

    async def _write_image(self, key: Callable[[], Awaitable[str]]) -> int:
        """Write the image in one upload; return the size of its file."""
        opening = Opening(self._open(key))
        beside = None
        if self._writes_both:
            beside = self._beside = Opening(self._open_beside(opening))
        self._written_nbytes = self._borrowed_nbytes = 0
        try:
            left_out = await self._left_out(opening) if self.awaits_base else set[int]()
            order = [chunk for chunk in self._order() if chunk not in left_out]
            sizes = [len(range(*self._layout.chunk_range(chunk))) for chunk in order]
            await self._pipeline(opening).run(order, sizes)
            upload = await opening.upload()
            with span("upload_commit", Where(self._key)):
                if beside is not None:
                    await self._finish(await beside.upload(), self._patching)
                return await self._finish(upload, self._packing)
        except BaseException:
            await opening.drop()
            if beside is not None:
                await beside.drop()
            raise

    async def _open_beside(self, opening: Opening) -> Upload:
        """Open the file for the patches of an image that is stored whole."""
        assert self._patching is not None
        await opening.upload()
        nbytes = AtMost(self._patching.nbytes_max)
        return await self._driver.create(f"{self._key}.{PATCH}", nbytes)

    async def _open(self, key: Callable[[], Awaitable[str]]) -> Upload:
        nbytes = AtMost(self._packing.nbytes_max) if self._packing else self._layout.nbytes
        self._key = await key()
        with span("open", Where(self._key)):
            if self._find_base is not None:
                self._base = await self._find_base()
            if self._base is not None:
                return await self._base.open(self._driver, self._key, nbytes)
            return await self._driver.create(self._key, nbytes)

    @property
    def _writes_both(self) -> bool:
        """Whether the image is stored whole, with patches beside it."""
        return self._patching is not None and self._packing is None

    def _order(self) -> list[int]:
        if self._packing or self._patching:  # a packed chunk's position depends on all earlier ones
            return list(range(len(self._pages)))
        layout = self._layout
        return writing_order(
            len(self._pages), layout.chunk_nbytes, layout.nbytes, self._driver.traits
        )

    def _pipeline(self, opening: Opening) -> Pipeline[int]:
        in_order = bool(self._packing or self._patching) or self._driver.traits.part_order != "any"
        capturing = "cpu" if self._chunks.reads is None else "source"
        packing = [Stage("pack", "cpu", self._pack)] if self._packing or self._patching else []
        return Pipeline(
            [
                Stage("capture", capturing, self._capture),
                Stage("hash", "cpu", self._hash),
                *packing,
                Stage("write", "io", partial(self._write, opening), in_order=in_order),
            ],
            self._budget(),
            drain=self._budget_nbytes is not None,
            release=self._release,
            where=self._where,
        )

    def _where(self, chunk: int) -> Where:
        start, stop = self._layout.chunk_range(chunk)
        return Where(self._key, start, stop - start)

    def _budget(self) -> Budget:
        reads = self._chunks.reads or 0
        memory_nbytes = self._memory_nbytes(len(self._pages))
        if self._budget_nbytes is None:
            self._chunks.pool.keep(memory_nbytes)
        writes = _writes(self._driver.traits)
        return Budget(memory_nbytes, {"cpu": CPU_THREADS, "io": writes, "source": max(1, reads)})

    def _memory_nbytes(self, count: int) -> int:
        traits = self._driver.traits
        reads = self._chunks.reads or 0
        return chunks_nbytes(count, self._layout.chunk_nbytes, traits, self._budget_nbytes, reads)

    async def _left_out(self, opening: Opening) -> set[int]:
        """Borrow all blocks that are known to be equal to the base's without taking them, and
        return the chunks that are borrowed entirely. If the base vanishes, the capture has not
        ended, and all bytes can be taken."""
        upload = await opening.upload()
        base = self._base
        # A skipped block cannot be sent again, and the trainer should not wait for a network.
        if base is None or base.known is None or self._driver.remote:
            return set()
        if self._driver.traits.part_order != "any":
            return set()
        pages = await base.known({chunk: base.page(chunk) for chunk in range(len(self._pages))})
        runs = [run for chunk, page in pages.items() for run in base.runs(chunk, page)]
        borrowed = await self._borrowed_runs(upload, base, runs)
        for chunk, page in pages.items():
            whole = [self._layout.chunk_range(chunk)]
            left = without(whole, overlaps(borrowed, whole))
            if left != whole:
                self._left[chunk] = left
                self._pages[chunk] = page
        left_out = {chunk for chunk, left in self._left.items() if not left}
        self._note_captured(len(left_out))
        self._note_hashed(len(left_out))
        self._wrote(sum(len(range(*self._layout.chunk_range(chunk))) for chunk in left_out))
        return left_out

    async def _borrowed_runs(
        self, upload: Upload, base: BaseImage, runs: Sequence[tuple[int, int, bool]]
    ) -> list[tuple[int, int]]:
        """Copy all runs that are to be borrowed, adjacent ones together. Return the copied ranges:
        sorted, disjoint."""
        lent = merged((start, stop) for start, stop, borrowed in runs if borrowed)
        pieces = [
            (begin, min(begin + COPY_NBYTES_MAX, stop))
            for start, stop in lent
            for begin in range(start, stop, COPY_NBYTES_MAX)
        ]
        limit = self._driver.traits.concurrency
        copied = await at_most(limit, (self._borrowed(upload, base, *piece) for piece in pieces))
        return merged(piece for piece, is_copied in zip(pieces, copied, strict=True) if is_copied)

    async def _capture(self, chunk: int) -> None:
        if chunk in self._buffers:
            return
        self._buffers[chunk] = await self._chunks.take(chunk, self._left.get(chunk))
        self._note_captured(1)

    def _note_captured(self, chunks: int) -> None:
        self._uncaptured -= chunks
        self._callbacks.moved()
        if self._uncaptured == 0:
            self._end_capture()

    async def _hash(self, chunk: int) -> None:
        block_nbytes = self._layout.block_nbytes
        if chunk in self._left:
            start, _ = self._layout.chunk_range(chunk)
            left = [(begin - start, end - start) for begin, end in self._left[chunk]]
            page = await offload(
                page_with, self._pages[chunk], left, self._bytes(chunk), block_nbytes
            )
        elif not self._pages[chunk]:
            page = await offload(page_of, self._bytes(chunk), block_nbytes)
        else:
            return
        self._pages[chunk] = page
        self._note_hashed(1)

    def _note_hashed(self, chunks: int) -> None:
        self._unhashed -= chunks
        self._callbacks.moved()
        if self._unhashed == 0:
            self._callbacks.sealed()

    async def _pack(self, chunk: int) -> None:
        if self._patching is not None:
            new = self._buffers[chunk]
            self._buffers[chunk] = await offload(self._patching.exchange, chunk, new)
            return
        assert isinstance(self._packing, Packing)
        await offload(self._packing.pack, chunk, self._bytes(chunk))

    async def _write(self, opening: Opening, chunk: int) -> None:
        # Placed before the first await: packed chunks must be placed in order.
        start, nbytes = self._place(chunk)
        if self._writes_both:
            await self._write_both(opening, chunk)
            nbytes = 0
        upload = await opening.upload()
        data = self._buffers[chunk].view[:nbytes]
        if chunk in self._left:
            for begin, end in self._left[chunk]:
                await upload.write(begin, data[begin - start : end - start])
        elif self._base is not None:
            await self._write_runs(upload, self._base, chunk, start, data)
        elif nbytes:
            await upload.write(start, data)
        self._wrote(len(range(*self._layout.chunk_range(chunk))))

    def _wrote(self, nbytes: int) -> None:
        self._written_nbytes += nbytes
        self._callbacks.wrote(self._written_nbytes, self._layout.hashed_end)

    async def _write_both(self, opening: Opening, chunk: int) -> None:
        """Write a chunk as it is, and its patches to the file beside it."""
        assert self._patching is not None
        assert self._published is not None
        assert self._beside is not None
        place, nbytes = self._patching.place(chunk)
        start, stop = self._layout.chunk_range(chunk)
        whole = self._published.chunks[chunk].view[: stop - start]
        await (await opening.upload()).write(start, whole)
        if nbytes:
            await (await self._beside.upload()).write(place, self._buffers[chunk].view[:nbytes])

    async def _write_runs(
        self, upload: Upload, base: BaseImage, chunk: int, start: int, data: memoryview
    ) -> None:
        for begin, end, borrowed in base.runs(chunk, self._pages[chunk]):
            if not (borrowed and await self._borrowed(upload, base, begin, end)):
                await upload.write(begin, data[begin - start : end - start])

    async def _borrowed(self, upload: Upload, base: BaseImage, begin: int, end: int) -> bool:
        """Copy bytes of the base, and return whether that worked. It may have been deleted."""
        if self._base is None:
            return False
        try:
            await upload.copy(begin, base.source, base.key, begin, end - begin)
        except HoldfastError as error:
            _log.warning("bytes that have not changed are written again: %s", error)
            self._base = None
            return False
        self._borrowed_nbytes += end - begin
        self._unchanged.add((begin, end))
        return True

    def _place(self, chunk: int) -> tuple[int, int]:
        """Return the file offset and stored size of a chunk."""
        if self._packing:
            return self._packing.place(chunk)
        start, stop = self._layout.chunk_range(chunk)
        return start, stop - start

    def _bytes(self, chunk: int) -> memoryview:
        start, stop = self._layout.chunk_range(chunk)
        return self._buffers[chunk].view[: stop - start]

    def _release(self, chunk: int) -> None:
        if not self._keeps_buffers and chunk in self._buffers:
            self._put_away(chunk)

    def _put_away(self, chunk: int) -> None:
        buffer = self._buffers.pop(chunk)
        if self._published is not None and self._patching is None:
            self._published.chunks[chunk] = buffer
        else:
            self._chunks.pool.give(buffer)

    def _end_capture(self) -> None:
        self._chunks.close()  # first: the trainer may free its tensors after the next line
        self._callbacks.captured()

    async def _finish(self, upload: Upload, packing: Packing | PatchPacking | None) -> int:
        """Write the pages of all chunks, and the index of a compressed image; then commit.

        Returns the size of the file.
        """
        trailer = b"".join(self._pages)
        if packing:
            start = packing.end
            trailer += packing.index()
            final_nbytes = start + len(trailer)
        else:
            start = self._layout.hashed_end
            final_nbytes = None
        buffer = self._chunks.pool.take()
        try:
            await write_pages(upload, trailer, start, buffer)
        finally:
            self._chunks.pool.give(buffer)
        await upload.commit(final_nbytes)
        nbytes = start + len(trailer)
        if isinstance(upload, LinkedUpload):
            self._extents = upload.extents
            self._borrowed_nbytes = max(nbytes - upload.written_nbytes, 0)
        return nbytes


def check_image_size(driver: Driver, nbytes: int) -> None:
    """Raise StorageError if an image of ``nbytes`` exceeds the storage's largest object."""
    limit_nbytes = driver.traits.object_max_nbytes
    if limit_nbytes is not None and nbytes > limit_nbytes:
        raise StorageError(
            f"the image of this rank would have {nbytes:,} bytes, and the storage takes objects of "
            f"{limit_nbytes:,} at most",
            uri=driver.uri,
            advice="Spread the state over more ranks, or save to other storage.",
        )


def chunks_nbytes(
    count: int, chunk_nbytes: int, traits: Traits, budget_nbytes: int | None, reads: int = 0
) -> int:
    """Return the host memory that ``count`` chunks of an image take while being written.

    ``budget_nbytes``: limit, or None for all chunks at once. ``reads``: number of chunks read from
    storage at a time. The memory of the upload itself is additional (``traits.upload_nbytes``).
    """
    if budget_nbytes is None:
        return count * chunk_nbytes
    # In whole buffers: a short chunk takes a whole one.
    ours = max(1, (budget_nbytes - traits.upload_nbytes) // chunk_nbytes)
    # Only as many as keep every lane busy: copying is faster than any storage.
    return min(ours, _writes(traits) + reads + CPU_THREADS) * chunk_nbytes


def _writes(traits: Traits) -> int:
    if traits.part_order == "serial":
        return 1
    return traits.concurrency


class Packing:
    """One image being packed.

    ``nbytes_max``: upper bound for its file; ``end``: end of the chunks placed so far. Chunks are
    packed in any order, on worker threads. A chunk's position is known once all earlier chunks are
    packed.
    """

    def __init__(self, layout: ImageLayout) -> None:
        self._layout = layout
        self._chunks: dict[int, PackedChunk] = {}
        index = index_nbytes(layout.hashed_end, layout.chunk_nbytes, layout.block_nbytes)
        self.nbytes_max = layout.nbytes + int(index)
        self.end = 0

    def pack(self, chunk: int, data: memoryview) -> None:
        """Pack the bytes of a chunk in place. Thread-safe for distinct chunks."""
        self._chunks[chunk] = pack(data, self._layout.block_nbytes)

    def place(self, chunk: int) -> tuple[int, int]:
        """Return the file offset and size of a packed chunk. Call in order of chunks."""
        start = self.end
        nbytes = self._chunks[chunk].nbytes
        self.end += nbytes
        return start, nbytes

    def index(self) -> bytes:
        """Return the trailing index of the file, once all chunks are placed."""
        layout = self._layout
        chunks = [self._chunks[number] for number in sorted(self._chunks)]
        sizes = np.array([size for chunk in chunks for size in chunk.sizes], np.int64)
        digests = np.frombuffer(b"".join(chunk.digest for chunk in chunks), np.uint8)
        return Index(
            layout.hashed_end,
            layout.chunk_nbytes,
            layout.block_nbytes,
            sizes,
            digests.reshape(-1, DIGEST_NBYTES),
        ).encode()


class Opening:
    """An upload that is being opened concurrently with other work."""

    def __init__(self, create: Coroutine[object, object, Upload]) -> None:
        self._upload = asyncio.ensure_future(create)
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def upload(self) -> Upload:
        """Wait for the upload.

        Waiting callers proceed in the order of their calls, and before later ones, because a driver
        may require its parts in order.
        """
        if self._upload.done() and not self._waiting:
            return self._upload.result()
        self._waiting += 1
        try:
            async with self._turn:
                return await asyncio.shield(self._upload)
        finally:
            self._waiting -= 1

    async def drop(self) -> None:
        """Abort the upload in whatever state it is. Does nothing after its commit."""
        cancelled: asyncio.CancelledError | None = None
        if not self._upload.done():
            self._upload.cancel()
            cancelled = await wait_out([self._upload])
        if not self._upload.cancelled() and self._upload.exception() is None:
            await self._upload.result().abort()
        if cancelled is not None:
            raise cancelled


def writing_order(chunks: int, chunk_nbytes: int, nbytes: int, traits: Traits) -> list[int]:
    """Return the order in which to write the chunks of an upload: the segments take turns.

    Ascending if a segment begins within a chunk, because the next chunk then continues that
    segment.
    """
    starts = [start for start, _ in segments(nbytes, traits)]
    if any(start % chunk_nbytes for start in starts):
        return list(range(chunks))
    step = starts[1] // chunk_nbytes if len(starts) > 1 else chunks
    return sorted(range(chunks), key=lambda chunk: (chunk % step, chunk))


async def write_pages(upload: Upload, pages: bytes, start: int, buffer: HostBuffer) -> None:
    """Write the digests of all blocks at ``start``, copied through ``buffer``.

    Call it after writing the chunks that they cover.
    """
    for offset in range(0, len(pages), len(buffer.view)):
        part = memoryview(pages)[offset : offset + len(buffer.view)]
        buffer.view[: len(part)] = part
        await upload.write(start + offset, buffer.view[: len(part)])
