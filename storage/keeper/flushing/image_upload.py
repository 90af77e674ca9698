"""Writes an image from memory to storage, without a copy."""

from __future__ import annotations

import numpy as np

from ....drivers.contract import Driver
from ....errors import DamagedError
from ....planner.image import ImageLayout
from ...arenas.label import Label
from ...format.packed import Compression
from ...pipeline.chunks import MemoryChunks
from ...pipeline.image_writer import Callbacks, ImageWriter
from ..tiers import HeldImage

__all__ = ["write_image"]

BUDGET_NBYTES = 256 << 20
"""Limit for compressed chunks. Uncompressed chunks are written in place and take none of it."""


async def write_image(
    driver: Driver, key: str, image: HeldImage, compression: Compression | None = None
) -> int:
    """Write an image that has shards, and return the size of its file. It is durable on return.
    Raises StorageError, and DamagedError if the image has changed in memory."""
    label = image.label
    layout = _layout_of(label)
    writer = ImageWriter(
        driver,
        layout,
        MemoryChunks(layout, image.memory),
        BUDGET_NBYTES,
        Callbacks(lambda: None, lambda: None),
        compression,
    )

    async def known() -> str:
        return key

    written = await writer.write(known)
    if written.digests.tobytes() != label.digests:
        raise DamagedError(
            f"the image of rank {label.rank} of step {label.generation.step} has changed in memory",
            rank=label.rank,
        )
    return written.stored_nbytes


def _layout_of(label: Label) -> ImageLayout:
    """Return a layout with the chunks and pages of an image, but without its shards."""
    whole = np.zeros(1, np.int64)
    return ImageLayout(
        header=b"",
        start=whole,
        order=whole,
        data_end=label.hashed_end,
        hashed_end=label.hashed_end,
        nbytes=label.nbytes,
        chunk_nbytes=label.chunk_nbytes,
        block_nbytes=label.block_nbytes,
    )
