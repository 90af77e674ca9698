"""Writes an image that is already in memory, from where it lies."""

from __future__ import annotations

from contextlib import AsyncExitStack

from ...drivers.contract import Driver
from ...planner.image import ImageLayout
from ..arenas.memory import Memory
from ..format.packed import Compression
from .base import Borrowing
from .borrowing import BaseImage
from .chunks import MemoryChunks
from .image_writer import Callbacks, ImageWriter, WrittenImage

BUDGET_NBYTES = 256 << 20
"""Limit for compressed chunks. Uncompressed chunks are written in place and take none of it."""
UNSEEN = Callbacks(lambda: None, lambda: None)
"""Callbacks of a write that nobody follows."""


async def write_memory(
    driver: Driver,
    key: str,
    layout: ImageLayout,
    memory: Memory,
    compression: Compression | None = None,
    *,
    callbacks: Callbacks = UNSEEN,
    borrower: tuple[Borrowing, int] | None = None,
) -> WrittenImage:
    """Write the image of ``layout`` in ``memory``, which stays as it is. The image is durable on
    return. ``borrower``: a base to borrow equal bytes from, and the rank of the image. Raises as
    :meth:`.image_writer.ImageWriter.write`."""

    async def known() -> str:
        return key

    chunks = MemoryChunks(layout, memory, packed=compression is not None)
    async with AsyncExitStack() as opened:

        async def base() -> BaseImage | None:
            if borrower is None:
                return None
            borrowing, rank = borrower
            return await borrowing.image(driver, rank, layout, opened)

        writer = ImageWriter(driver, layout, chunks, BUDGET_NBYTES, callbacks, compression, base)
        return await writer.write(known)
