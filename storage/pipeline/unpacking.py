"""Presents the images of a compressed checkpoint as if uncompressed.

Readers of images need not know about compression.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from ...core.units import ceil_div, round_up
from ...drivers.contract import Buffer, Driver, TakePiece, Traits
from ...drivers.layers.layer import Layer
from ...errors import DamagedError
from ...planner.image import DIGEST_NBYTES
from ..format.digest import digest
from ..format.manifest import Manifest
from ..format.packed import Index, index_nbytes, unpack
from ..runtime.buffers import memory_for
from ..runtime.engine import offload


@dataclass(frozen=True, slots=True)
class Stored:
    """The stored form of a chunk: position, size, and stored sizes of its blocks; None if not
    packed."""

    start: int
    nbytes: int
    sizes: list[int] | None = None


class _CopyingTraits(Traits):
    """Traits of a driver that hands over its memory, for a layer that copies from it."""

    __slots__ = ()

    @property
    def read_copies(self) -> int:
        return 2


def copying(traits: Traits) -> Traits:
    """Return the traits of a layer that reads into the caller's memory only."""
    traits = replace(traits, piece_nbytes=0)
    if not traits.hands_over:
        return traits
    values = {f.name: getattr(traits, f.name) for f in fields(traits)}
    return _CopyingTraits(**values | {"hands_over": False})


class Unpacked(Layer):
    """Reads unpacked bytes of images; passes everything else to the inner driver.

    Blocks are unpacked in the destination memory, so no other memory is needed. An image's index is
    read once and cached. Raises DamagedError, with the reason, for data that cannot be unpacked.
    Unpacked data is not verified here: blocks have their own digests.
    """

    def __init__(self, inner: Driver, manifest: Manifest) -> None:
        super().__init__(inner)
        self._m = manifest
        self._image = {manifest.image_key(image): image for image in range(len(manifest.images))}
        self._indexes: dict[int, Index] = {}
        self._damaged_indexes: dict[int, str] = {}  # by image, the problem with its index
        self._locks: dict[int, asyncio.Lock] = {}

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Traits of the inner driver, without pieces and without memory to hand over."""
        return copying(self.inner.traits)

    async def read(self, key: str, start: int, into: Buffer) -> None:
        image = self._image[key]
        position = start
        for stop in self._piece_ends(image, start, start + len(into)):
            await self._read_piece(image, position, into[position - start : stop - start])
            position = stop

    async def fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        return await Driver.fetch(self, key, start, nbytes)

    async def read_pieces(self, key: str, start: int, nbytes: int, take: TakePiece) -> None:
        await Driver.read_pieces(self, key, start, nbytes, take)

    async def read_stored(self, image: int, start: int, stop: int, into: Buffer) -> Stored:
        """Fill the beginning of ``into`` with the stored form of chunk [start, stop), and verify
        it."""
        index = await self.index(image)
        chunk = start // self._m.chunk_nbytes
        begin, end = index.chunk_start[chunk : chunk + 2].tolist()
        await self._read_file(image, begin, into[: end - begin])
        if await offload(digest, into[: end - begin]) != index.digests[chunk].tobytes():
            raise self._damaged(image, "are not what was written")
        return Stored(begin, end - begin, index.sizes_of(start, stop))

    async def index(self, image: int) -> Index:
        """Return the index of an image's blocks."""
        async with self._locks.setdefault(image, asyncio.Lock()):
            if image in self._damaged_indexes:
                raise self._damaged(image, self._damaged_indexes[image])
            if image not in self._indexes:
                try:
                    self._indexes[image] = await self._read_index(image)
                except DamagedError as error:
                    self._damaged_indexes[image] = error.message
                    raise
            return self._indexes[image]

    def _piece_ends(self, image: int, start: int, stop: int) -> Iterator[int]:
        """Yield the cuts of [start, stop): chunk ends, the end of the hashed bytes, and
        ``stop``."""
        hashed = int(self._m.images.hashed_nbytes[image])
        step = self._m.chunk_nbytes
        yield from range(start // step * step + step, min(stop, hashed), step)
        if start < hashed < stop:
            yield hashed
        yield stop

    async def _read_piece(self, image: int, start: int, into: Buffer) -> None:
        stop = start + len(into)
        hashed = int(self._m.images.hashed_nbytes[image])
        if start >= hashed:
            await self._read_file(image, self._pages_start(image) + start - hashed, into)
            return
        block_nbytes = self._m.block_nbytes
        first = start // block_nbytes * block_nbytes
        last = min(round_up(stop, block_nbytes), hashed)
        if (first, last) == (start, stop):
            await self._read_blocks(image, start, into)
        else:
            whole = memoryview(bytearray(last - first))
            await self._read_blocks(image, first, whole)
            into[:] = whole[start - first : stop - first]

    async def _read_blocks(self, image: int, start: int, into: Buffer) -> None:
        stop = start + len(into)
        sizes = await self._receive_blocks(image, start, stop, into)
        try:
            await offload(unpack, into, sizes, self._m.block_nbytes)
        except ValueError as error:
            raise self._damaged(image, f"cannot be unpacked: {error}") from error

    async def _receive_blocks(self, image: int, start: int, stop: int, into: Buffer) -> list[int]:
        """Fill the beginning of ``into`` with the stored blocks of [start, stop); return their
        stored sizes."""
        index = await self.index(image)
        chunk_nbytes = self._m.chunk_nbytes
        chunk_stop = min(start + chunk_nbytes, int(self._m.images.hashed_nbytes[image]))
        if start % chunk_nbytes == 0 and stop == chunk_stop:
            await self.read_stored(image, start, stop, into)
            return index.sizes_of(start, stop)
        sizes = index.sizes_of(start, stop)
        await self._read_file(image, index.begin_of(start), into[: sum(sizes)])
        return sizes

    async def _read_index(self, image: int) -> Index:
        m = self._m
        hashed_nbytes = int(m.images.hashed_nbytes[image])
        nbytes = self._index_nbytes(image)
        with memory_for(f"the index of an image, of {nbytes:,} bytes"):
            data = memoryview(bytearray(nbytes))
        await self._read_file(image, self._file_nbytes(image) - nbytes, data)
        try:
            index = await offload(Index.decode, data, hashed_nbytes, m.chunk_nbytes, m.block_nbytes)
            if index.chunk_start[-1] != self._pages_start(image):
                raise ValueError("the sizes of chunks do not add up to those of the file")
        except ValueError as error:
            raise self._damaged(
                image, f"cannot be found: the file's index is not what was written: {error}"
            ) from error
        return index

    def _file_nbytes(self, image: int) -> int:
        return int(self._m.images.file_nbytes(self._m.block_nbytes)[image])

    def _index_nbytes(self, image: int) -> int:
        hashed_nbytes = int(self._m.images.hashed_nbytes[image])
        return int(index_nbytes(hashed_nbytes, self._m.chunk_nbytes, self._m.block_nbytes))

    def _pages_start(self, image: int) -> int:
        """Return the file offset of the pages, which are stored uncompressed."""
        hashed_nbytes = int(self._m.images.hashed_nbytes[image])
        pages_nbytes = DIGEST_NBYTES * ceil_div(hashed_nbytes, self._m.block_nbytes)
        return self._file_nbytes(image) - self._index_nbytes(image) - pages_nbytes

    async def _read_file(self, image: int, start: int, into: Buffer) -> None:
        """Fill ``into`` with stored bytes from offset ``start`` of the file."""
        try:
            await self.inner.read(self._m.image_key(image), start, into)
        except DamagedError as error:
            raise self._damaged(image, "are beyond the end of the file") from error

    def _damaged(self, image: int, what: str) -> DamagedError:
        """Build an error; ``what`` completes a sentence about bytes, which the caller names."""
        return DamagedError(what, uri=self.uri, key=self._m.image_key(image))
