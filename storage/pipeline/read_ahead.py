"""Begins to read a checkpoint before it is known where its bytes belong: storage behind a network
is not idle while a state of thousands of tensors is looked at.

What a strict load of a whole checkpoint reads is known from the manifest alone: all of it. So the
digests and the first chunks are asked for at once, unverified, and whoever reads them later gets
them from here. Nothing is delivered earlier than otherwise, and a load that does not fit fails as
it would otherwise; it has then read so much in vain.
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

__all__ = ["ReadAhead", "read_ahead"]

_MOST_NBYTES = 32 << 20
"""More gains nothing that could be told from noise, and takes memory."""
_TENSOR_NBYTES = 16 << 10
"""What a fast store sends while a tensor is looked at, which takes 15 µs. Large tensors are better
read in pieces, which need no memory besides."""
_DIGESTS_MOST_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class _Range:
    """Bytes [start, stop) of an object, on their way."""

    key: str
    start: int
    stop: int
    task: asyncio.Task[Buffer]


class ReadAhead(Layer):
    """Holds what is read ahead: each range until it has been read from here, all of them until
    this is closed. Raises what the driver below raises, when a range is read."""

    def __init__(self, inner: Driver, budget_nbytes: int) -> None:
        super().__init__(inner)
        self.limit_nbytes = min(_MOST_NBYTES, budget_nbytes // 4)
        """Memory that this may hold, besides 1 MiB of digests."""
        self._ranges: list[_Range] = []
        self._closed = False

    def begin(self, manifest: Manifest) -> None:
        """Ask for the beginning of the images of ``manifest``, in the order in which a plan reads
        them; for nothing where they are compressed."""
        if self._closed or manifest.compression is not None:
            return
        limit_nbytes = min(self.limit_nbytes, len(manifest.tensors) * _TENSOR_NBYTES)
        for key, start, stop in _first_ranges(manifest, limit_nbytes):
            reading = asyncio.ensure_future(self.inner.fetch(key, start, stop - start))
            self._ranges.append(_Range(key, start, stop, reading))

    async def read(self, key: str, start: int, into: Buffer) -> None:
        """See :meth:`Driver.read`."""
        data = await self._held(key, start, len(into))
        if data is None:
            await self.inner.read(key, start, into)
        else:
            into[:] = data

    async def fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        """See :meth:`Driver.fetch`."""
        data = await self._held(key, start, nbytes)
        if data is None:
            data = await self.inner.fetch(key, start, nbytes)
        return data

    async def read_pieces(self, key: str, start: int, nbytes: int, take: TakePiece) -> None:
        """See :meth:`Driver.read_pieces`."""
        data = await self._held(key, start, nbytes)
        if data is None:
            await self.inner.read_pieces(key, start, nbytes, take)
            return

        def take_all() -> None:
            for piece in cut(data, start, self.traits.piece_nbytes):
                take(piece)

        await offload(take_all)

    async def close(self) -> None:
        """See :meth:`Driver.close`. What is on its way is dropped."""
        self._closed = True
        tasks = [held.task for held in self._ranges]
        self._ranges.clear()
        for task in tasks:
            task.cancel()
        cancelled = await wait_out(tasks)
        for task in tasks:
            if not task.cancelled():
                task.exception()  # nobody waits for it any more
        await self.inner.close()
        if cancelled is not None:
            raise cancelled

    async def _held(self, key: str, start: int, nbytes: int) -> Buffer | None:
        """What is held of a range, all of it, once it has arrived; None where it was not asked for.
        It is let go of: a load reads each byte once."""
        stop = start + nbytes
        for held in self._ranges:
            if held.key == key and held.start <= start < stop <= held.stop:
                self._ranges.remove(held)
                data = await held.task
                return data[start - held.start : stop - held.start]
        return None


def read_ahead(driver: Driver, manifest: Manifest) -> None:
    """Begin to read what ``manifest`` names, if the driver of the load reads ahead."""
    layer = find(driver, ReadAhead)
    if layer is not None:
        layer.begin(manifest)


def _first_ranges(m: Manifest, limit_nbytes: int) -> Iterator[tuple[str, int, int]]:
    """(key, start, stop) of digests, and of what is stored in chunks, images in order, as far as
    chunks of ``limit_nbytes`` together go."""
    left_nbytes = limit_nbytes
    digests_nbytes = _DIGESTS_MOST_NBYTES
    file_nbytes = m.images.nbytes(m.block_nbytes).tolist()
    data_start = m.images.hashed_nbytes.copy()  # headers come before it, and are not read
    np.minimum.at(data_start, m.shards.image, m.shards.start // m.block_nbytes * m.block_nbytes)
    for image, (begin, end) in enumerate(
        zip(data_start.tolist(), m.images.hashed_nbytes.tolist(), strict=True)
    ):
        if begin == end:
            continue  # nothing but a header
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
