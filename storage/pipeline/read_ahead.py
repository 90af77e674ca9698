"""Starts reading a checkpoint before the destinations of its bytes are known.

This keeps remote storage busy while a state of thousands of tensors is inspected. A strict load of
a whole checkpoint reads everything that the manifest lists, so digests and the first chunks are
requested immediately, unverified, and served from here later. Nothing is delivered earlier than
without it, and a load that does not fit fails in the same way, with these reads wasted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...core.aio import wait_out
from ...drivers.contract import Buffer, Driver, TakePiece
from ...drivers.layers.layer import Layer, find
from ...drivers.pieces import cut
from ..format.chunks import chunks_of
from ..format.manifest import Manifest
from ..runtime.engine import offload

_MOST_NBYTES = 32 << 20
"""More brings no measurable gain and takes memory."""
_TENSOR_NBYTES = 16 << 10
"""Bytes a fast store sends while one tensor is inspected, which takes 15 µs. Large tensors are
better read in pieces, which need no extra memory."""
_DIGESTS_MOST_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class _Range:
    """Bytes [start, stop) of an object, being read."""

    key: str
    start: int
    stop: int
    task: asyncio.Task[Buffer]


class ReadAhead(Layer):
    """Holds ranges that were read ahead, each until it is read from here or this is closed.

    Errors of the inner driver are raised when a range is read.
    """

    def __init__(self, inner: Driver, budget_nbytes: int) -> None:
        super().__init__(inner)
        self.limit_nbytes = min(_MOST_NBYTES, budget_nbytes // 4)
        """Memory that this may hold, in addition to 1 MiB of digests."""
        self._ranges: list[_Range] = []
        self._closed = False

    def begin(self, manifest: Manifest) -> None:
        """Request the beginning of the images of ``manifest``, in the order in which a plan reads
        them.

        Does nothing if they are compressed.
        """
        if self._closed or manifest.compression is not None:
            return
        limit_nbytes = min(self.limit_nbytes, len(manifest.tensors) * _TENSOR_NBYTES)
        for key, start, stop in _first_ranges(manifest, limit_nbytes):
            reading = asyncio.ensure_future(self.inner.fetch(key, start, stop - start))
            self._ranges.append(_Range(key, start, stop, reading))

    async def read(self, key: str, start: int, into: Buffer) -> None:
        """Read from the held data if possible; see :meth:`Driver.read`."""
        data = await self._held(key, start, len(into))
        if data is None:
            await self.inner.read(key, start, into)
        else:
            into[:] = data

    async def fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        """Fetch from the held data if possible; see :meth:`Driver.fetch`."""
        data = await self._held(key, start, nbytes)
        if data is None:
            data = await self.inner.fetch(key, start, nbytes)
        return data

    async def read_pieces(self, key: str, start: int, nbytes: int, take: TakePiece) -> None:
        """Read pieces from the held data if possible; see :meth:`Driver.read_pieces`."""
        data = await self._held(key, start, nbytes)
        if data is None:
            await self.inner.read_pieces(key, start, nbytes, take)
            return

        def take_all() -> None:
            for piece in cut(data, start, self.traits.piece_nbytes):
                take(piece)

        await offload(take_all)

    async def close(self) -> None:
        """Cancel pending reads and close; see :meth:`Driver.close`."""
        self._closed = True
        tasks = [held.task for held in self._ranges]
        self._ranges.clear()
        for task in tasks:
            task.cancel()
        cancelled = await wait_out(tasks)
        for task in tasks:
            if not task.cancelled():
                task.exception()  # mark as retrieved: nobody waits for it any more
        await self.inner.close()
        if cancelled is not None:
            raise cancelled

    async def _held(self, key: str, start: int, nbytes: int) -> Buffer | None:
        """Return a complete range once it has arrived, or None if it was not requested.

        It is released: a load reads each byte once.
        """
        stop = start + nbytes
        for held in self._ranges:
            if held.key == key and held.start <= start < stop <= held.stop:
                self._ranges.remove(held)
                data = await held.task
                return data[start - held.start : stop - held.start]
        return None


def read_ahead(driver: Driver, manifest: Manifest) -> None:
    """Start reading ahead what ``manifest`` names, if the load's driver supports it."""
    layer = find(driver, ReadAhead)
    if layer is not None:
        layer.begin(manifest)


def _first_ranges(m: Manifest, limit_nbytes: int) -> Iterator[tuple[str, int, int]]:
    """Yield (key, start, stop) of digests and stored chunks, images in order, up to
    ``limit_nbytes`` of chunks."""
    left_nbytes = limit_nbytes
    digests_nbytes = _DIGESTS_MOST_NBYTES
    file_nbytes = m.images.nbytes(m.block_nbytes).tolist()
    data_start = m.images.hashed_nbytes.copy()  # headers come first, and are not read
    np.minimum.at(data_start, m.shards.image, m.shards.start // m.block_nbytes * m.block_nbytes)
    for image, (begin, end) in enumerate(
        zip(data_start.tolist(), m.images.hashed_nbytes.tolist(), strict=True)
    ):
        if begin == end:
            continue  # only a header
        key = m.image_key(image)
        digests_nbytes -= file_nbytes[image] - end
        if digests_nbytes < 0:
            return
        yield key, end, file_nbytes[image]
        for chunk in chunks_of(m, image):
            if chunk.stop <= begin:
                continue
            start = max(begin, chunk.start)
            left_nbytes -= chunk.stop - start
            if left_nbytes < 0:
                return
            yield key, start, chunk.stop
