"""Writes images that share files with an earlier checkpoint, by hard links (format version 3).

Blocks that are equal in the earlier image stay in its files, which get further keys in the new
attempt's folder before any byte is left out. All other blocks go to at most two new files: blocks
that the earlier save has written too, which will soon be replaced again, are kept apart from the
rest. So most files are either needed as a whole or not at all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ...core.aio import all_or_none, at_most
from ...core.units import ceil_div
from ...drivers.contract import AtMost, Buffer, Driver, Upload
from ...errors import HoldfastError, NotFoundError
from ...planner.columns import Ints, ranges
from ...planner.image import DIGEST_NBYTES, ImageLayout
from ..format.extents import WHOLE_IMAGE, Extents, file_name, lent_folder
from ..format.manifest import Manifest, image_key
from ..format.tables import ImageTable
from ..protocol.current import read_manifest
from .borrowing import BaseImage, Incremental, equal_blocks, in_bytes, pages_of, runs_of
from .mapping import image_driver

EXTENTS_MAX = 16
"""Most extents of a chunk that borrows. In more pieces, all of it is written."""
_PARTS = 2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LentFile:
    """A file with blocks of the earlier image: ``key`` in its checkpoint; ``lender``: the attempt
    that wrote it, as file ``part`` of its rank."""

    key: str
    lender: str
    part: int
    nbytes: int


@dataclass(eq=False)
class LinkedImage(BaseImage):
    """A :class:`BaseImage`, and the ``files`` it lies in. ``key`` is for messages.

    ``block_file``, ``block_at``: (B,) where each block lies; ``page_file``, ``page_slot``: (C,)
    where the page of each chunk lies, as in :class:`..format.extents.Extents`.
    """

    rank: int
    files: Sequence[LentFile]
    block_file: Ints
    block_at: Ints
    page_file: Ints
    page_slot: Ints
    is_new: npt.NDArray[np.bool_]
    """(B,) True for blocks that the earlier save has written, if it has borrowed others."""
    limits: Incremental
    usable: npt.NDArray[np.bool_] = field(init=False)
    """(F,) True for files that may be borrowed from."""

    def __post_init__(self) -> None:
        self._piece = np.append(0, np.cumsum(_breaks(self.block_file, self.block_at)))
        self.usable = self._worth_keeping()

    def _worth_keeping(self) -> npt.NDArray[np.bool_]:
        """Return which files have enough blocks in use, for at most ``limits.lenders`` lenders."""
        live = np.bincount(self.block_file, minlength=len(self.files))
        size = np.array([file.nbytes for file in self.files])
        usable = live * (self.layout.block_nbytes / np.maximum(size, 1)) >= self.limits.live
        names, lender = np.unique([file.lender for file in self.files], return_inverse=True)
        blocks_of = np.bincount(lender, weights=live * usable, minlength=len(names))
        most = np.argsort(-blocks_of, kind="stable")[: self.limits.lenders]
        worthy: npt.NDArray[np.bool_] = usable & np.isin(lender, most)
        return worthy

    def runs(self, chunk: int, page: bytes) -> list[tuple[int, int, bool]]:
        start, stop = self.layout.chunk_range(chunk)
        block = self.layout.block_nbytes
        first = start // block
        equal = equal_blocks(page, self.blocks, first)
        at = slice(first, first + len(equal))
        equal &= self.usable[self.block_file[at]]
        runs = runs_of(equal, whole=False)
        piece = self._piece[at]
        extents = sum(1 + int(piece[j - 1] - piece[i]) if lent else 1 for i, j, lent in runs)
        if extents > EXTENTS_MAX:
            return [(start, stop, False)]
        return in_bytes(runs, start, stop, block)

    async def open(self, driver: Driver, key: str, nbytes: int) -> LinkedUpload:
        """Begin to write the image ``key``: link the files that it may borrow from."""
        upload = LinkedUpload(driver, key.rpartition("/")[0], self)
        await upload.link()
        return upload


async def linked_image(
    source: Driver,
    attempt: str,
    rank: int,
    layout: ImageLayout,
    limits: Incremental,
    manifest: Manifest | None = None,
) -> LinkedImage | None:
    """Return the image of ``rank`` in the checkpoint ``attempt`` at ``source``, if it has this
    layout. ``manifest``: the checkpoint's, read if needed. Raises HoldfastError."""
    key = image_key(attempt, rank)
    pages = await pages_of(source, key, layout)
    if pages is not None:
        images = ImageTable.of(rank, layout.hashed_end, np.empty((1, DIGEST_NBYTES), np.uint8))
        extents = Extents.of_images(images, layout.chunk_nbytes, layout.block_nbytes)
        stored = _Stored(attempt, images, extents, [key], 0)
    else:
        if manifest is None:
            manifest, _ = await read_manifest(source)
        found = np.flatnonzero(manifest.images.rank == rank)
        if manifest.extents is None or manifest.attempt != attempt or not len(found):
            return None
        row = int(found[0])
        if int(manifest.images.hashed_nbytes[row]) != layout.hashed_end:
            return None
        keys = [file.key for file in manifest.files]
        stored = _Stored(attempt, manifest.images, manifest.extents, keys, row)
        pages = await _pages(source, manifest, row, layout)
    return _image(source, stored, pages, layout, limits)


async def _pages(source: Driver, manifest: Manifest, row: int, layout: ImageLayout) -> bytearray:
    pages = bytearray(layout.nbytes - layout.hashed_end)
    key = manifest.image_key(row)
    await image_driver(source, manifest).read(key, layout.hashed_end, memoryview(pages))
    return pages


@dataclass(frozen=True, slots=True)
class _Stored:
    """The image in ``row`` of ``images``, which lie in files with these ``keys``."""

    attempt: str
    images: ImageTable
    extents: Extents
    keys: Sequence[str]
    row: int


def _image(
    source: Driver, stored: _Stored, pages: bytearray, layout: ImageLayout, limits: Incremental
) -> LinkedImage:
    """Return the image with those files alone that it lies in."""
    x, row = stored.extents, stored.row
    rank = int(stored.images.rank[row])
    first = int(x.extent_count[:row].sum())
    extents = slice(first, first + int(x.extent_count[row]))
    blocks = x.extent_blocks[extents]
    chunks = stored.images.chunks(layout.chunk_nbytes)
    first = int(chunks[:row].sum())
    page = slice(first, first + int(chunks[row]))
    used, file = np.unique(
        np.concatenate([np.repeat(x.extent_file[extents], blocks), x.page_file[page]]),
        return_inverse=True,
    )
    count = int(blocks.sum())
    lenders = (stored.attempt, *x.lenders)
    rows = zip(
        used.tolist(),
        *(column[used].tolist() for column in (x.file_lender, x.file_part, x.file_nbytes)),
        strict=True,
    )
    files = [
        LentFile(stored.keys[number], lenders[lender], part, nbytes)
        for number, lender, part, nbytes in rows
    ]
    own = (x.file_lender[used] == 0) & (x.file_part[used] != WHOLE_IMAGE)
    return LinkedImage(
        *(source, image_key(stored.attempt, rank), layout),
        np.frombuffer(pages, np.uint8).reshape(-1, DIGEST_NBYTES),
        *(rank, files),
        *(file[:count], ranges(x.extent_block[extents], blocks)[1]),
        *(file[count:], x.page_slot[page]),
        own[file[:count]],
        limits,
    )


def _breaks(file: Ints, at: Ints) -> npt.NDArray[np.bool_]:
    """Return after which blocks, except the last one, an extent ends."""
    ends: npt.NDArray[np.bool_] = (np.diff(file) != 0) | (np.diff(at) != 1)
    return ends


class _OwnFile:
    """A file for new blocks, begun with the first of them."""

    def __init__(self, driver: Driver, key: str, nbytes_max: int) -> None:
        self._driver = driver
        self._key = key
        self._nbytes_max = nbytes_max
        self._turn = asyncio.Lock()
        self.upload: Upload | None = None
        self.nbytes = 0

    def place(self, nbytes: int) -> int:
        """Reserve the next ``nbytes``, and return where they begin."""
        start = self.nbytes
        self.nbytes += nbytes
        return start

    async def write(self, start: int, data: Buffer) -> None:
        async with self._turn:
            if self.upload is None:
                self.upload = await self._driver.create(self._key, AtMost(self._nbytes_max))
        await self.upload.write(start, data)

    async def commit(self) -> None:
        if self.upload is not None:
            await self.upload.commit(self.nbytes)

    async def abort(self) -> None:
        if self.upload is not None:
            await self.upload.abort()


class LinkedUpload(Upload):
    """Writes an image whose equal blocks stay in the files of ``base``: a copy only notes where
    they lie. :attr:`extents` is known after the commit.

    Its files are durable and visible then, but belong to no object with the image's key. An abort
    leaves the links, which are deleted with the attempt.
    """

    def __init__(self, driver: Driver, folder: str, base: LinkedImage) -> None:
        layout = base.layout
        self._driver = driver
        self._folder = folder
        self._layout = layout
        self._base = base
        blocks = len(base.blocks)
        self._file = np.full(blocks, -1, np.int64)
        """(B,) The file of each block: a row of ``base.files``, or behind these an own file."""
        self._at = np.zeros(blocks, np.int64)
        self._pages = bytearray(layout.nbytes - layout.hashed_end)
        nbytes_max = blocks * layout.block_nbytes + len(self._pages)
        self._own = [
            _OwnFile(driver, f"{folder}/{file_name(base.rank, part)}", nbytes_max)
            for part in range(_PARTS)
        ]
        self._linked: set[int] = set()
        self.extents: Extents | None = None
        self.written_nbytes = 0
        self.why_whole = ""
        """Why a file could not be linked; "" if all could."""

    async def link(self) -> None:
        """Link all usable files. A file whose link fails becomes unusable."""
        rows = np.flatnonzero(self._base.usable).tolist()
        await at_most(self._driver.traits.concurrency, map(self._link, rows))

    async def _link(self, row: int) -> None:
        file = self._base.files[row]
        try:
            await self._driver.link(self._key(file), self._base.source, file.key)
        except HoldfastError as error:
            self._base.usable[row] = False
            self.why_whole = str(error)
            _log.warning("blocks that have not changed are written again: %s", error)
            return
        self._linked.add(row)

    def _key(self, file: LentFile) -> str:
        name = file_name(self._base.rank, file.part)
        return f"{lent_folder(self._folder, file.lender)}/{name}"

    async def write(self, start: int, data: Buffer) -> None:
        behind = start - self._layout.hashed_end
        if behind >= 0:
            self._pages[behind : behind + len(data)] = data
            return
        block_nbytes = self._layout.block_nbytes
        first = start // block_nbytes
        stop = first + ceil_div(len(data), block_nbytes)
        own = int(self._base.is_new[first:stop].mean() > 0.5)
        at = self._own[own].place((stop - first) * block_nbytes)
        await self._own[own].write(at, data)
        if padding := -len(data) % block_nbytes:  # the next block begins at a multiple
            await self._own[own].write(at + len(data), memoryview(bytes(padding)))
        self._note(
            first, stop, len(self._base.files) + own, at // block_nbytes + np.arange(stop - first)
        )

    async def copy(self, start: int, source: Driver, key: str, key_start: int, nbytes: int) -> None:
        """Leave blocks in the files of the base. Raises NotFoundError if one is not linked."""
        first = start // self._layout.block_nbytes
        stop = first + ceil_div(nbytes, self._layout.block_nbytes)
        file = self._base.block_file[first:stop]
        if not self._base.usable[file].all():
            raise NotFoundError("the file is not linked", uri=source.uri, key=key)
        self._note(first, stop, file, self._base.block_at[first:stop])

    def _note(self, first: int, stop: int, file: Ints | int, at: Ints) -> None:
        self._file[first:stop] = file
        self._at[first:stop] = at

    async def commit(self, nbytes: int | None = None) -> None:
        page_file, page_slot = await self._write_new_pages()
        await all_or_none(own.commit() for own in self._own)
        self.written_nbytes = sum(own.nbytes for own in self._own)
        used = np.unique(np.concatenate([self._file, page_file]))
        await self._unlink(self._linked - set(used.tolist()))
        self.extents = self._extents(used, page_file, page_slot)

    async def abort(self) -> None:
        for own in self._own:
            await own.abort()

    async def _write_new_pages(self) -> tuple[Ints, Ints]:
        """Write the pages of changed chunks behind the blocks; return where all pages lie."""
        base = self._base
        per_chunk = self._layout.chunk_nbytes // self._layout.block_nbytes
        pages = np.frombuffer(self._pages, np.uint8).reshape(-1, DIGEST_NBYTES)
        starts = np.arange(0, len(pages), per_chunk)
        equal = np.logical_and.reduceat((pages == base.blocks).all(axis=1), starts)
        new = ~(equal & base.usable[base.page_file])
        file, slot = base.page_file.copy(), base.page_slot.copy()
        if not new.any():
            return file, slot
        own = int(self._own[1].nbytes > 0)
        digests = np.diff(np.append(starts, len(pages)))
        data = pages[np.repeat(new, digests)].tobytes()
        at = self._own[own].place(len(data))
        await self._own[own].write(at, memoryview(data))
        counts = digests[new]
        file[new] = len(base.files) + own
        slot[new] = at // DIGEST_NBYTES + np.cumsum(counts) - counts
        return file, slot

    async def _unlink(self, rows: set[int]) -> None:
        """Delete links that no block needs; they would only take space."""
        keys = [self._key(self._base.files[row]) for row in rows]
        try:
            await at_most(self._driver.traits.concurrency, map(self._driver.delete, keys))
        except HoldfastError as error:
            _log.warning("links that no block needs stay in %s: %s", self._folder, error)

    def _extents(self, used: Ints, page_file: Ints, page_slot: Ints) -> Extents:
        """Return the columns for this image, whose files are in the rows ``used``."""
        base = self._base
        lent = [base.files[row] for row in used.tolist() if row < len(base.files)]
        lenders = tuple(dict.fromkeys(file.lender for file in lent))
        files = [(1 + lenders.index(file.lender), file.part, file.nbytes) for file in lent]
        for row in used[len(lent) :].tolist():
            part = row - len(base.files)
            files.append((0, part, self._own[part].nbytes))
        lender, part, nbytes = np.array(files, np.int64).reshape(-1, 3).T
        first = np.flatnonzero(np.append(True, _breaks(self._file, self._at)))
        return Extents(
            lenders,
            *(lender, np.full(len(files), base.rank), part, nbytes),
            np.array([len(first)]),
            np.diff(np.append(first, len(self._file))),
            np.searchsorted(used, self._file[first]),
            self._at[first],
            *(np.searchsorted(used, page_file), page_slot),
        )
