"""Shared parts of image writers: opening and dropping uploads, chunk order, trailing pages."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from ...core.aio import wait_out
from ...drivers.contract import Traits, Upload, segments
from ..runtime.buffers import HostBuffer


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
