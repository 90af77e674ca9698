"""Deletes checkpoints that are not to be retained, and leftovers of dead attempts.

The manifest is deleted first, durably, and then the data, so a reader finds a complete checkpoint
or none. A crash in between leaves an attempt that no manifest names; the next pruning collects it.

Unlike a save, a pruning does not take over the URI, so it spares attempts that may be live: those
written to recently.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter

from ....core.aio import at_most
from ....drivers.contract import Driver
from ....errors import (
    AccessError,
    DamagedError,
    FullError,
    HoldfastError,
    NotACheckpointError,
    StorageError,
    UriError,
    UsageError,
)
from ...format.manifest import MANIFEST_KEY
from ...protocol import limits
from ...protocol.attempt import (
    ABORT_RECORD,
    ATTEMPT_KEY_PATTERN,
    Attempt,
    AttemptFiles,
    list_attempts,
    read_record,
    storage_time_s,
)
from ...protocol.collect import collect, sweep
from ...protocol.commit import is_settled
from ...protocol.current import read_manifest
from ...protocol.prune_lock import PRUNING_KEY, delete_manifest, is_lock
from ...runtime.engine import check_may_wait, run
from ..location import Place, UriLike
from .choice import Choice, Rules, chosen_by
from .listing import ListedCheckpoint, Listing, size_of, unreadable
from .space import Holder, Shared, StoredOnce, files_by_key, shared_by

_FOLDERS = 8
"""Folders processed at the same time."""
_MANIFEST = ""
"""Stands for the manifest among the parts of a folder; see :func:`_parts_of`."""
_OURS = re.compile(
    r"(?:(?P<folder>.+)/)?"
    rf"(?:{re.escape(MANIFEST_KEY)}|{ATTEMPT_KEY_PATTERN}|(?P<lock>{PRUNING_KEY}))"
)

_by_path = attrgetter("path", "attempt")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PrunedCheckpoint:
    """A deleted checkpoint; ``nbytes`` counts its files, also shared ones. ``abandoned``: training
    had gone back to an earlier one. ``damage``: its damage, if any."""

    path: str
    step: int | None
    attempt: str
    nbytes: int
    abandoned: bool = False
    damage: str | None = None


@dataclass(frozen=True, slots=True)
class Leftover:
    """Files below ``path`` of an attempt that no manifest names."""

    path: str
    attempt: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class PruneReport:
    """Result of a pruning: the deleted paths (``done``), or a plan. Paths are relative to the
    redacted ``uri``."""

    uri: str
    checkpoints: tuple[PrunedCheckpoint, ...]
    leftovers: tuple[Leftover, ...]
    kept: tuple[str, ...]
    """Paths of the other checkpoints, including those spared because their saver may still be
    running or another save has replaced them."""
    done: bool = False
    damaged: Mapping[str, str] = field(default_factory=dict)
    """Damaged checkpoints among ``kept``, with a description."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Why something in a folder could not be inspected or deleted, by the folder's path."""
    shared: Shared = field(default_factory=Shared)
    """Deleted files that stay, because other checkpoints at or below the URI hold them too."""
    channels: tuple[str, ...] = ()
    """Paths of weight channels, whose publishers alone delete versions. They are left alone, except
    for leftovers."""

    @property
    def nbytes(self) -> int:
        """Space that becomes free, in bytes: a file counts once, if no other checkpoint holds
        it."""
        deleted = sum(c.nbytes for c in self.checkpoints) + sum(x.nbytes for x in self.leftovers)
        return deleted - self.shared.links_nbytes


def prune(
    uri: UriLike,
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    abandoned: bool = False,
    verify: bool = False,
    idle_s: float = limits.IDLE_S,
    dry_run: bool = False,
    storage_options: Mapping[str, object] | None = None,
    confirm: Callable[[PruneReport], bool] = lambda report: True,
) -> PruneReport:
    """Delete checkpoints at and below ``uri`` that are not retained, and leftovers of dead
    attempts.

    ``keep_last`` retains the checkpoints of that many highest steps in each folder, ``keep_every``
    those whose step is a multiple of it. A checkpoint is deleted if neither retains it; none is
    deleted if neither is given. The latest save of each folder is always retained, and so are
    checkpoints without a step and ones that cannot be opened. Versions of weight channels are never
    deleted: that is up to their publishers.

    A checkpoint counts as retained only if it is whole: all its images exist with the right sizes,
    and, with ``verify``, every byte matches its checksum. A damaged one is deleted once enough
    others are whole, and no folder loses its only whole one. Abandoned checkpoints, on a branch
    that training left, do not count either; they stay unless ``abandoned``.

    An attempt is dead after ``idle_s`` seconds without a write; use 0 only when no job is saving.
    ``storage_options`` are options of the storage; options in the URI take precedence.

    ``confirm`` is called with the complete plan before anything is deleted. However the pruning is
    interrupted, each checkpoint is complete or gone. An error in one folder is logged and reported
    in ``failed``, and other folders are still pruned. Nothing is deleted from a run whose lineage
    cannot be read. Raises UsageError; StorageError if the storage as a whole fails.
    """
    root = Place.of(uri, storage_options)
    _check_at_least("keep_last", keep_last, 1)
    _check_at_least("keep_every", keep_every, 1)
    _check_at_least("idle_s", idle_s, 0)
    rules = Rules(keep_last, keep_every, abandoned, verify)
    plan = run(plan_pruning(root, partial(chosen_by, root, rules), idle_s))
    if dry_run or not confirm(plan.report):
        return plan.report
    return run(carry_out(root, plan, idle_s))


def _check_at_least(name: str, value: float | None, least: int) -> None:
    if value is not None and value < least:
        raise UsageError(f"{name} must be at least {least}, not {value}")


async def prune_here(
    root: Place,
    chosen: Callable[[Sequence[ListedCheckpoint]], Sequence[ListedCheckpoint]],
    only: Callable[[str], bool],
    idle_s: float = limits.IDLE_S,
) -> PruneReport:
    """Prune like :func:`prune`, on the engine's loop: what ``chosen`` returns of those."""

    async def choice(listed: Sequence[ListedCheckpoint]) -> Choice:
        return Choice(chosen(listed))

    return await carry_out(root, await plan_pruning(root, choice, idle_s, only), idle_s)


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """The plan of a pruning; its report lists what would be deleted."""

    report: PruneReport
    folders: tuple[str, ...]
    """Every folder with files of a checkpoint or an attempt."""
    locked: frozenset[str]
    """Folders with a prune lock: a pruning is running there, or has died."""
    errors: dict[str, HoldfastError]
    """The first error of each folder that could not be inspected or pruned."""
    files: Mapping[str, StoredOnce]

    def with_shared(self, report: PruneReport) -> PruneReport:
        """Return ``report`` with the files that stay if it is carried out."""
        gone = [Holder(c.path, c.attempt) for c in report.checkpoints]
        gone += [Holder(x.path, x.attempt) for x in report.leftovers]
        return replace(report, shared=shared_by(self.files, gone))


@contextlib.contextmanager
def _noting(errors: dict[str, HoldfastError], path: str) -> Iterator[None]:
    """Record and log an error of one folder. An error of the whole storage propagates."""
    try:
        yield
    except (StorageError, DamagedError) as error:
        if error.temporary or isinstance(error, FullError):
            raise
        errors.setdefault(path, error)
        _log.warning("the folder %s cannot be pruned: %s", path or ".", error)


async def plan_pruning(
    root: Place,
    chosen: Callable[[Sequence[ListedCheckpoint]], Awaitable[Choice]],
    idle_s: float,
    only: Callable[[str], bool] = lambda path: True,
) -> PrunePlan:
    """Plan what :func:`prune_here` deletes: ``chosen`` checkpoints, and leftovers of the dead."""
    async with root.opened() as driver:
        listing = await Listing.of(driver)
        parts = await _parts_of(listing, driver)
        folders = {path: nbytes for path, nbytes in parts.items() if only(path)}
        with_manifest = [path for path, nbytes in folders.items() if _MANIFEST in nbytes]
        found = await listing.checkpoints(with_manifest)
    errors: dict[str, HoldfastError] = {}
    for folder, unknown in listing.unknown.items():
        with _noting(errors, folder):
            raise unknown
    spared = _unreadable(folders, listing.unlisted)
    spared |= {path for path in folders if path and path.rpartition("/")[0] in listing.unknown}
    for path in spared:
        folders.pop(path, None)
    choice = await chosen([c for c in found if c.path in folders and not c.is_version])
    checkpoints = [
        PrunedCheckpoint(
            path=c.path,
            step=c.step,
            attempt=c.attempt,
            nbytes=sum(folders[c.path].get(part, 0) for part in (_MANIFEST, c.attempt)),
            abandoned=c.abandoned,
            damage=choice.damaged.get(c.path),
        )
        for c in choice.gone
    ]
    current = {c.path: c for c in found}
    leftovers = await _all_leftovers(root, folders, current, idle_s, errors)
    kept = sorted(set(current) - {c.path for c in choice.gone})
    report = PruneReport(
        root.uri.redacted,
        tuple(checkpoints),
        tuple(leftovers),
        tuple(kept),
        damaged={path: what for path, what in choice.damaged.items() if path in kept},
        failed=_messages(errors),
        channels=tuple(sorted({c.folder for c in found if c.is_version and c.path})),
    )
    locked = frozenset(path for path, nbytes in folders.items() if PRUNING_KEY in nbytes)
    files = files_by_key(listing.files.values())
    plan = PrunePlan(report, tuple(folders), locked, errors, files)
    return replace(plan, report=plan.with_shared(report))


def _messages(errors: Mapping[str, HoldfastError]) -> dict[str, str]:
    return {path: str(error) for path, error in sorted(errors.items())}


async def _parts_of(listing: Listing, driver: Driver) -> dict[str, dict[str, int]]:
    """Return by folder the bytes of its parts: the manifest under ``_MANIFEST``, a prune lock
    under its key, each attempt under its id."""
    folders: dict[str, dict[str, int]] = {}
    for info in listing.files.values():
        match = _OURS.fullmatch(info.key)
        if match is None or (match["lock"] and not await is_lock(driver, info)):
            continue
        folder = folders.setdefault(match["folder"] or "", {})
        part = match["attempt"] or match["lock"] or _MANIFEST
        folder[part] = folder.get(part, 0) + info.nbytes
    return folders


def _unreadable(folders: Iterable[str], unlisted: Iterable[str]) -> set[str]:
    """Return the folders with unreadable data, in which nothing is deleted."""
    return {
        path
        for path in folders
        for hidden in unlisted
        if f"{hidden}/".startswith(f"{path}/data/".lstrip("/"))
    }


async def _all_leftovers(
    root: Place,
    folders: Mapping[str, Mapping[str, int]],
    current: Mapping[str, ListedCheckpoint],
    idle_s: float,
    errors: dict[str, HoldfastError],
) -> list[Leftover]:

    async def look(path: str) -> list[Leftover]:
        with _noting(errors, path):
            async with root.opened(path) as driver:
                return await _leftovers(driver, path, current.get(path), idle_s)
        return []

    # A checkpoint without leftovers, the common case, has one attempt and needs no inspection.
    suspects = []
    for path, nbytes in folders.items():
        expected = {_MANIFEST, PRUNING_KEY}
        if path in current:
            expected.add(current[path].attempt)
        if nbytes.keys() - expected:
            suspects.append(path)
    found = await at_most(_FOLDERS, map(look, suspects))
    return sorted(itertools.chain(*found), key=_by_path)


async def _leftovers(
    driver: Driver, path: str, current: ListedCheckpoint | None, idle_s: float
) -> list[Leftover]:
    """Return what :func:`collect` would delete now; nothing beside an unreadable manifest."""
    if current is None and await unreadable(driver, MANIFEST_KEY) is not None:
        return []
    now_s = time.time()
    found: list[Leftover] = []
    for attempt, files in (await list_attempts(driver)).items():
        if current is not None and attempt.id == current.attempt:
            continue
        silent_s = max(0.0, now_s - files.written_s)
        if silent_s >= await _spared_s(driver, attempt, files, current, idle_s):
            found.append(Leftover(path, attempt.id, files.nbytes))
    return found


async def _spared_s(
    driver: Driver,
    attempt: Attempt,
    files: AttemptFiles,
    current: ListedCheckpoint | None,
    idle_s: float,
) -> float:
    """Return how long after its last write an attempt that is not the checkpoint is spared."""
    spared_s = idle_s
    if not driver.traits.exclusive_is_atomic:
        spared_s = max(spared_s, limits.IDLE_S)
    if not files.has_record:
        return spared_s
    if await read_record(driver, attempt.record_key) in (None, ABORT_RECORD):
        return spared_s
    if current is not None and current.problem is not None:
        return float("inf")  # the damaged manifest may have named it
    return max(spared_s, limits.GRACE_S)


async def carry_out(root: Place, plan: PrunePlan, idle_s: float) -> PruneReport:
    """Delete the paths of the plan, and report them."""
    deleted: list[PrunedCheckpoint] = []
    kept = set(plan.report.kept)
    for checkpoint in plan.report.checkpoints:
        with _noting(plan.errors, checkpoint.path):
            async with root.opened(checkpoint.path) as driver:
                if await delete_checkpoint(driver, checkpoint):
                    deleted.append(checkpoint)
                elif await size_of(driver, MANIFEST_KEY) is not None:
                    kept.add(checkpoint.path)
    collected = await _collect_all(root, plan, idle_s)
    emptied = {x.path for x in deleted} | {x.path for x in collected} | plan.locked
    async with root.opened() as driver:
        for path in emptied - {""}:
            with _noting(plan.errors, path):
                await delete_if_empty(driver, path)
    report = replace(
        plan.report,
        checkpoints=tuple(deleted),
        leftovers=tuple(collected),
        kept=tuple(sorted(kept)),
        failed=_messages(plan.errors),
        done=True,
    )
    return plan.with_shared(report)


async def _collect_all(root: Place, plan: PrunePlan, idle_s: float) -> list[Leftover]:
    """Collect the plan's leftovers and sweep every folder; return the leftovers that are gone."""
    collectable = {x.path for x in plan.report.leftovers} | plan.locked
    collected: list[Leftover] = []

    async def tidy(path: str) -> None:
        with _noting(plan.errors, path):
            async with root.opened(path) as driver:
                if path not in collectable:
                    await sweep(driver)
                    return
                await collect(driver, idle_s)
                remaining = {attempt.id for attempt in await list_attempts(driver)}
            for leftover in plan.report.leftovers:
                if leftover.path == path and leftover.attempt not in remaining:
                    collected.append(leftover)

    await at_most(_FOLDERS, map(tidy, plan.folders))
    return sorted(collected, key=_by_path)


async def delete_checkpoint(driver: Driver, checkpoint: PrunedCheckpoint) -> bool:
    """Delete a checkpoint unless it was replaced or may be put again; return whether so."""
    try:
        manifest, _ = await read_manifest(driver)
    except NotACheckpointError:
        return False
    if manifest.attempt != checkpoint.attempt:
        return False
    attempt = Attempt(checkpoint.attempt)
    if not await is_settled(driver, attempt, partial(storage_time_s, driver)):
        return False
    if not await delete_manifest(driver, attempt):  # durable: now the data may be deleted
        return False
    await driver.delete(attempt.marker_key)
    await driver.delete_all(attempt.prefix)
    return True


async def delete_if_empty(driver: Driver, path: str) -> None:
    """Delete a folder unless it holds other data or a save has begun there, by the sweep."""
    try:
        async for _ in driver.list(path):
            return
    except AccessError:
        return
    await driver.sweep(path)


def remove(uri: UriLike, *, storage_options: Mapping[str, object] | None = None) -> bool:
    """Delete the checkpoint at ``uri`` and leftovers of dead attempts; return whether one was
    deleted.

    For callers with their own retention policy, such as trainers. Other files stay, and so does a
    checkpoint whose save is still running. Atomic: the manifest goes first, so a reader finds a
    complete checkpoint or none. Raises UriError and StorageError.
    """
    check_may_wait()
    place = Place.of(uri, storage_options)
    return run(_removed(place))


async def _removed(place: Place) -> bool:
    plan = await plan_pruning(place, _all, limits.IDLE_S, lambda path: path == "")
    report = await carry_out(place, plan, limits.IDLE_S)
    for error in plan.errors.values():
        raise error
    if report.checkpoints:
        await _remove_folder(place)
    return bool(report.checkpoints)


async def _all(listed: Sequence[ListedCheckpoint]) -> Choice:
    return Choice(listed)


async def _remove_folder(place: Place) -> None:
    try:
        folder, key = place.divided()
    except UriError:
        return
    async with folder.opened() as driver:
        await delete_if_empty(driver, key)
