"""A compressed checkpoint's images as if they were stored plain: what reads images need not know
that they are not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, fields

from ...core.units import round_up
from ...drivers.contract import Buffer, Driver, Traits
from ...drivers.layers.layer import Layer
from ...errors import DamagedError
from ...planner.image import DIGEST_NBYTES, blocks_of
from ..format.digest import digest
from ..format.manifest import Manifest
from ..format.packed import Index, checked_compression, index_nbytes, unpack
from ..runtime.buffers import memory_for
from ..runtime.engine import offload

__all__ = ["Stored", "Unpacked", "images_of"]


def images_of(driver: Driver, manifest: Manifest) -> Driver:
    """What to read the images of ``manifest`` with: ``driver``, unless they are compressed. Raises
    UsageError where lz4 is not installed."""
    if manifest.compression is None:
        return driver
    checked_compression(manifest.compression)
    return Unpacked(driver, manifest)


@dataclass(frozen=True, slots=True)
class Stored:
    """A chunk as it lies in its file: where, how much, and what its blocks take; that is None where
    nothing is packed."""

    start: int
    nbytes: int
    sizes: list[int] | None = None


class _CopiedTraits(Traits):
    """Those of a driver that hands over what it reads, where that is copied."""

    __slots__ = ()

    @property
    def read_copies(self) -> int:
        return 2


class Unpacked(Layer):
    """Reads of an image are of its own bytes; all else is the driver's. Unpacks in the memory that
    is read into, so it takes no other. Indexes of images are read once, and kept.

    Raises DamagedError for what cannot be unpacked; its message tells why. What can be is not
    verified: blocks have their digests.
    """

    def __init__(self, inner: Driver, manifest: Manifest) -> None:
        super().__init__(inner)
        self._m = manifest
        self._image = {manifest.image_key(image): image for image in range(len(manifest.images))}
        self._indexes: dict[int, Index] = {}
        self._lost: dict[int, str] = {}  # of those that are damaged, what is wrong
        self._gates: dict[int, asyncio.Lock] = {}

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """As below, but that nothing is handed over."""
        below = self.inner.traits
        if not below.hands_over:
            return below
        return _CopiedTraits(
            **{f.name: getattr(below, f.name) for f in fields(below)} | {"hands_over": False}
        )

    async def read(self, key: str, start: int, into: Buffer) -> None:
        """See :meth:`Driver.read`."""
        image, at = self._image[key], start
        for stop in self._cuts(image, start, start + len(into)):
            await self._read_piece(image, at, into[at - start : stop - start])
            at = stop

    async def fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        """See :meth:`Driver.fetch`."""
        return await Driver.fetch(self, key, start, nbytes)

    async def read_stored(self, image: int, start: int, stop: int, into: Buffer) -> Stored:
        """Fill the beginning of ``into`` with what is stored of the chunk [start, stop), and verify
        that."""
        index = await self.index(image)
        chunk = start // self._m.chunk_nbytes
        begin, end = index.chunk_start[chunk : chunk + 2].tolist()
        await self._receive(image, begin, into[: end - begin])
        if await offload(digest, into[: end - begin]) != index.digests[chunk].tobytes():
            raise self._damaged(image, "are not what was written")
        return Stored(begin, end - begin, index.sizes_of(start, stop))

    async def index(self, image: int) -> Index:
        """Where the blocks of an image lie."""
        async with self._gates.setdefault(image, asyncio.Lock()):
            if image in self._lost:
                raise self._damaged(image, self._lost[image])
            if image not in self._indexes:
                try:
                    self._indexes[image] = await self._read_index(image)
                except DamagedError as error:
                    self._lost[image] = error.message
                    raise
            return self._indexes[image]

    def _cuts(self, image: int, start: int, stop: int) -> Iterator[int]:
        """Where pieces of [start, stop) end: with a chunk, with the last of them, and with all of
        it."""
        hashed, step = int(self._m.images.hashed_nbytes[image]), self._m.chunk_nbytes
        yield from range(start // step * step + step, min(stop, hashed), step)
        if start < hashed < stop:
            yield hashed
        yield stop

    async def _read_piece(self, image: int, start: int, into: Buffer) -> None:
        m, stop = self._m, start + len(into)
        hashed = int(m.images.hashed_nbytes[image])
        if start >= hashed:
            await self._receive(image, self._pages_start(image) + start - hashed, into)
            return
        first, last = (
            start // m.block_nbytes * m.block_nbytes,
            min(round_up(stop, m.block_nbytes), hashed),
        )
        if (first, last) == (start, stop):
            await self._read_blocks(image, start, into)
        else:
            whole = memoryview(bytearray(last - first))
            await self._read_blocks(image, first, whole)
            into[:] = whole[start - first : stop - first]

    async def _read_blocks(self, image: int, start: int, into: Buffer) -> None:
        """Whole blocks of one chunk."""
        m, stop = self._m, start + len(into)
        if start % m.chunk_nbytes == 0 and stop in (
            start + m.chunk_nbytes,
            int(m.images.hashed_nbytes[image]),
        ):
            sizes = (await self.read_stored(image, start, stop, into)).sizes
        else:
            index = await self.index(image)
            sizes = index.sizes_of(start, stop)
            await self._receive(image, index.begin_of(start), into[: sum(sizes)])
        try:
            await offload(unpack, into, sizes, m.block_nbytes)
        except ValueError as error:
            raise self._damaged(image, f"cannot be unpacked: {error}") from error

    async def _read_index(self, image: int) -> Index:
        m = self._m
        geometry = (int(m.images.hashed_nbytes[image]), m.chunk_nbytes, m.block_nbytes)
        nbytes = int(index_nbytes(*geometry))
        with memory_for(f"the index of an image, of {nbytes:,} bytes"):
            data = memoryview(bytearray(nbytes))
        await self._receive(image, self._file_nbytes(image) - len(data), data)
        try:
            index = await offload(Index.decode, data, *geometry)
            if index.chunk_start[-1] != self._pages_start(image):
                raise ValueError("chunks do not take what the file has for them")
        except ValueError as error:
            raise self._damaged(
                image, f"cannot be found: the file's index is not what was written: {error}"
            ) from error
        return index

    def _file_nbytes(self, image: int) -> int:
        return int(self._m.images.file_nbytes(self._m.block_nbytes)[image])

    def _pages_start(self, image: int) -> int:
        """Where in the file the pages are, which are as they are in the image."""
        m = self._m
        hashed = int(m.images.hashed_nbytes[image])
        pages_nbytes = DIGEST_NBYTES * blocks_of(hashed, m.block_nbytes)
        return (
            self._file_nbytes(image)
            - pages_nbytes
            - int(index_nbytes(hashed, m.chunk_nbytes, m.block_nbytes))
        )

    async def _receive(self, image: int, start: int, into: Buffer) -> None:
        try:
            await self.inner.read(self._m.image_key(image), start, into)
        except DamagedError as error:
            raise self._damaged(image, "are beyond the end of the file") from error

    def _damaged(self, image: int, what: str) -> DamagedError:
        """``what`` says of some bytes, which the caller knows, what is wrong with them."""
        return DamagedError(what, uri=self.uri, key=self._m.image_key(image))
