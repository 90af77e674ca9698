"""Presents the images of a checkpoint that shares files with earlier ones.

Readers of images need not know about files.
"""

from __future__ import annotations

import asyncio

from ...core.aio import all_or_none
from ...drivers.contract import Buffer, Driver, TakePiece, Traits
from ...drivers.layers.layer import Layer
from ...errors import DamagedError, NotFoundError, UsageError
from ..format.extents import FileRange
from ..format.manifest import Manifest
from ..format.packed import checked_compression
from .unpacking import Unpacked, copying


def image_driver(driver: Driver, manifest: Manifest) -> Driver:
    """Return the driver for reading images: ``driver`` itself if each of them is a file.

    Raises UsageError if they are compressed and lz4 is not installed, or patches.
    """
    if manifest.is_patched:
        raise UsageError(
            "this is a version of a weight channel, stored as a patch of an earlier one",
            uri=driver.uri,
            advice="Follow the channel with holdfast.subscribe, or copy a version out of it with "
            "holdfast weights pull.",
        )
    if manifest.extents is not None:
        return Mapped(driver, manifest)
    if manifest.compression is None:
        return driver
    checked_compression(manifest.compression)
    return Unpacked(driver, manifest)


class Mapped(Layer):
    """Reads ranges of images from ranges of files; passes everything else to the inner driver.

    The ranges of a read are read concurrently. Raises DamagedError, with the file's key and the
    reason, if a file is missing or too short.
    """

    def __init__(self, inner: Driver, manifest: Manifest) -> None:
        super().__init__(inner)
        self._m = manifest
        self._image = {manifest.image_key(image): image for image in range(len(manifest.images))}
        self._nbytes: list[int] = manifest.images.nbytes(manifest.block_nbytes).tolist()
        self._turns = asyncio.Semaphore(inner.traits.concurrency)

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Traits of the inner driver, without pieces and without memory to hand over."""
        return copying(self.inner.traits)

    async def read(self, key: str, start: int, into: Buffer) -> None:
        image = self._image[key]
        stop = start + len(into)
        if not 0 <= start <= stop <= self._nbytes[image]:
            raise DamagedError("are beyond the end of the image", uri=self.uri, key=key)
        parts = self._m.file_ranges(image, start, stop)
        if len(parts) == 1:
            await self._read_part(parts[0], into)
            return
        ends = [part.image_start - start + part.nbytes for part in parts]
        views = [into[end - part.nbytes : end] for part, end in zip(parts, ends, strict=True)]
        await all_or_none(map(self._read_part, parts, views))

    async def _read_part(self, part: FileRange, into: Buffer) -> None:
        key = self._m.files[part.file].key
        async with self._turns:
            try:
                await self.inner.read(key, part.start, into)
            except DamagedError as error:
                what = "are beyond the end of the file"
                raise DamagedError(what, uri=self.uri, key=key) from error
            except NotFoundError as error:
                what = "are lost with their whole file"
                raise DamagedError(what, uri=self.uri, key=key) from error

    async def fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        return await Driver.fetch(self, key, start, nbytes)

    async def read_pieces(self, key: str, start: int, nbytes: int, take: TakePiece) -> None:
        await Driver.read_pieces(self, key, start, nbytes, take)
