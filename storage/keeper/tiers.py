"""Presents a generation in memory as a read-only driver, so that all code which reads checkpoints
can read from the memory of this host and of others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...drivers.contract import (
    Buffer,
    Driver,
    ObjectInfo,
    ReadOnly,
    Traits,
    check_key,
    check_small,
)
from ...drivers.options import Option
from ...errors import DamagedError, NotFoundError, StorageError
from ..arenas.label import Label
from ..arenas.memory import Memory
from ..format.fragment import join
from ..format.manifest import MANIFEST_KEY
from ..format.merge import merge
from ..runtime.engine import offload

READ_NBYTES = 64 << 20
"""Read size at which the C library bypasses the CPU cache."""


@dataclass(frozen=True, eq=False)
class LocalImage:
    """An image in memory, and its label."""

    label: Label
    memory: Memory


@dataclass(frozen=True, eq=False)
class PeerImage:
    """An image in the memory of another host, below ``driver``, and its label. ``name``: the keeper
    that holds it."""

    label: Label
    driver: Driver
    name: str


def manifest_of(labels: Sequence[Label]) -> bytes:
    """Return the manifest of a generation, given the labels of all ranks. The result is the same on
    every host. Raises DamagedError, CoverageError or SaveError if they do not form a checkpoint."""
    in_order = sorted(labels, key=lambda label: label.rank)
    return merge([join([label.fragment() for label in in_order])]).encode()


class TiersDriver(ReadOnly, Driver):
    """The images of one generation, and their manifest. ``own_nbytes`` and ``peer_nbytes`` count
    the bytes read from this host and from others."""

    reading_only: ClassVar[str] = "a checkpoint in memory is read-only"
    remote: ClassVar[bool] = False
    OPTIONS: ClassVar[Mapping[str, Option]] = {}

    def __init__(self, uri: str, manifest: bytes, images: Sequence[LocalImage | PeerImage]) -> None:
        """Create the driver. ``uri``: named in errors."""
        self.uri = uri
        is_all_here = all(isinstance(image, LocalImage) for image in images)
        self.traits = Traits(
            part_nbytes=16 << 20,
            part_min_nbytes=1,
            align_nbytes=1,
            concurrency=8,
            coalesce_nbytes=0,
            part_order="any",
            exclusive_is_atomic=False,
            shared=False,
            hands_over=True,
            # Reading from another host allocates memory.
            read_nbytes=READ_NBYTES if is_all_here else 0,
        )
        self._manifest = manifest
        self._images = {image.label.key: image for image in images if image.label.digests}
        self._created_s = min(image.label.created_s for image in images)
        self._closed = False
        self.own_nbytes = 0
        self.peer_nbytes = 0

    async def read(self, key: str, start: int, into: Buffer) -> None:
        content = self._content(key)
        _check_range(content, start, len(into), self.uri, key)
        if isinstance(content, PeerImage):
            try:
                await content.driver.read(f"{content.label.rank}.safetensors", start, into)
            except (DamagedError, StorageError) as error:
                # Use the image's key, so that the caller knows which image to exclude.
                text = f"the keeper {content.name} cannot provide it: {error}"
                raise DamagedError(text, uri=self.uri, key=key) from error
            self.peer_nbytes += len(into)
        else:
            into[:] = content[start : start + len(into)]
            self.own_nbytes += len(into)

    async def fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        content = self._content(key)
        _check_range(content, start, nbytes, self.uri, key)
        if isinstance(content, PeerImage):
            into = memoryview(bytearray(nbytes))
            await self.read(key, start, into)
            return into
        self.own_nbytes += nbytes
        image = self._images.get(key)
        if isinstance(image, LocalImage):
            # Otherwise the first reader of each page waits for it with the GIL held.
            await offload(image.memory.populate, start, start + nbytes)
        return content[start : start + nbytes]

    async def get(self, key: str) -> bytes:
        nbytes = _nbytes(self._content(key))
        check_small(nbytes, self.uri, key)
        data = bytearray(nbytes)
        await self.read(key, 0, memoryview(data))
        return bytes(data)

    async def stat(self, key: str) -> ObjectInfo:
        return ObjectInfo(key, _nbytes(self._content(key)), self._created_s)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        if prefix:
            check_key(prefix, uri=self.uri)
        for key in (MANIFEST_KEY, *self._images):
            if not prefix or key == prefix or key.startswith(prefix + "/"):
                yield await self.stat(key)

    async def close(self) -> None:
        self._closed = True
        self._images = {}

    def _content(self, key: str) -> memoryview | PeerImage:
        check_key(key, uri=self.uri)
        if self._closed:
            raise StorageError("the driver is closed", uri=self.uri, key=key)
        if key == MANIFEST_KEY:
            return memoryview(self._manifest)
        try:
            image = self._images[key]
        except KeyError as error:
            raise NotFoundError("no such image in memory", uri=self.uri, key=key) from error
        if isinstance(image, PeerImage):
            return image
        return image.memory.buffer(0, image.memory.nbytes).view


def _nbytes(content: memoryview | PeerImage) -> int:
    return content.label.nbytes if isinstance(content, PeerImage) else len(content)


def _check_range(
    content: memoryview | PeerImage, start: int, nbytes: int, uri: str, key: str
) -> None:
    end = _nbytes(content)
    if not 0 <= start <= start + nbytes <= end:
        raise DamagedError(f"object ends at byte {end}, before {start + nbytes}", uri=uri, key=key)
