"""Copies committed checkpoints between storages: verified, atomic at the destination, resumable.

The destination gets a new attempt (``commit.begin_copy``), the images under its name, and then the
manifest, in which only the attempt changes, and where blocks lie if images share files with a base.
So a copy of a copy still is the same checkpoint. The save's telemetry is copied unchanged if
possible. With ``image_nbytes``, new images with whole tensors are written instead, and the manifest
describes these.

Scope: whole checkpoints.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from ....core.aio import at_most
from ....drivers.contract import Driver
from ....errors import (
    CheckpointError,
    DamagedError,
    ExistsError,
    NotACheckpointError,
    NotFoundError,
    ReplacedError,
    SaveError,
    UsageError,
)
from ...format.digest import digest
from ...format.lineage import LINEAGE_KEY
from ...format.manifest import MANIFEST_KEY, Manifest
from ...pipeline.base import borrowable
from ...pipeline.image_copier import ImageCopier
from ...pipeline.image_reader import ImageReader
from ...pipeline.image_rewriter import ImageRewriter, NewImages, lay_out_whole, without_digests
from ...pipeline.lender import LIMITS, Lender
from ...pipeline.mapping import image_driver
from ...pipeline.verifier import verify_images
from ...protocol.attempt import Attempt, delete_attempt
from ...protocol.commit import abandon, abandon_failed, begin, begin_copy, commit, settle
from ...protocol.current import is_current, read_manifest
from ...protocol.telemetry import get_telemetry, put_telemetry
from ...runtime.engine import offload, run
from ...runtime.progress import ProgressCallback, ProgressReporter
from ..foreign_formats import explains
from ..location import Place, UriLike
from .listing import manifest_keys, read_lineage

_log = logging.getLogger(__name__)


BUDGET_NBYTES = 512 << 20
_LOOKS = 8
"""Pairs of manifests read at the same time."""


@dataclass(frozen=True, slots=True)
class CopiedCheckpoint:
    """One checkpoint of a copy, by its ``path`` relative to both URIs.

    ``nbytes``: size of its ``files`` images. ``sent_nbytes``: bytes sent now; the rest was already
    there, from an earlier, interrupted copy, or, if nothing was sent, because the destination has
    the same checkpoint. ``borrowed_nbytes``: bytes that the destination copied from its base, or
    that stay in files of the base.
    ``problem``: why it was not copied; nothing of it is then visible at the destination.
    ``why_whole``: why more bytes were sent than differ from the base; "" otherwise.
    """

    path: str
    step: int | None
    files: int
    nbytes: int
    sent_nbytes: int
    seconds: float
    problem: str | None = None
    borrowed_nbytes: int = 0
    why_whole: str = ""


@dataclass(frozen=True, slots=True)
class CopyReport:
    """Result of a copy from ``source`` to ``uri``, both redacted."""

    source: str
    uri: str
    checkpoints: tuple[CopiedCheckpoint, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """True if all checkpoints are now at the destination."""
        return all(c.problem is None for c in self.checkpoints)

    @property
    def nbytes(self) -> int:
        """Bytes of images that are now at the destination, including any already there before."""
        return sum(c.nbytes for c in self.copied)

    @property
    def sent_nbytes(self) -> int:
        """Bytes of images sent by this copy."""
        return sum(c.sent_nbytes for c in self.copied)

    @property
    def borrowed_nbytes(self) -> int:
        """Bytes of images that were borrowed from other checkpoints at the destination."""
        return sum(c.borrowed_nbytes for c in self.copied)

    @property
    def copied(self) -> tuple[CopiedCheckpoint, ...]:
        """The checkpoints that are now at the destination: copied, or already there before."""
        return tuple(c for c in self.checkpoints if c.problem is None)


@explains("src", "src_options")
def copy(
    src: UriLike,
    dst: UriLike,
    *,
    overwrite: bool = False,
    recursive: bool = False,
    image_nbytes: int | None = None,
    base: UriLike | None = None,
    budget_nbytes: int = BUDGET_NBYTES,
    src_options: Mapping[str, object] | None = None,
    dst_options: Mapping[str, object] | None = None,
    progress: ProgressCallback | None = None,
) -> CopyReport:
    """Copy the checkpoint ``src`` to ``dst``. Returns when it is committed there.

    With ``recursive``, copy each checkpoint at and below ``src`` to the same path below ``dst``,
    along with the lineage that records which are abandoned. If the storage of ``dst`` can copy or
    link, a checkpoint that was saved incrementally borrows from its predecessor in the same folder:
    bytes that checkpoints share are sent once.

    With ``image_nbytes``, rewrite the images for readers of large sequential files: tensors are
    whole, in the order of the state, in images of about ``image_nbytes``. Images are larger if
    there would be more of them than ranks that saved. Compressed images are unpacked. The state
    stays the same, with the values and tensors of each rank.

    With ``base``, a checkpoint on the storage of ``dst``, opened with ``dst_options``, the
    destination copies blocks from there that are equal, and only the others are read and sent.
    Where the storage has hard links but no copies, equal blocks stay in files that get a link
    (format version 3). Either way, the base may be deleted afterwards. With ``recursive``, the base
    of each later checkpoint is its predecessor in the same folder. If nothing can be borrowed,
    everything is sent, and the report says why: if the storage can neither copy nor link, the base
    is gone, a rank's image has another size, an image is compressed, every 50th time in a row, or
    with ``image_nbytes``.

    Every byte that is sent is verified. Atomic: ``dst`` has the complete new checkpoint or its
    previous contents. An interrupted copy resumes when called again: images already complete at the
    destination are not sent again, unless the checkpoint links files. Extra host memory stays
    within ``budget_nbytes``.

    A destination that already has the same checkpoint is left alone; with ``overwrite``, only if
    every byte of it is undamaged. With ``image_nbytes``, the same save in the same layout counts as
    the same checkpoint. ``src`` and ``dst`` may be the same place, which then needs ``overwrite``.
    Raises ExistsError, before reading any data, if it has another checkpoint, unless ``overwrite``.
    Raises NotACheckpointError, UnsupportedFormatError, StorageError and ReplacedError;
    SupersededError if a concurrent save to ``dst`` wins; DamagedError, with file, bytes and
    tensors, for a damaged source. With ``recursive``, a damaged checkpoint does not stop the
    others: it is reported as a ``problem``.

    ``progress(done_nbytes, total_nbytes)`` is called periodically on a separate thread, counting
    bytes at the destination. An exception from it aborts the copy.
    """
    began_s = time.perf_counter()
    if image_nbytes is not None and image_nbytes < 1:
        raise UsageError(f"image_nbytes is {image_nbytes:,}, and must be at least 1")
    source = Place.of(src, src_options)
    target = Place.of(dst, dst_options)
    orders = Orders(overwrite, budget_nbytes, image_nbytes, as_saved=base is None)
    lending = None if base is None else Place.of(base, dst_options)
    with ProgressReporter(progress) as reporter:
        copied = run(_copy(source, target, orders, recursive, reporter, lending))
    return CopyReport(
        source.uri.redacted, target.uri.redacted, tuple(copied), time.perf_counter() - began_s
    )


@explains("uri", "storage_options")
def compact(
    uri: UriLike,
    *,
    budget_nbytes: int = BUDGET_NBYTES,
    storage_options: Mapping[str, object] | None = None,
    progress: ProgressCallback | None = None,
) -> CopyReport:
    """Rewrite the checkpoint at ``uri``, in place, so that it shares no file with others.

    Its images become files of its own. A checkpoint that shares none is left alone, and nothing is
    sent. Otherwise like :func:`copy` onto itself: verified, atomic, resumed when called again.
    Other checkpoints keep the files that they share. Raises like :func:`copy`; ReplacedError or
    SupersededError if a save replaces the checkpoint meanwhile.
    """
    began_s = time.perf_counter()
    place = Place.of(uri, storage_options)
    orders = Orders(True, budget_nbytes, compact=True)
    with ProgressReporter(progress) as reporter:
        copied = run(_copy(place, place, orders, False, reporter, None))
    redacted = place.uri.redacted
    return CopyReport(redacted, redacted, tuple(copied), time.perf_counter() - began_s)


@dataclass(frozen=True, slots=True)
class Orders:
    """Options of a copy; see :func:`copy`. ``compact``: only replace images that share files.
    ``as_saved``: borrow only if the save did too."""

    overwrite: bool
    budget_nbytes: int
    image_nbytes: int | None = None
    compact: bool = False
    as_saved: bool = False


@dataclass(frozen=True, slots=True)
class Pair:
    """A checkpoint to copy, and its copy at the destination, if there is one.

    ``manifest``: of the source. ``new``: the images to write instead of the source's, if any.
    ``identity``: digest that all copies of the checkpoint with these images share. ``same``:
    manifest of the copy at the destination, whose images are not verified yet; None if the
    checkpoint must be sent.
    """

    manifest: Manifest
    new: NewImages | None
    identity: str
    same: Manifest | None

    @property
    def target(self) -> Manifest:
        """The manifest of the copy, except for its attempt, and for digests of new images."""
        return self.manifest.whole if self.new is None else self.new.manifest

    @property
    def nbytes(self) -> int:
        """Stored size of all images in bytes."""
        return self.target.stored_nbytes


async def _copy(
    source: Place,
    target: Place,
    orders: Orders,
    recursive: bool,
    reporter: ProgressReporter,
    base: Place | None,
) -> list[CopiedCheckpoint]:
    paths = await _paths(source, recursive=recursive)
    looked = await _look_at_all(source, target, paths, orders, recursive)
    if recursive:
        await _copy_lineages(source, target, {path.rpartition("/")[0] for path in paths if path})
    sum_up = _Sum(reporter, sum(c.nbytes for c in looked))
    copied = []
    bases: dict[str, tuple[Place, str]] = {}  # the last checkpoint copied, by folder
    for known in looked:
        folder = known.path.rpartition("/")[0]
        try:
            done = known
            if known.problem is None:
                async with AsyncExitStack() as stack:
                    lending = None
                    place, path = bases.get(folder, (base, ""))
                    if place is not None:
                        lending = await stack.enter_async_context(place.opened(path))
                    done = await _copy_path(source, target, known, orders, sum_up.add, lending)
                bases[folder] = target, known.path
        except CheckpointError as error:
            if not recursive:
                raise
            done = replace(known, problem=str(error))
        sum_up.end(known.nbytes)
        copied.append(done)
    return copied


async def _copy_lineages(source: Place, target: Place, folders: Collection[str]) -> None:
    """Copy runs' lineages, unless the destination has the lineage of another run."""
    for folder in folders:
        async with source.opened() as theirs, target.opened() as ours:
            lineage = await read_lineage(theirs, folder)
            there = await read_lineage(ours, folder)
            if lineage == there:
                continue
            if not there.parents.items() <= lineage.parents.items():
                _log.warning(
                    "the lineage is not copied to %s, which has the lineage of another run",
                    ours.uri,
                )
                continue
            await ours.put(f"{folder}/{LINEAGE_KEY}".lstrip("/"), lineage.encode())


class _Sum:
    """Progress over the copies of several checkpoints."""

    def __init__(self, reporter: ProgressReporter, total_nbytes: int) -> None:
        self._reporter = reporter
        self._total_nbytes = total_nbytes
        self._done_nbytes = 0
        self._ended_at_nbytes = 0

    def add(self, nbytes: int) -> None:
        self._done_nbytes += nbytes
        self._reporter.report(self._done_nbytes, self._total_nbytes)

    def end(self, nbytes: int) -> None:
        """Finish a checkpoint of ``nbytes``; subtract the unsent bytes of a damaged one."""
        added_nbytes = self._done_nbytes - self._ended_at_nbytes
        self._ended_at_nbytes = self._done_nbytes
        if added_nbytes < nbytes:
            self._total_nbytes -= nbytes - added_nbytes
            self._reporter.report(self._done_nbytes, self._total_nbytes)


async def _paths(source: Place, *, recursive: bool) -> list[str]:
    if not recursive:
        return [""]
    async with source.opened() as driver:
        paths = [key.rpartition("/")[0] for key in await manifest_keys(driver)]
    if not paths:
        raise NotACheckpointError(
            "no checkpoint is committed at or below it", uri=source.uri.redacted
        )
    return paths


async def _look_at_all(
    source: Place, target: Place, paths: Sequence[str], orders: Orders, recursive: bool
) -> list[CopiedCheckpoint]:
    """Return the checkpoints at ``paths`` by step; with ``recursive``, some with a ``problem``."""

    async def look(path: str) -> CopiedCheckpoint:
        try:
            async with source.opened(path) as theirs, target.opened(path) as ours:
                pair = await _look(theirs, ours, orders)
        except (CheckpointError, UsageError) as error:
            if not recursive:
                raise
            return CopiedCheckpoint(path, None, 0, 0, 0, 0.0, str(error))
        m = pair.target
        return CopiedCheckpoint(path, m.step, len(m.images), pair.nbytes, 0, 0.0)

    looked = await at_most(_LOOKS, map(look, paths))
    return sorted(looked, key=lambda c: (c.step is None, c.step or 0, c.path))


async def _copy_path(
    source: Place,
    target: Place,
    known: CopiedCheckpoint,
    orders: Orders,
    sent: Callable[[int], None],
    base: Driver | None,
) -> CopiedCheckpoint:
    began_s = time.perf_counter()
    async with source.opened(known.path) as theirs, target.opened(known.path) as ours:
        pair, done = await copy_checkpoint(theirs, ours, orders, sent, base)
    m = pair.target
    return CopiedCheckpoint(
        known.path,
        m.step,
        len(m.images),
        pair.nbytes,
        done.nbytes,
        time.perf_counter() - began_s,
        borrowed_nbytes=done.borrowed_nbytes,
        why_whole=done.why_whole,
    )


class Sent(NamedTuple):
    """Counts of the bytes of a copy; see :class:`CopiedCheckpoint`."""

    nbytes: int
    borrowed_nbytes: int = 0
    why_whole: str = ""


async def copy_checkpoint(
    theirs: Driver,
    ours: Driver,
    orders: Orders,
    sent: Callable[[int], None] = lambda nbytes: None,
    base: Driver | None = None,
) -> tuple[Pair, Sent]:
    """Copy the checkpoint at the root of the driver ``theirs`` (the source) to the root of ``ours``
    (the destination), borrowing from the checkpoint at the root of ``base``. Returns both
    manifests, and the numbers of bytes.

    ``sent`` is called with each number of bytes newly known to be at the destination, whether sent
    now or already there. Raises like :func:`copy`.
    """
    pair = await _look(theirs, ours, orders)
    if await _is_there(ours, pair, orders):
        sent(pair.nbytes)
        return pair, Sent(0)
    return pair, await _send(theirs, ours, pair, orders, sent, base)


async def _look(theirs: Driver, ours: Driver, orders: Orders) -> Pair:
    """Read both manifests. Raises ExistsError if the destination has another checkpoint."""
    manifest, _ = await read_manifest(theirs)
    image_driver(theirs, manifest)
    new = None
    if orders.image_nbytes is not None:
        new = await offload(lay_out_whole, manifest, orders.image_nbytes)
    pair = Pair(manifest, new, "", None)
    pair = replace(pair, identity=await offload(_identity, pair.target))
    return replace(pair, same=await _same(ours, pair, orders))


async def _same(ours: Driver, pair: Pair, orders: Orders) -> Manifest | None:
    try:
        there, _ = await read_manifest(ours)
    except NotACheckpointError:
        return None
    except DamagedError:
        there = None
    if there is not None:
        alike = there if pair.new is None else without_digests(there)
        if await offload(_identity, alike) == pair.identity:
            return there
    if orders.overwrite:
        return None
    raise ExistsError(
        "another checkpoint already exists" if there else "a damaged checkpoint already exists",
        uri=ours.uri,
        key=MANIFEST_KEY,
        advice="Copy to another URI, or replace it (overwrite).",
    )


def _identity(manifest: Manifest) -> str:
    """Return a digest that all copies of a checkpoint share: of the manifest without the attempt,
    and without shared files, which are copied whole."""
    return digest(replace(manifest.whole, attempt="").encode()).hex()


async def _is_there(ours: Driver, pair: Pair, orders: Orders) -> bool:
    """Return whether all of it is there; with ``orders.overwrite``, also whether it is whole; with
    ``orders.compact``, whether its images are files of their own."""
    if pair.same is None or not orders.overwrite:
        return pair.same is not None
    if orders.compact:
        return pair.same.extents is None
    images = image_driver(ours, pair.same)
    return (
        await verify_images(images, pair.same, orders.budget_nbytes, lambda done, total: None)
    ).ok


async def _send(
    theirs: Driver,
    ours: Driver,
    pair: Pair,
    orders: Orders,
    sent: Callable[[int], None],
    base: Driver | None,
) -> Sent:
    """Send the missing images and commit. Resumes an interrupted copy."""
    budget_nbytes = orders.budget_nbytes
    reader = ImageReader(image_driver(theirs, pair.manifest), pair.manifest, budget_nbytes)
    copier: ImageCopier | ImageRewriter
    lender, why_whole = await _lender(reader, ours, pair, orders, base)
    attempt, resumed = await _begin(ours, pair, lender)
    if pair.new is None:
        copier = ImageCopier(reader, ours, attempt.id, budget_nbytes, sent, lender)
    else:
        copier = ImageRewriter(reader, ours, pair.new, attempt.id, budget_nbytes, sent)
    try:
        whole: Collection[int] = await copier.whole() if resumed else []
        there_nbytes = sum(copier.sizes[i] for i in whole)
        sent(there_nbytes)
        await copier.run([i for i in range(len(copier.sizes)) if i not in whole])
        done = _sent(sum(copier.sizes) - there_nbytes, lender, why_whole)
        if pair.same is None and await _same(ours, pair, orders) is not None:
            await abandon(ours, attempt)  # another copy finished first
            return done
        manifest = copier.target if lender is None else lender.placed(copier.target)
        obsolete = await commit(ours, attempt, manifest)
    except DamagedError as error:
        await abandon(ours, attempt)
        if not await is_current(theirs, pair.manifest.attempt):
            raise ReplacedError(
                "a save has replaced it while it was copied", uri=theirs.uri
            ) from error
        raise
    except (NotFoundError, SaveError):
        await abandon_failed(ours, attempt)
        raise
    await put_telemetry(ours, attempt.id, partial(get_telemetry, theirs, pair.manifest.attempt))
    if ours.traits.exclusive_is_atomic:
        # Otherwise another copy may have put a commit record and still put its manifest.
        await settle(ours, attempt)
    if obsolete is not None:
        await delete_attempt(ours, obsolete)
    return done


def _sent(nbytes: int, lender: Lender | None, why_whole: str) -> Sent:
    if lender is None:
        return Sent(nbytes, 0, why_whole)
    return Sent(nbytes - lender.borrowed_nbytes, lender.borrowed_nbytes, lender.why_whole)


async def _begin(ours: Driver, pair: Pair, lender: Lender | None) -> tuple[Attempt, bool]:
    """Begin the attempt; return whether it resumes another one."""
    if lender is not None and lender.links:
        # The order of blocks in files differs between processes, which so cannot share an attempt.
        return await begin(ours), False
    identity = pair.identity
    if pair.new is not None:  # the source's digests tell which bytes the new images have
        identity += await offload(_identity, pair.manifest)
    return await begin_copy(ours, identity)


async def _lender(
    source: ImageReader, ours: Driver, pair: Pair, orders: Orders, base: Driver | None
) -> tuple[Lender | None, str]:
    """Return the lender; or None, and the reason if there is a base that it may borrow from."""
    m = pair.manifest
    shares = ours.traits.copies is not None or ours.traits.links
    can_follow = m.increments > 0 and pair.new is None and shares
    if base is None or (orders.as_saved and not can_follow):
        return None, ""
    found: Manifest | str
    if pair.new is not None:
        found = "the layout of the images is new"
    elif m.compression is not None:
        found = "the checkpoint is compressed"
    else:
        found = await borrowable(base, ours, LIMITS, (m.chunk_nbytes, m.block_nbytes))
    if isinstance(found, Manifest):
        return Lender(source, base, found, ours), ""
    _log.warning("everything is sent, and nothing borrowed from %s: %s", base.uri, found)
    return None, found
