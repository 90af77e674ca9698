"""Presents a generation in memory as a read-only driver, so that all code which reads checkpoints
can read from the memory of this host and of others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from ...drivers.contract import (
    Buffer,
    Driver,
    ObjectInfo,
    ReadOnly,
    TakePiece,
    Traits,
    check_key,
    check_small,
)
from ...drivers.options import Option
from ...drivers.pieces import Rooms, piece_ends
from ...errors import DamagedError, NotFoundError, StorageError
from ..arenas.label import Label
from ..arenas.memory import Memory
from ..format.fragment import join
from ..format.manifest import MANIFEST_KEY
from ..format.merge import merge
from ..runtime.engine import offload

PIECE_NBYTES = 4 << 20
"""Size of a piece of this host's memory. Larger pieces leave the CPU cache, and the threads that
verify smaller ones spend more time waiting for the GIL."""


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
        peers = [image.driver.traits for image in images if isinstance(image, PeerImage)]
        self._piece_nbytes = min((traits.piece_nbytes for traits in peers), default=PIECE_NBYTES)
        self._rooms = Rooms(self._piece_nbytes)
        self.traits = Traits(
            part_nbytes=16 << 20,
            part_min_nbytes=1,
            align_nbytes=1,
            concurrency=8,
            coalesce_nbytes=0,
            part_order="any",
            exclusive_is_atomic=False,
            shared=False,
            piece_nbytes=self._piece_nbytes,
        )
        self._manifest = manifest
        self._images = {image.label.key: image for image in images if image.label.digests}
        self._created_s = min(image.label.created_s for image in images)
        self._closed = False
        self.own_nbytes = 0
        self.peer_nbytes = 0

    async def read(self, key: str, start: int, into: Buffer) -> None:
        content = self._content(key, start, len(into))
        if isinstance(content, PeerImage):
            with self._reading(key, content, len(into)) as peers_key:
                await content.driver.read(peers_key, start, into)
            return
        if isinstance(content, LocalImage):
            await offload(content.memory.read, start, into)
        else:
            into[:] = content[start : start + len(into)]
        self.own_nbytes += len(into)

    async def read_pieces(self, key: str, start: int, nbytes: int, take: TakePiece) -> None:
        """See :meth:`Driver.read_pieces`. A piece of this host's memory is a copy in the CPU cache,
        read through the descriptor: verifying and copying it from the mapping would take a page
        table entry for each page, and read main memory twice."""
        content = self._content(key, start, nbytes)
        if isinstance(content, PeerImage):
            with self._reading(key, content, nbytes) as peers_key:
                await content.driver.read_pieces(peers_key, start, nbytes, take)
        elif isinstance(content, LocalImage) and self._piece_nbytes:
            await offload(self._take_pieces, content.memory, start, nbytes, take)
            self.own_nbytes += nbytes
        else:
            await super().read_pieces(key, start, nbytes, take)

    def _take_pieces(self, memory: Memory, start: int, nbytes: int, take: TakePiece) -> None:
        with self._rooms.room() as room:
            for begin, end in pairwise(piece_ends(start, nbytes, self._piece_nbytes)):
                piece = memoryview(room)[: end - begin]
                memory.read(begin, piece)
                take(piece)

    @contextmanager
    def _reading(self, key: str, image: PeerImage, nbytes: int) -> Iterator[str]:
        """Yield the key of a peer's image there, and count the bytes read from it. Raises
        DamagedError if the peer cannot provide them."""
        try:
            yield f"{image.label.rank}.safetensors"
        except (DamagedError, StorageError) as error:
            # Use the image's key, so that the caller knows which image to exclude.
            text = f"the keeper {image.name} cannot provide it: {error}"
            raise DamagedError(text, uri=self.uri, key=key) from error
        self.peer_nbytes += nbytes

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

    def _content(
        self, key: str, start: int = 0, nbytes: int = 0
    ) -> memoryview | LocalImage | PeerImage:
        """Return an object. Raises DamagedError if it lacks bytes of the range."""
        check_key(key, uri=self.uri)
        if self._closed:
            raise StorageError("the driver is closed", uri=self.uri, key=key)
        content: memoryview | LocalImage | PeerImage
        if key == MANIFEST_KEY:
            content = memoryview(self._manifest)
        else:
            try:
                content = self._images[key]
            except KeyError as error:
                raise NotFoundError("no such image in memory", uri=self.uri, key=key) from error
        end = _nbytes(content)
        if not 0 <= start <= start + nbytes <= end:
            text = f"object ends at byte {end}, before {start + nbytes}"
            raise DamagedError(text, uri=self.uri, key=key)
        return content


def _nbytes(content: memoryview | LocalImage | PeerImage) -> int:
    if isinstance(content, LocalImage):
        return content.memory.nbytes
    return content.label.nbytes if isinstance(content, PeerImage) else len(content)
