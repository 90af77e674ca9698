"""What all who write images have in common: opening an upload while there is other work, the order
of chunks, the pages at the end, and dropping what failed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from ...drivers.contract import Traits, Upload, segments
from ..runtime.buffers import HostBuffer

__all__ = ["Opening", "write_pages", "writing_order"]


class Opening:
    """An upload that is being opened."""

    def __init__(self, create: Coroutine[Any, Any, Upload]) -> None:
        self._upload = asyncio.ensure_future(create)
        self._turn = asyncio.Lock()
        self._asking = 0

    async def upload(self) -> Upload:
        """The upload. Those who ask before it is there go on in the order of asking, and before any
        who ask later: drivers may want their parts in order."""
        if self._upload.done() and not self._asking:
            return self._upload.result()
        self._asking += 1
        try:
            async with self._turn:
                return await asyncio.shield(self._upload)
        finally:
            self._asking -= 1

    async def drop(self) -> None:
        """Abort the upload, however far it came. After its commit this does nothing."""
        if not self._upload.done():
            self._upload.cancel()
            await asyncio.wait([self._upload])
        if not self._upload.cancelled() and self._upload.exception() is None:
            await self._upload.result().abort()


def writing_order(chunks: int, chunk_nbytes: int, nbytes: int, traits: Traits) -> list[int]:
    """The chunks of an upload of ``nbytes``, in the order in which to write them: in turn from each
    of its segments.

    Where a segment begins within a chunk they stay in order: what comes next is then also next in
    its segment.
    """
    starts = [start for start, _ in segments(nbytes, traits)]
    if any(start % chunk_nbytes for start in starts):
        return list(range(chunks))
    step = starts[1] // chunk_nbytes if len(starts) > 1 else chunks
    return sorted(range(chunks), key=lambda chunk: (chunk % step, chunk))


async def write_pages(upload: Upload, pages: bytes, start: int, buffer: HostBuffer) -> None:
    """Write the digests of all blocks to their place, by way of ``buffer``: after all that they
    vouch for."""
    for offset in range(0, len(pages), len(buffer.view)):
        part = memoryview(pages)[offset : offset + len(buffer.view)]
        buffer.view[: len(part)] = part
        await upload.write(start + offset, buffer.view[: len(part)])
