"""What all who write images have in common: the order of chunks, the pages at the end, and dropping what failed."""

from __future__ import annotations

import asyncio

from ..drivers.contract import Traits, Upload, segments
from .buffers import HostBuffer

__all__ = ["drop", "write_pages", "writing_order"]


def writing_order(chunks: int, chunk_nbytes: int, nbytes: int, traits: Traits) -> list[int]:
    """The chunks of an upload of ``nbytes``, in the order in which to write them: in turn from each of its segments.

    Where a segment begins within a chunk they stay in order: what comes next is then also next in its segment.
    """
    starts = [start for start, _ in segments(nbytes, traits)]
    if any(start % chunk_nbytes for start in starts):
        return list(range(chunks))
    step = starts[1] // chunk_nbytes if len(starts) > 1 else chunks
    return sorted(range(chunks), key=lambda chunk: (chunk % step, chunk))


async def write_pages(upload: Upload, pages: bytes, start: int, buffer: HostBuffer) -> None:
    """Write the digests of all blocks to their place, by way of ``buffer``: after all that they vouch for."""
    for offset in range(0, len(pages), len(buffer.view)):
        part = memoryview(pages)[offset : offset + len(buffer.view)]
        buffer.view[: len(part)] = part
        await upload.write(start + offset, buffer.view[: len(part)])


async def drop(opening: asyncio.Future[Upload]) -> None:
    """Abort an upload, however far it came. After its commit this does nothing."""
    if not opening.done():
        opening.cancel()
        await asyncio.wait([opening])
    if not opening.cancelled() and opening.exception() is None:
        await opening.result().abort()
