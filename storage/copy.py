"""Copying committed checkpoints from any storage to any other: verified on the way, atomic at the destination, resumable.

The destination gets an attempt of its own (``commit.begin_copy``), the images under its name, and then the manifest, with
nothing changed but the attempt. So a copy of a copy is the same checkpoint still.

Scope: whole checkpoints. Nothing is re-laid out, merged or converted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..drivers.contract import Driver
from ..errors import (
    CheckpointError,
    DamagedError,
    ExistsError,
    NotACheckpointError,
    NotFoundError,
    ReplacedError,
    SaveError,
)
from .commit import abandon, begin_copy, commit, delete_attempt, settle, still_there
from .committed import read_manifest
from .format.digest import digest
from .format.manifest import MANIFEST_KEY, Manifest
from .image_copier import ImageCopier
from .pipeline.engine import offload, run
from .pipeline.executor import at_most
from .pipeline.image_reader import ImageReader
from .pipeline.unpacked import images_of
from .place import Place
from .reader import manifest_keys
from .verify import verify_images

__all__ = ["CopiedCheckpoint", "CopyReport", "Orders", "Pair", "Progress", "copy", "copy_checkpoint"]

BUDGET_NBYTES = 512 << 20
_LOOKS = 8
"""Pairs of manifests that are read at a time."""

Progress = Callable[[int, int], None]
"""Told on another thread, now and then: the bytes that are at the destination, and those that there will be."""
UriLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class CopiedCheckpoint:
    """One checkpoint of a copy. ``path`` is relative to both URIs; ``nbytes`` are those of its ``files`` images.

    ``sent_nbytes`` of them were sent now; the rest was there: of an earlier copy that did not come to its end, or, where
    nothing was sent, because it is the same checkpoint already. ``problem`` says why it was not copied.
    """

    path: str
    step: int | None
    files: int
    nbytes: int
    sent_nbytes: int
    seconds: float
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What was copied from ``source`` to ``uri``, both redacted."""

    source: str
    uri: str
    checkpoints: tuple[CopiedCheckpoint, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether all of them are at the destination now."""
        return all(c.problem is None for c in self.checkpoints)

    @property
    def nbytes(self) -> int:
        """Bytes of images, those included that had been there before."""
        return sum(c.nbytes for c in self.checkpoints)

    @property
    def sent_nbytes(self) -> int:
        """Bytes of images that were sent."""
        return sum(c.sent_nbytes for c in self.checkpoints)


def copy(
    src: UriLike,
    dst: UriLike,
    *,
    overwrite: bool = False,
    recursive: bool = False,
    budget_nbytes: int = BUDGET_NBYTES,
    src_options: Mapping[str, object] | None = None,
    dst_options: Mapping[str, object] | None = None,
    progress: Progress = lambda done, total: None,
) -> CopyReport:
    """Copy the checkpoint ``src`` to the URI ``dst``; with ``recursive``, each checkpoint at and below ``src`` to the
    same path below ``dst``. Return when all are committed there.

    Every byte is verified on its way. Atomic: ``dst`` has the whole checkpoint, or what it had before. Interrupted, it
    goes on where it stopped when it is called again: images that are whole at the destination are not sent again. Extra
    host memory stays within ``budget_nbytes``.

    A checkpoint that is the same already is left alone, with ``overwrite`` only if every byte of it is whole. Raises
    ExistsError where another one is, unless ``overwrite``, before any data is read. Raises NotACheckpointError,
    UnsupportedFormatError, StorageError, ReplacedError, SupersededError where a save to ``dst`` comes between; and
    DamagedError for a damaged source, with file, bytes and tensors. With ``recursive`` a damaged checkpoint keeps no
    other from being copied: it is a ``problem`` of the report.
    """
    began_s = time.perf_counter()
    source, target = Place.of(src, src_options), Place.of(dst, dst_options)
    copied = run(_copy(source, target, Orders(overwrite, budget_nbytes), recursive, progress))
    return CopyReport(source.uri.redacted, target.uri.redacted, tuple(copied), time.perf_counter() - began_s)


@dataclass(frozen=True, slots=True)
class Orders:
    """How to copy; see :func:`copy`."""

    overwrite: bool
    budget_nbytes: int


@dataclass(frozen=True, slots=True)
class Pair:
    """A checkpoint to be copied, and, if it is there already, the same one at the destination."""

    manifest: Manifest
    identity: str
    same: Manifest | None

    @property
    def nbytes(self) -> int:
        """Bytes of all images, as they are stored."""
        return int(self.manifest.images.file_nbytes(self.manifest.block_nbytes).sum())


async def _copy(
    source: Place, target: Place, orders: Orders, recursive: bool, progress: Progress
) -> list[CopiedCheckpoint]:
    paths = await _paths(source, recursive=recursive)
    looked = await _look_at_all(source, target, paths, orders, recursive)
    total_nbytes, done_nbytes = sum(c.nbytes for c in looked), 0

    def sent(nbytes: int) -> None:
        nonlocal done_nbytes
        done_nbytes += nbytes
        progress(done_nbytes, total_nbytes)

    copied = []
    for known in looked:
        try:
            done = known if known.problem else await _copy_path(source, target, known, orders, sent)
        except CheckpointError as error:
            if not recursive:
                raise
            done = replace(known, problem=str(error))
        copied.append(done)
    return copied


async def _paths(source: Place, *, recursive: bool) -> list[str]:
    """The paths of the checkpoints that are meant."""
    if not recursive:
        return [""]
    async with source.opened() as driver:
        paths = [key.rpartition("/")[0] for key in await manifest_keys(driver)]
    if not paths:
        raise NotACheckpointError("no checkpoint is committed at or below it", uri=source.uri.redacted)
    return paths


async def _look_at_all(
    source: Place, target: Place, paths: Sequence[str], orders: Orders, recursive: bool
) -> list[CopiedCheckpoint]:
    """What is to be copied, in order of steps; nothing of it is sent yet. Manifests are not kept: there may be many."""
    looked: list[CopiedCheckpoint] = []

    async def look(path: str) -> None:
        try:
            async with source.opened(path) as theirs, target.opened(path) as ours:
                pair = await _look(theirs, ours, orders)
        except CheckpointError as error:
            if not recursive:
                raise
            looked.append(CopiedCheckpoint(path, None, 0, 0, 0, 0.0, str(error)))
        else:
            m = pair.manifest
            looked.append(CopiedCheckpoint(path, m.step, len(m.images), pair.nbytes, 0, 0.0))

    await at_most(_LOOKS, map(look, paths))
    return sorted(looked, key=lambda c: (c.step is None, c.step or 0, c.path))


async def _copy_path(
    source: Place, target: Place, known: CopiedCheckpoint, orders: Orders, sent: Callable[[int], None]
) -> CopiedCheckpoint:
    began_s = time.perf_counter()
    async with source.opened(known.path) as theirs, target.opened(known.path) as ours:
        pair, sent_nbytes = await copy_checkpoint(theirs, ours, orders, sent)
    m, seconds = pair.manifest, time.perf_counter() - began_s
    return CopiedCheckpoint(known.path, m.step, len(m.images), pair.nbytes, sent_nbytes, seconds)


async def copy_checkpoint(
    theirs: Driver, ours: Driver, orders: Orders, sent: Callable[[int], None] = lambda nbytes: None
) -> tuple[Pair, int]:
    """Copy what is committed at the root of one driver to that of another; return how many bytes were sent. ``sent``
    hears of bytes that are at the destination, also of those that have been there before. Raises as :func:`copy`."""
    pair = await _look(theirs, ours, orders)
    if await _is_there(ours, pair, orders):
        sent(pair.nbytes)
        return pair, 0
    return pair, await _send(theirs, ours, pair, orders, sent)


async def _look(theirs: Driver, ours: Driver, orders: Orders) -> Pair:
    """Raises ExistsError where the destination has another checkpoint that may not be replaced."""
    manifest, _ = await read_manifest(theirs)
    identity = await offload(_identity, manifest)
    return Pair(manifest, identity, await _same(ours, identity, orders))


async def _same(ours: Driver, identity: str, orders: Orders) -> Manifest | None:
    try:
        there, _ = await read_manifest(ours)
    except NotACheckpointError:
        return None
    except DamagedError:
        there = None
    if there is not None and await offload(_identity, there) == identity:
        return there
    if orders.overwrite:
        return None
    raise ExistsError(
        "another checkpoint is there" if there else "a damaged checkpoint is there",
        uri=ours.uri,
        key=MANIFEST_KEY,
        advice="Copy to another URI, or replace it (overwrite).",
    )


def _identity(manifest: Manifest) -> str:
    """What all copies of a checkpoint have in common, as a digest: the manifest, but for the name of the attempt."""
    return digest(replace(manifest, attempt="").encode()).hex()


async def _is_there(ours: Driver, pair: Pair, orders: Orders) -> bool:
    """Whether nothing is to be done. Who asks to overwrite wants what is damaged to be mended."""
    if pair.same is None or not orders.overwrite:
        return pair.same is not None
    images = images_of(ours, pair.same)
    return (await verify_images(images, pair.same, orders.budget_nbytes, lambda done, total: None)).ok


async def _send(theirs: Driver, ours: Driver, pair: Pair, orders: Orders, sent: Callable[[int], None]) -> int:
    """Send what is missing, and commit; return how many bytes were sent."""
    attempt, resumed = await begin_copy(ours, pair.identity)
    reader = ImageReader(images_of(theirs, pair.manifest), pair.manifest, orders.budget_nbytes)
    copier = ImageCopier(reader, ours, attempt.id, orders.budget_nbytes, sent)
    try:
        whole = await copier.whole() if resumed else []
        there_nbytes = sum(copier.sizes[i] for i in whole)
        sent(there_nbytes)
        await copier.run([i for i in range(len(copier.sizes)) if i not in whole])
        sent_nbytes = sum(copier.sizes) - there_nbytes
        if pair.same is None and await _same(ours, pair.identity, orders) is not None:
            await abandon(ours, attempt)  # it took hours, and another copy was faster
            return sent_nbytes
        obsolete = await commit(ours, attempt, copier.target)
    except DamagedError as error:
        await abandon(ours, attempt)
        if (await read_manifest(theirs))[0].attempt != pair.manifest.attempt:
            raise ReplacedError("a save has replaced it while it was copied", uri=theirs.uri) from error
        raise
    except (NotFoundError, SaveError):
        try:
            await still_there(ours, attempt)  # whoever deletes what we are writing has overtaken us: that is to be said
        finally:
            await abandon(ours, attempt)
        raise
    if ours.traits.exclusive_is_atomic:  # else another copy may have claimed it, too, and be about to put its manifest
        await settle(ours, attempt)
    if obsolete is not None:
        await delete_attempt(ours, obsolete)
    return sent_nbytes
