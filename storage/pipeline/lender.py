"""The base of a copy: a checkpoint at the destination, from which it borrows equal bytes.

Bytes are equal if their blocks have the same digests, at the same place of the same rank's image.
They are copied there, or, in format version 3, stay in files that get hard links.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np

from ...drivers.contract import Driver, Upload
from ...errors import HoldfastError
from ...planner.image import DIGEST_NBYTES, ImageLayout
from ..format.chunks import Chunk, chunks_of
from ..format.extents import Extents
from ..format.manifest import Manifest, image_key
from ..format.tables import ImageTable
from .borrowing import BaseImage, Incremental, copied_image
from .image_reader import ImageReader
from .linking import LinkedUpload, linked_image

LIMITS = Incremental()

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LentImage:
    """An image of the base. ``pages``: digests of the blocks of the image to copy, by the start of
    their chunk."""

    base: BaseImage
    pages: dict[int, bytes]

    def runs(self, chunk: Chunk) -> list[tuple[int, int, bool]]:
        """Return (start, stop, lent) of all runs of a chunk, as bytes of the image."""
        number = chunk.start // self.base.layout.chunk_nbytes
        return self.base.runs(number, self.pages[chunk.start])


class Lender:
    """Finds the equal bytes that the images of one copy can borrow, and counts them."""

    def __init__(
        self, source: ImageReader, base: Driver, manifest: Manifest, destination: Driver
    ) -> None:
        """``source`` reads the images to copy; ``manifest``: the checkpoint at ``base``."""
        self._source = source
        self._base = base
        self._manifest = manifest
        self._destination = destination
        copies = destination.copies_from(base) and manifest.extents is None
        self.links = not copies and destination.links_from(base)
        """True if images share files of the base, so that their places in files depend on what
        this process finds there."""
        self._extents: dict[int, Extents] = {}
        self._is_over = False
        self.borrowed_nbytes = 0
        self.why_whole = ""
        """Why bytes were sent that the base may have; "" if there is no reason."""

    async def image(self, image: int) -> LentImage | None:
        """Return the base of an image; None if it borrows nothing. Raises DamagedError and
        StorageError only for the source."""
        if self._is_over:
            return None
        m = self._source.manifest
        rank = int(m.images.rank[image])
        layout = _layout(m, image)
        base, manifest = self._base, self._manifest
        found: BaseImage | None
        try:
            if self.links:
                found = await linked_image(base, manifest.attempt, rank, layout, LIMITS, manifest)
            else:
                key = image_key(manifest.attempt, rank)
                found = await copied_image(self._destination, base, key, layout)
        except HoldfastError as error:
            self._end(str(error))
            return None
        if found is None:
            self._say("it has another layout, or its images cannot be copied in parts")
            return None
        starts = [chunk.start for chunk in chunks_of(m, image)]
        pages = await self._source.read_pages(image, starts)
        return LentImage(found, {start: pages[image, start] for start in starts})

    async def copy(self, upload: Upload, lent: LentImage, start: int, stop: int) -> bool:
        """Copy bytes of the base, and return whether that worked. It may have been deleted."""
        try:
            await upload.copy(start, self._base, lent.base.key, start, stop - start)
        except HoldfastError as error:
            self._end(str(error))
            return False
        self.borrowed_nbytes += stop - start
        return True

    def committed(self, image: int, upload: Upload) -> None:
        """Note where the blocks of an image lie."""
        if isinstance(upload, LinkedUpload) and upload.extents is not None:
            self._extents[image] = upload.extents
            if upload.why_whole:
                self._say(upload.why_whole)

    def placed(self, copy: Manifest) -> Manifest:
        """Return the manifest of the ``copy`` with the places of its blocks."""
        increments = self._manifest.increments + 1
        if not self._extents:
            return replace(copy, increments=increments)
        parts = [
            self._extents.get(image) or _own_extents(copy, image)
            for image in range(len(copy.images))
        ]
        return replace(copy, increments=increments, extents=Extents.joined(parts))

    def _end(self, why: str) -> None:
        """Borrow nothing more."""
        self._is_over = True
        self._say(why)

    def _say(self, why: str) -> None:
        if not self.why_whole:
            self.why_whole = why
            _log.warning("bytes that %s may have are sent: %s", self._base.uri, why)


def _layout(m: Manifest, image: int) -> ImageLayout:
    """Return the layout of an image, without its shards."""
    end = int(m.images.hashed_nbytes[image])
    nbytes = int(m.images.nbytes(m.block_nbytes)[image])
    none = np.empty(0, np.int64)
    return ImageLayout(b"", none, none, end, end, nbytes, m.chunk_nbytes, m.block_nbytes)


def _own_extents(m: Manifest, image: int) -> Extents:
    """Return the extents of an image that is a file of its own."""
    rank, hashed_nbytes = int(m.images.rank[image]), int(m.images.hashed_nbytes[image])
    table = ImageTable.of(rank, hashed_nbytes, np.empty((1, DIGEST_NBYTES), np.uint8))
    return Extents.of_images(table, m.chunk_nbytes, m.block_nbytes)
