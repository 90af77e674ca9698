"""A subscriber's copy of the chunks of images that it reads, brought from version to version.

Each chunk knows its version, so a version looks like a whole checkpoint in memory: reading a chunk
first applies the missing patches. A reader verifies every block against the manifest of the
version, as in any other load.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ...core.units import ceil_div
from ...drivers.contract import Buffer, Driver, ObjectInfo, ReadOnly, Traits, check_key
from ...errors import DamagedError, NotFoundError, UsageError
from ...planner.image import DIGEST_NBYTES
from ..format.chunks import Chunk, chunks_of, damaged
from ..format.digest import digest, page_of
from ..format.manifest import MANIFEST_KEY, PATCH, Manifest, image_key
from ..format.patches import (
    PatchIndex,
    VersionRef,
    apply_patch,
    changed_nbytes,
    patch_head_nbytes,
    patch_index_nbytes,
)
from ..pipeline.image_reader import NOT_WHAT_WAS_WRITTEN
from ..runtime.buffers import memory_for
from ..runtime.engine import CPU_THREADS, offload
from ..runtime.executor import Pipeline, Stage
from ..runtime.scheduler import Budget
from .channel import read_version, version_key

_PATCHES_MAX = 16
"""Most patches that a subscriber applies one after the other, instead of reading an anchor."""
_MANIFESTS_KEPT = 2 * _PATCHES_MAX


@dataclass(eq=False)
class _Held:
    """A chunk in memory. ``attempt``: of its version, "" while it changes; ``page``: digests of its
    blocks once it is verified as a whole."""

    memory: bytearray
    attempt: str = ""
    page: bytes = b""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True, eq=False)
class Version:
    """A version of the channel: its manifest, and the same as it would be if stored whole."""

    sequence: int
    manifest: Manifest
    whole: Manifest

    @property
    def ref(self) -> VersionRef:
        """The version, as patches of it name it."""
        return VersionRef(self.sequence, self.manifest.attempt)


@dataclass(frozen=True, slots=True)
class _Step:
    """One step to a version: read its chunks whole, or apply patches to their base."""

    version: Version
    base: Literal["none", "previous", "anchor"]


@dataclass(frozen=True, slots=True)
class Patched:
    """The patches of an image in a file of ``file_nbytes``. They change ``changed_nbytes``."""

    file_nbytes: int
    changed_nbytes: int


class Mirror:
    """Chunks in host memory, of one or several versions. ``received_nbytes``: bytes read from the
    channel; ``anchored``: number of chunks that were read whole. ``held_max``: number of chunks to
    keep, by default all."""

    def __init__(self, driver: Driver, held_max: int | None = None) -> None:
        self._driver = driver
        self._held_max = held_max
        self._held: dict[tuple[int, int], _Held] = {}
        self._versions: dict[VersionRef, Version] = {}
        self._indexes: dict[tuple[str, int], asyncio.Task[PatchIndex]] = {}
        self._current: Version | None = None
        self.received_nbytes = 0
        self.anchored = 0
        self.files: set[str] = set()
        """Keys of the files that the current update has read."""

    async def version(self, sequence: int, attempt: str = "") -> Version:
        """Return a version, or the one with this attempt. Raises NotFoundError if it is
        deleted."""
        known = self._versions.get(VersionRef(sequence, attempt))
        if known is not None:
            return known
        manifest, data = await read_version(self._driver, sequence)
        self.received_nbytes += len(data)
        if attempt and manifest.attempt != attempt:
            raise NotFoundError(
                f"version {attempt} is gone",
                uri=self._driver.uri,
                key=version_key(sequence, MANIFEST_KEY),
            )
        found = Version(sequence, manifest, manifest.whole)
        self._versions[found.ref] = found
        while len(self._versions) > _MANIFESTS_KEPT:
            del self._versions[next(iter(self._versions))]
        return found

    def at(self, version: Version) -> VersionDriver:
        """Return a driver that reads ``version``. Earlier drivers read no more."""
        self._indexes.clear()
        self.files.clear()
        self._current = version
        return VersionDriver(self, version)

    async def fetch(self, version: Version, progress: Callable[[], None]) -> None:
        """Bring all chunks to ``version`` and verify them. Raises DamagedError."""
        self.at(version)
        m = version.whole
        chunks = [chunk for image in range(len(m.images)) for chunk in chunks_of(m, image)]

        def damage(chunk: Chunk, what: str, key: str | None = None) -> DamagedError:
            uri = self._driver.uri
            return damaged(m, uri, chunk.image, chunk.start, chunk.stop, what, key or "")

        async def read(chunk: Chunk) -> None:
            try:
                await self.chunk(version, chunk.image, chunk.start // m.chunk_nbytes)
            except DamagedError as error:
                raise damage(chunk, error.message, error.key) from error

        async def verify(chunk: Chunk) -> None:
            data = await self.chunk(version, chunk.image, chunk.start // m.chunk_nbytes)
            page = await offload(page_of, data, m.block_nbytes)
            if digest(page) != chunk.digest:
                raise damage(chunk, NOT_WHAT_WAS_WRITTEN)
            rank = int(m.images.rank[chunk.image])
            self._held[rank, chunk.start // m.chunk_nbytes].page = page
            progress()

        lanes = {"io": self._driver.traits.concurrency, "cpu": CPU_THREADS}
        stages = [Stage("read", "io", read), Stage("verify", "cpu", verify)]
        await Pipeline(stages, Budget(sum(lanes.values()), lanes)).run(chunks, [1] * len(chunks))

    def forget(self) -> None:
        """Drop all chunks, so that they are read from an anchor again."""
        self._held.clear()

    async def chunk(self, version: Version, image: int, chunk: int) -> memoryview:
        """Return the bytes of a chunk, which stay unchanged until an update to another version."""
        if version is not self._current:
            raise UsageError(
                "these weights are not in memory any more",
                advice="Use them before the next update.",
            )
        m = version.whole
        rank = int(m.images.rank[image])
        held = self._held.get((rank, chunk))
        start = chunk * m.chunk_nbytes
        nbytes = min(start + m.chunk_nbytes, int(m.images.hashed_nbytes[image])) - start
        if held is None or len(held.memory) != nbytes:
            with memory_for(f"{nbytes:,} bytes of weights"):
                held = self._held[rank, chunk] = _Held(bytearray(nbytes))
        while self._held_max is not None and len(self._held) > self._held_max:
            del self._held[next(iter(self._held))]
        async with held.turn:
            for step in await self._steps(version, held.attempt):
                held.attempt = ""
                held.page = b""
                await self._apply(step, image, chunk, memoryview(held.memory))
                held.attempt = step.version.manifest.attempt
        return memoryview(held.memory)

    async def pages(self, version: Version, image: int, start: int, into: Buffer) -> None:
        """Fill ``into`` with digests of an image's blocks, from byte ``start`` of them all. After
        :meth:`fetch` they are in memory: the version may be deleted while it is in use."""
        m = version.manifest
        rank = int(m.images.rank[image])
        page_nbytes = m.chunk_nbytes // m.block_nbytes * DIGEST_NBYTES
        first = start // page_nbytes
        held = [
            self._held.get((rank, chunk))
            for chunk in range(first, ceil_div(start + len(into), page_nbytes))
        ]
        verified = [one.page for one in held if one is not None and one.attempt == m.attempt]
        if len(verified) == len(held) and all(verified):
            begin = start - first * page_nbytes
            into[:] = b"".join(verified)[begin : begin + len(into)]
            return
        await self.read(version, m.image_key(image), _pages_start(m, image) + start, into)

    async def _steps(self, version: Version, attempt: str) -> list[_Step]:
        """Return the steps from the version ``attempt`` ("": none) to ``version``: patches if few
        lead there, else the anchor and its patches."""
        if attempt:
            steps = await self._patches_from(version, attempt)
            if steps is not None:
                return steps
        return await self._steps_from_anchor(version, attempt)

    async def _patches_from(self, version: Version, attempt: str) -> list[_Step] | None:
        steps: list[_Step] = []
        here = version
        while here.manifest.attempt != attempt:
            bases = here.manifest.bases
            if bases is None or len(steps) == _PATCHES_MAX:
                return None
            if bases.to_anchor and bases.anchor.attempt == attempt:
                steps.append(_Step(here, "anchor"))
                break
            steps.append(_Step(here, "previous"))
            try:
                here = await self.version(bases.previous.sequence, bases.previous.attempt)
            except NotFoundError:
                if bases.previous.attempt != attempt:
                    return None
                break  # the base itself is needed no more
        return steps[::-1]

    async def _steps_from_anchor(self, version: Version, attempt: str) -> list[_Step]:
        steps: list[_Step] = []
        here = version
        while here.manifest.attempt != attempt:
            bases = here.manifest.bases
            if bases is None or bases.whole:
                steps.append(_Step(here, "none"))
                break
            ref = bases.anchor if bases.to_anchor else bases.previous
            steps.append(_Step(here, "anchor" if bases.to_anchor else "previous"))
            here = await self.version(ref.sequence, ref.attempt)
        return steps[::-1]

    async def _apply(self, step: _Step, image: int, chunk: int, into: memoryview) -> None:
        version = step.version
        m = version.manifest
        if step.base == "none":
            self.anchored += 1
            await self.read(version, m.image_key(image), chunk * m.chunk_nbytes, into)
            return
        key = _patch_key(m, image)
        index = await self._index(version, image)
        sizes = index.sizes[chunk].tolist()
        start = int(index.starts[chunk])
        if sizes[0] == len(into):
            await self.read(version, key, start, into)
            return
        column = int(step.base == "anchor")
        patch = memoryview(bytearray(sizes[column]))
        await self.read(version, key, start + sum(sizes[:column]), patch)
        differences = step.base == "previous"
        try:
            await offload(_applied, patch, into, m.block_nbytes, differences)
        except ValueError as error:
            raise DamagedError(
                f"need a patch that cannot be applied: {error}",
                uri=self._driver.uri,
                key=version_key(version.sequence, key),
            ) from error

    async def patched(self, version: Version, image: int) -> Patched:
        """Return the size and effect of an image's patches against the version before. Reads the
        heads of the patches. Raises DamagedError."""
        m = version.manifest
        key = _patch_key(m, image)
        index = await self._index(version, image)
        nbytes = int(m.images.hashed_nbytes[image])
        changed = 0
        for chunk, size in enumerate(index.sizes[:, 0].tolist()):
            chunk_nbytes = min(m.chunk_nbytes, nbytes - chunk * m.chunk_nbytes)
            if size == chunk_nbytes:
                changed += chunk_nbytes
            elif size:
                head = memoryview(bytearray(patch_head_nbytes(chunk_nbytes, m.block_nbytes)))
                await self.read(version, key, int(index.starts[chunk]), head)
                changed += changed_nbytes(head, chunk_nbytes, m.block_nbytes)
        file_nbytes = int(index.starts[-1]) + _index_nbytes(m, image) + _pages_nbytes(m, image)
        return Patched(file_nbytes, changed)

    async def _index(self, version: Version, image: int) -> PatchIndex:
        """Return the places of an image's patches. Several chunks wait for one read."""
        key = (version.manifest.attempt, image)
        if key not in self._indexes:
            self._indexes[key] = asyncio.ensure_future(self._read_index(version, image))
        return await asyncio.shield(self._indexes[key])

    async def _read_index(self, version: Version, image: int) -> PatchIndex:
        m = version.manifest
        assert m.bases is not None
        key = _patch_key(m, image)
        if m.bases.whole:
            info = await self._driver.stat(version_key(version.sequence, key))
            file_nbytes = info.nbytes
        else:
            file_nbytes = int(m.images.file_nbytes(m.block_nbytes)[image])
        nbytes = _index_nbytes(m, image)
        data = memoryview(bytearray(nbytes))
        await self.read(version, key, file_nbytes - nbytes, data)
        chunks = ceil_div(int(m.images.hashed_nbytes[image]), m.chunk_nbytes)
        try:
            index = PatchIndex.decode(data, chunks, m.bases.count)
            if index.starts[-1] + nbytes + _pages_nbytes(m, image) != file_nbytes:
                raise ValueError("the sizes of patches do not add up to that of the file")
        except ValueError as error:
            raise DamagedError(
                f"need patches whose index is not what was written: {error}",
                uri=self._driver.uri,
                key=version_key(version.sequence, key),
            ) from error
        return index

    async def read(self, version: Version, key: str, start: int, into: Buffer) -> None:
        """Fill ``into`` with bytes of a version's file."""
        if not len(into):
            return
        file = version_key(version.sequence, key)
        self.files.add(file)
        await self._driver.read(file, start, into)
        self.received_nbytes += len(into)


def _applied(patch: memoryview, into: memoryview, block_nbytes: int, differences: bool) -> None:
    apply_patch(patch, into, block_nbytes, differences=differences)


def _index_nbytes(m: Manifest, image: int) -> int:
    assert m.bases is not None
    hashed_nbytes = int(m.images.hashed_nbytes[image])
    return int(patch_index_nbytes(hashed_nbytes, m.chunk_nbytes, m.bases.count))


def _pages_nbytes(m: Manifest, image: int) -> int:
    """Return the size of the digests of an image's blocks."""
    return DIGEST_NBYTES * ceil_div(int(m.images.hashed_nbytes[image]), m.block_nbytes)


def _pages_start(m: Manifest, image: int) -> int:
    """Return the file offset of the digests of an image's blocks."""
    if not m.is_patched:
        return int(m.images.hashed_nbytes[image])
    file_nbytes = int(m.images.file_nbytes(m.block_nbytes)[image])
    return file_nbytes - _index_nbytes(m, image) - _pages_nbytes(m, image)


def _patch_key(m: Manifest, image: int) -> str:
    return image_key(m.attempt, int(m.images.rank[image]), PATCH)


class VersionDriver(ReadOnly, Driver):
    """Reads one version as a whole checkpoint, from a :class:`Mirror`."""

    reading_only: ClassVar[str] = "a version of a weight channel cannot be changed"
    remote: ClassVar[bool] = False

    def __init__(self, mirror: Mirror, version: Version) -> None:
        self._mirror = mirror
        self._version = version
        self.uri = mirror._driver.uri
        m = version.whole
        self._images = {m.image_key(image): image for image in range(len(m.images))}
        inner = mirror._driver.traits
        self.traits = Traits(
            part_nbytes=m.chunk_nbytes,
            part_min_nbytes=1,
            align_nbytes=1,
            concurrency=inner.concurrency,
            coalesce_nbytes=0,
            part_order="any",
            exclusive_is_atomic=True,
            shared=False,
            hands_over=True,
        )

    async def fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        image = self._images[key]
        m = self._version.whole
        chunk, begin = divmod(start, m.chunk_nbytes)
        hashed_nbytes = int(m.images.hashed_nbytes[image])
        if start < hashed_nbytes and begin + nbytes <= m.chunk_nbytes:
            data = await self._mirror.chunk(self._version, image, chunk)
            if begin + nbytes <= len(data):
                return data[begin : begin + nbytes].toreadonly()
        return await Driver.fetch(self, key, start, nbytes)

    async def read(self, key: str, start: int, into: Buffer) -> None:
        image = self._images[key]
        m = self._version.whole
        hashed_nbytes = int(m.images.hashed_nbytes[image])
        position = start
        stop = start + len(into)
        while position < min(stop, hashed_nbytes):
            chunk, begin = divmod(position, m.chunk_nbytes)
            data = await self._mirror.chunk(self._version, image, chunk)
            end = min(len(data), begin + stop - position)
            into[position - start : position - start + end - begin] = data[begin:end]
            position += end - begin
        if position < stop:
            rest = into[position - start :]
            await self._mirror.pages(self._version, image, position - hashed_nbytes, rest)

    async def get(self, key: str) -> bytes:
        if key != MANIFEST_KEY:
            raise NotFoundError("a version has nothing else", uri=self.uri, key=key)
        return self._version.whole.encode()

    async def stat(self, key: str) -> ObjectInfo:
        check_key(key, uri=self.uri)
        image = self._images.get(key)
        if image is None:
            raise NotFoundError("a version has only images", uri=self.uri, key=key)
        m = self._version.whole
        return ObjectInfo(key, int(m.images.nbytes(m.block_nbytes)[image]), m.created_s)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        for _ in ():
            yield _

    async def close(self) -> None:
        """Do nothing: the mirror stays."""
