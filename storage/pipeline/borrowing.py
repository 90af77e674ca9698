"""Which bytes of an image are copied within the storage, from an earlier checkpoint, instead of
written.

Only digests decide: a block with the same place and xxh3-128 digest as one of the earlier image has
the same bytes. Layouts need not be compared, and nobody has to name the changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ...core.units import ceil_div
from ...drivers.contract import CopyTraits, Driver, Upload
from ...errors import DamagedError, NotFoundError, UsageError
from ...planner.image import DIGEST_NBYTES, ImageLayout

RUN_BLOCKS_MIN = 4
"""Shortest copy within a chunk, in blocks: a shorter one costs more than writing it."""
RUNS_MAX = 8
"""Most copies within a chunk, the longest ones; in more pieces, it would be slow to read."""


@dataclass(frozen=True, slots=True)
class Incremental:
    """Limits of incremental saves.

    ``anchor``: every ``anchor``-th save is a whole one, which bounds how many checkpoints a damaged
    block harms. Where checkpoints share files (hard links): a file lends blocks as long as a share
    ``live`` of it is in use, and an image borrows from the files of at most ``lenders`` earlier
    saves. Raises UsageError for values out of range.
    """

    anchor: int = 50
    live: float = 0.25
    lenders: int = 32

    @classmethod
    def of(cls, fields: Sequence[float]) -> Incremental:
        """Build the limits from :func:`dataclasses.astuple`; the defaults from ()."""
        if not fields:
            return cls()
        anchor, live, lenders = fields
        return cls(int(anchor), live, int(lenders))

    def __post_init__(self) -> None:
        if not (self.anchor >= 1 and 0 <= self.live <= 1 and self.lenders >= 1):
            raise UsageError(f"{self} is out of range: anchor and lenders >= 1, 0 <= live <= 1")


@dataclass(eq=False)
class BaseImage(ABC):
    """An image of this layout in an earlier checkpoint at ``source``, whose equal blocks an upload
    can copy. ``key``: its key; ``blocks``: (B, 16) digests of its blocks. ``known(pages)``: digests
    of chunks of the image to write, if the base has the digests ``pages``. Their equal blocks are
    borrowed and not taken."""

    source: Driver
    key: str
    layout: ImageLayout
    blocks: npt.NDArray[np.uint8]
    known: Callable[[Mapping[int, bytes]], Awaitable[dict[int, bytes]]] | None = field(
        default=None, kw_only=True
    )

    def page(self, chunk: int) -> bytes:
        """Return the digests of a chunk's blocks."""
        start, stop = self.layout.chunk_range(chunk)
        block = self.layout.block_nbytes
        return self.blocks[start // block : ceil_div(stop, block)].tobytes()

    @abstractmethod
    async def open(self, driver: Driver, key: str, nbytes: int) -> Upload:
        """Begin to write the image ``key``. Raises StorageError."""

    @abstractmethod
    def runs(self, chunk: int, page: bytes) -> list[tuple[int, int, bool]]:
        """Return (start, stop, borrowed) of all runs of a chunk, as bytes of the image; ``page``:
        digests of the chunk's blocks."""


@dataclass(eq=False)
class CopiedImage(BaseImage):
    """A :class:`BaseImage` whose blocks the storage copies."""

    copies: CopyTraits

    async def open(self, driver: Driver, key: str, nbytes: int) -> Upload:
        return await driver.compose(key, nbytes)

    def runs(self, chunk: int, page: bytes) -> list[tuple[int, int, bool]]:
        start, stop = self.layout.chunk_range(chunk)
        block = self.layout.block_nbytes
        return copied_runs(
            equal_blocks(page, self.blocks, start // block), start, stop, block, self.copies
        )


def equal_blocks(page: bytes, blocks: npt.NDArray[np.uint8], first: int) -> npt.NDArray[np.bool_]:
    """Return which digests in ``page`` equal those in ``blocks``, (B, 16), from row ``first``."""
    found = np.frombuffer(page, np.uint8).reshape(-1, DIGEST_NBYTES)
    equal: npt.NDArray[np.bool_] = (found == blocks[first : first + len(found)]).all(axis=1)
    return equal


def copied_runs(
    equal: npt.NDArray[np.bool_], start: int, stop: int, block_nbytes: int, copies: CopyTraits
) -> list[tuple[int, int, bool]]:
    """Return (start, stop, borrowed) of all runs of the chunk [start, stop) of an image, given
    which of its blocks are ``equal`` to the base's."""
    runs = runs_of(equal, whole=copies.min_nbytes > block_nbytes)
    ranges = in_bytes(runs, start, stop, block_nbytes)
    return [(i, j, lent and j - i >= copies.min_nbytes) for i, j, lent in ranges]


def in_bytes(
    runs: Sequence[tuple[int, int, bool]], start: int, stop: int, block_nbytes: int
) -> list[tuple[int, int, bool]]:
    """Return runs of the blocks of the chunk [start, stop) as bytes of the image."""
    return [
        (start + i * block_nbytes, min(start + j * block_nbytes, stop), lent) for i, j, lent in runs
    ]


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


async def copied_image(
    driver: Driver, source: Driver, key: str, layout: ImageLayout
) -> CopiedImage | None:
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
    return CopiedImage(source, key, layout, blocks, copies)
