"""Reads the digests stored after the data of an image, for many chunks at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from ...drivers.contract import Driver
from ...errors import DamagedError
from ...planner.image import DIGEST_NBYTES, blocks_of
from ..format.chunks import Chunk
from ..format.manifest import Manifest

__all__ = ["PAGES_NBYTES", "StoredPages"]

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
        """Bytes of digests in memory."""
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
        return blocks_of(int(self._m.images.hashed_nbytes[image]), self._m.chunk_nbytes)

    async def _fetch(self, image: int, index: int) -> bytes:
        m = self._m
        group_nbytes = self._chunks * self._page_nbytes
        pages_start = int(m.images.hashed_nbytes[image])
        pages_stop = pages_start + blocks_of(pages_start, m.block_nbytes) * DIGEST_NBYTES
        if self._present_nbytes[image] < pages_stop:
            return b""
        start = pages_start + index * group_nbytes
        into = bytearray(min(group_nbytes, pages_stop - start))
        try:
            await self._driver.read(m.image_key(image), start, memoryview(into))
        except DamagedError:
            return b""  # truncated after its size was checked
        return bytes(into)
