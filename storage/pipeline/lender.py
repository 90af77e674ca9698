"""The base of a copy: a checkpoint at the destination, from which equal bytes are copied there.

Bytes are equal if their blocks have the same digests, at the same place of the same rank's image.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...drivers.contract import CopyTraits, Driver, Upload
from ...errors import HoldfastError
from ...planner.image import DIGEST_NBYTES
from ..format.chunks import Chunk, chunks_of
from ..format.manifest import Manifest
from .borrowing import copied_runs, equal_blocks
from .image_reader import ImageReader

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LentImage:
    """An image of the base. ``blocks``: (B, 16) digests of its blocks. ``pages``: digests of the
    blocks of the image to copy, by the start of their chunk."""

    key: str
    blocks: npt.NDArray[np.uint8]
    pages: dict[int, bytes]
    block_nbytes: int
    copies: CopyTraits

    def runs(self, chunk: Chunk) -> list[tuple[int, int, bool]]:
        """Return (start, stop, lent) of all runs of a chunk, as bytes of the image."""
        first = chunk.start // self.block_nbytes
        equal = equal_blocks(self.pages[chunk.start], self.blocks, first)
        return copied_runs(equal, chunk.start, chunk.stop, self.block_nbytes, self.copies)


class Lender:
    """Finds the equal bytes that the images of one copy can borrow, and counts them."""

    def __init__(self, source: ImageReader, base: ImageReader, destination: Driver) -> None:
        """``source`` reads the images to copy, ``base`` those to borrow from."""
        self._source = source
        self._base = base
        self._copies = destination.traits.copies
        self._sizes = _sizes(source.manifest)
        self._base_sizes = _sizes(base.manifest)
        self._rows = {rank: row for row, rank in enumerate(base.manifest.images.rank.tolist())}
        self._is_over = False
        self.borrowed_nbytes = 0
        self.why_whole = ""
        """Why bytes were sent that the base may have; "" if there is no reason."""
        if why := self._refusal(destination):
            self._end(why)

    def _refusal(self, destination: Driver) -> str:
        ours, theirs = self._source.manifest, self._base.manifest
        copies = self._copies
        if copies is None or not destination.copies_from(self._base.driver):
            return "the destination cannot copy from it"
        if ours.compression is not None or not theirs.is_plain:
            return "one of the checkpoints is compressed, or shares files"
        if (ours.chunk_nbytes, ours.block_nbytes) != (theirs.chunk_nbytes, theirs.block_nbytes):
            return "its blocks have another size"
        if ours.block_nbytes % copies.align_nbytes:
            return "the destination cannot copy single blocks"
        return ""

    async def image(self, image: int) -> LentImage | None:
        """Return the base of an image; None if it borrows nothing. Raises DamagedError and
        StorageError only for the source."""
        copies = self._copies
        row = self._rows.get(int(self._source.manifest.images.rank[image]))
        if self._is_over or copies is None:
            return None
        nbytes = self._sizes[image]
        if row is None or self._base_sizes[row] != nbytes:
            self._say("it has another layout")
            return None
        if copies.object_max_nbytes is not None and nbytes > copies.object_max_nbytes:
            self._say("an image is too large to be copied in parts")
            return None
        pages = await _pages(self._source, image)
        try:
            blocks = b"".join((await _pages(self._base, row)).values())
        except HoldfastError as error:
            self._end(str(error))
            return None
        table = np.frombuffer(blocks, np.uint8).reshape(-1, DIGEST_NBYTES)
        m = self._base.manifest
        return LentImage(m.image_key(row), table, pages, m.block_nbytes, copies)

    async def copy(self, upload: Upload, lent: LentImage, start: int, stop: int) -> bool:
        """Copy bytes of the base, and return whether that worked. It may have been deleted."""
        try:
            await upload.copy(start, self._base.driver, lent.key, start, stop - start)
        except HoldfastError as error:
            self._end(str(error))
            return False
        self.borrowed_nbytes += stop - start
        return True

    def _end(self, why: str) -> None:
        """Borrow nothing more."""
        self._is_over = True
        self._say(why)

    def _say(self, why: str) -> None:
        if not self.why_whole:
            self.why_whole = why
            _log.warning("bytes that %s may have are sent: %s", self._base.driver.uri, why)


def _sizes(m: Manifest) -> list[int]:
    sizes: list[int] = m.images.file_nbytes(m.block_nbytes).tolist()
    return sizes


async def _pages(reader: ImageReader, image: int) -> dict[int, bytes]:
    """Return the verified pages of an image, by the start of their chunk."""
    starts = [chunk.start for chunk in chunks_of(reader.manifest, image)]
    pages = await reader.read_pages(image, starts)
    return {start: pages[image, start] for start in starts}
