"""Which bytes of an image are copied within the storage, from an earlier checkpoint, instead of
written.

Only digests decide: a block with the same place and xxh3-128 digest as one of the earlier image has
the same bytes. Layouts need not be compared, and nobody has to say what has changed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...drivers.contract import CopyTraits, Driver
from ...errors import DamagedError, NotFoundError
from ...planner.image import DIGEST_NBYTES, ImageLayout

RUN_BLOCKS_MIN = 4
"""Shortest copy within a chunk, in blocks: a shorter one costs more than writing it."""
RUNS_MAX = 8
"""Most copies within a chunk, the longest ones; in more pieces, it would be slow to read."""


@dataclass(frozen=True, slots=True)
class BaseImage:
    """An image of the same size in an earlier checkpoint: object ``key`` of ``source``. ``blocks``:
    (B, 16) digests of its blocks. ``holds(chunk, page)``: whether a chunk of the image to write has
    these digests. It is then borrowed without being taken."""

    source: Driver
    key: str
    blocks: npt.NDArray[np.uint8]
    copies: CopyTraits
    holds: Callable[[int, bytes], Awaitable[bool]] | None = None

    def page(self, layout: ImageLayout, chunk: int) -> bytes:
        """Return the digests of a chunk's blocks."""
        start, stop = layout.chunk_range(chunk)
        block = layout.block_nbytes
        return self.blocks[start // block : -(-stop // block)].tobytes()

    def runs(self, layout: ImageLayout, chunk: int, page: bytes) -> list[tuple[int, int, bool]]:
        """Return (start, stop, borrowed) of all runs of a chunk, as bytes of the image; ``page``:
        digests of the chunk's blocks."""
        start, stop = layout.chunk_range(chunk)
        block = layout.block_nbytes
        found = np.frombuffer(page, np.uint8).reshape(-1, DIGEST_NBYTES)
        equal = (found == self.blocks[start // block :][: len(found)]).all(axis=1)
        return ranges_of(equal, start, stop, block, self.copies)


def ranges_of(
    equal: npt.NDArray[np.bool_], start: int, stop: int, block_nbytes: int, copies: CopyTraits
) -> list[tuple[int, int, bool]]:
    """Return (start, stop, borrowed) of all runs of the chunk [start, stop) of an image, given
    which of its blocks are ``equal`` to the base's."""
    runs = runs_of(equal, whole=copies.min_nbytes > block_nbytes)
    ranges = [
        (start + i * block_nbytes, min(start + j * block_nbytes, stop), lent) for i, j, lent in runs
    ]
    return [(i, j, lent and j - i >= copies.min_nbytes) for i, j, lent in ranges]


def runs_of(equal: npt.NDArray[np.bool_], *, whole: bool) -> list[tuple[int, int, bool]]:
    """Return (begin, end, borrowed) of all runs of blocks, given which are ``equal`` to the base's.
    ``whole``: all are borrowed or none."""
    count = len(equal)
    if equal.all() or whole:
        return [(0, count, bool(equal.all()))]
    edges = np.flatnonzero(np.diff(equal, prepend=False, append=False)).reshape(-1, 2)
    lengths = edges[:, 1] - edges[:, 0]
    longest = np.sort(np.argsort(-lengths, kind="stable")[:RUNS_MAX])
    runs: list[tuple[int, int, bool]] = []
    done = 0
    for begin, end in edges[longest[lengths[longest] >= RUN_BLOCKS_MIN]].tolist():
        runs += [(done, begin, False)] * (done < begin) + [(begin, end, True)]
        done = end
    runs += [(done, count, False)] * (done < count)
    return runs


async def pages_of(driver: Driver, key: str, layout: ImageLayout) -> bytearray | None:
    """Return the digests of all blocks of the image ``key``; None unless it has the size of
    ``layout``. Its data is not read: a committed upload is complete."""
    pages = bytearray(layout.nbytes - layout.hashed_end)
    try:
        if (await driver.stat(key)).nbytes != layout.nbytes:
            return None
        await driver.read(key, layout.hashed_end, memoryview(pages))
    except (NotFoundError, DamagedError):
        return None
    return pages


async def base_image(
    driver: Driver, source: Driver, key: str, layout: ImageLayout
) -> BaseImage | None:
    """Return the image ``key`` of ``source`` if an image of this layout at ``driver`` can borrow
    from it. Raises StorageError."""
    copies = driver.traits.copies
    if copies is None or layout.block_nbytes % copies.align_nbytes:
        return None
    if copies.object_max_nbytes is not None and layout.nbytes > copies.object_max_nbytes:
        return None
    pages = await pages_of(source, key, layout)
    if pages is None:
        return None
    blocks = np.frombuffer(pages, np.uint8).reshape(-1, DIGEST_NBYTES)
    return BaseImage(source, key, blocks, copies)
