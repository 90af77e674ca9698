"""Deleting checkpoints that are not to be kept, and what dead attempts left behind.

The manifest goes first, durably, and then the data: a reader finds a whole checkpoint or none. What a crash leaves in
between is an attempt that no manifest names, which the next pruning collects.

Unlike a save, pruning takes nothing over. So it spares what may be alive: attempts that were written to lately.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from ..drivers.contract import Driver
from ..errors import NotACheckpointError, NotFoundError, UsageError
from .commit import (
    GRACE_S,
    IDLE_S,
    Attempt,
    attempts,
    clock_s,
    collect,
    delete_manifest,
    is_settled,
    sweep,
)
from .committed import read_manifest
from .format.manifest import MANIFEST_KEY
from .pipeline.engine import run
from .pipeline.executor import at_most
from .place import Place
from .pruning import PRUNING_KEY, is_sign
from .reader import ListedCheckpoint, list_in

__all__ = ["Leftover", "PruneReport", "PrunedCheckpoint", "choose", "prune", "prune_here"]

_FOLDERS = 8
"""Folders that are worked on at a time."""
_OURS = re.compile(
    r"(?:(?P<folder>.+)/)?"
    rf"(?:{re.escape(MANIFEST_KEY)}|data/(?P<attempt>[0-9]{{8}}T[0-9]{{6}}-[0-9a-f]{{8}})/.+|(?P<sign>{PRUNING_KEY}))"
)

UriLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class PrunedCheckpoint:
    """A committed checkpoint that is deleted; ``nbytes`` of files."""

    path: str
    step: int | None
    attempt: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Leftover:
    """Files of an attempt below ``path`` that no manifest names."""

    path: str
    attempt: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What is deleted, or would be: ``done`` tells. Paths are relative to ``uri``, which is redacted."""

    uri: str
    checkpoints: tuple[PrunedCheckpoint, ...]
    leftovers: tuple[Leftover, ...]
    kept: tuple[str, ...]
    """Paths of the other checkpoints: also of those that were to be deleted, and were spared, since their saver may not be
    done, or somebody else has replaced them."""
    done: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(c.nbytes for c in self.checkpoints) + sum(x.nbytes for x in self.leftovers)


def prune(
    uri: UriLike,
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    idle_s: float = IDLE_S,
    dry_run: bool = False,
    storage_options: Mapping[str, object] | None = None,
    confirm: Callable[[PruneReport], bool] = lambda report: True,
) -> PruneReport:
    """Delete the checkpoints at and below ``uri`` that are not to be kept, and what dead attempts left; say what it was.

    ``keep_last`` keeps as many of the highest steps in each folder, ``keep_every`` those whose step is a multiple of it;
    a checkpoint goes if neither keeps it, and none goes if neither is given. What was saved last in its folder is always
    kept, and so is what has no step, or cannot be opened. An attempt is dead when nothing was written to it for
    ``idle_s`` seconds; 0 is for when nobody saves. ``storage_options`` are options of the storage; those in the URI win.

    ``confirm`` is asked once all is known, and nothing is deleted before. Whatever stops it, each checkpoint is whole or
    gone. Raises UsageError, StorageError.
    """
    root = Place.of(uri, storage_options)
    for name, value, least in (("keep_last", keep_last, 1), ("keep_every", keep_every, 1), ("idle_s", idle_s, 0)):
        if value is not None and value < least:
            raise UsageError(f"{name} is at least {least}, not {value}")
    plan = run(_plan(root, lambda listed: choose(listed, keep_last, keep_every), idle_s))
    if dry_run or not confirm(plan.report):
        return plan.report
    return run(_carry_out(root, plan, idle_s))


async def prune_here(
    root: Place,
    chosen: Callable[[list[ListedCheckpoint]], list[ListedCheckpoint]],
    only: Callable[[str], bool],
    idle_s: float = IDLE_S,
) -> PruneReport:
    """As :func:`prune`, on the engine's loop, by another rule: of the checkpoints whose path is ``only``, those that are
    ``chosen`` go, and what dead attempts left at such paths."""
    return await _carry_out(root, await _plan(root, chosen, idle_s, only), idle_s)


def choose(
    listed: Iterable[ListedCheckpoint],
    keep_last: int | None,
    keep_every: int | None,
    keep_steps: Collection[int] | None = None,
) -> list[ListedCheckpoint]:
    """Those of ``listed`` that go, in order of folder and step; see :func:`prune` for the rules. ``keep_steps`` are kept
    besides; given alone, all others go. Pure."""
    if keep_last is None and keep_every is None and keep_steps is None:
        return []
    kept = keep_steps or ()
    folders: dict[str, list[ListedCheckpoint]] = {}
    for c in listed:
        if c.path and c.step is not None and c.problem is None:  # "" is no member of a folder, but the folder itself
            folders.setdefault(c.path.rpartition("/")[0], []).append(c)
    gone = []
    for _, members in sorted(folders.items()):
        members.sort(key=lambda c: (c.step or 0, c.created_s))
        latest = max(members, key=lambda c: (c.created_s, c.step or 0))
        for c in members[: -(keep_last or 1)]:
            if c is not latest and c.step not in kept and (keep_every is None or (c.step or 0) % keep_every):
                gone.append(c)
    return gone


@dataclass(frozen=True, slots=True)
class _Plan:
    report: PruneReport
    folders: tuple[str, ...]
    """Wherever something of ours lies."""
    signs: frozenset[str]
    """Where somebody prunes, or died doing it."""


async def _plan(
    root: Place,
    chosen: Callable[[list[ListedCheckpoint]], list[ListedCheckpoint]],
    idle_s: float,
    only: Callable[[str], bool] = lambda path: True,
) -> _Plan:
    async with root.opened() as driver:
        folders = {path: files for path, files in (await _survey(driver)).items() if only(path)}
        keys = [f"{path}/{MANIFEST_KEY}".lstrip("/") for path, files in folders.items() if "" in files]
        listed = await list_in(driver, keys)
    gone = chosen(listed)
    checkpoints = [
        PrunedCheckpoint(c.path, c.step, c.attempt, sum(folders[c.path].get(a, 0) for a in ("", c.attempt)))
        for c in gone
    ]
    current = {c.path: c for c in listed}
    leftovers: list[Leftover] = []

    async def look(path: str) -> None:
        async with root.opened(path) as driver:
            leftovers.extend(await _leftovers(driver, path, current.get(path), idle_s))

    # A checkpoint without leftovers, the common case, has one attempt.
    usual = {"", PRUNING_KEY}
    suspects = [p for p, files in folders.items() if set(files) - usual - {current[p].attempt if p in current else ""}]
    await at_most(_FOLDERS, map(look, suspects))
    leftovers.sort(key=lambda x: (x.path, x.attempt))
    kept = sorted(set(current) - {c.path for c in gone})
    signs = frozenset(path for path, files in folders.items() if PRUNING_KEY in files)
    report = PruneReport(root.uri.redacted, tuple(checkpoints), tuple(leftovers), tuple(kept))
    return _Plan(report, tuple(folders), signs)


async def _survey(driver: Driver) -> dict[str, dict[str, int]]:
    """By folder and attempt, the bytes that lie there; those of the manifest under ``""``, of a pruning under its key."""
    found: dict[str, dict[str, int]] = {}
    async for info in driver.list():
        if (match := _OURS.fullmatch(info.key)) and (not match["sign"] or await is_sign(driver, info)):
            files, part = found.setdefault(match["folder"] or "", {}), match["attempt"] or match["sign"] or ""
            files[part] = files.get(part, 0) + info.nbytes
    return found


async def _leftovers(driver: Driver, path: str, current: ListedCheckpoint | None, idle_s: float) -> list[Leftover]:
    """What :func:`collect` would delete, were it now; by the clock of this host."""
    now_s, found = time.time(), []
    for attempt, trace in (await attempts(driver)).items():
        claimed = trace.decided and await _fate(driver, attempt) != b"abort"
        salvage = claimed and current is not None and current.problem is not None
        least_s = max(idle_s, GRACE_S if claimed else 0, 0 if driver.traits.exclusive_is_atomic else IDLE_S)
        if attempt.id != (current and current.attempt) and not salvage and max(0.0, now_s - trace.written_s) >= least_s:
            found.append(Leftover(path, attempt.id, trace.nbytes))
    return found


async def _fate(driver: Driver, attempt: Attempt) -> bytes:
    try:
        return await driver.get(attempt.fate)
    except NotFoundError:
        return b"abort"  # it is being deleted


async def _carry_out(root: Place, plan: _Plan, idle_s: float) -> PruneReport:
    deleted: list[PrunedCheckpoint] = []
    kept = set(plan.report.kept)
    for checkpoint in plan.report.checkpoints:
        async with root.opened(checkpoint.path) as driver:
            if await _delete(driver, checkpoint):
                deleted.append(checkpoint)
            elif await _is_checkpoint(driver):
                kept.add(checkpoint.path)
    left = {x.path for x in plan.report.leftovers} | plan.signs
    collected: list[Leftover] = []

    async def tidy(path: str) -> None:
        async with root.opened(path) as driver:
            if path not in left:
                await sweep(driver)
                return
            await collect(driver, idle_s)
            still = {attempt.id for attempt in await attempts(driver)}
            collected.extend(x for x in plan.report.leftovers if x.path == path and x.attempt not in still)

    await at_most(_FOLDERS, map(tidy, plan.folders))
    async with root.opened() as driver:
        for path in ({x.path for x in deleted} | {x.path for x in collected} | plan.signs) - {""}:
            await _delete_if_empty(driver, path)
    collected.sort(key=lambda x: (x.path, x.attempt))
    return PruneReport(plan.report.uri, tuple(deleted), tuple(collected), tuple(sorted(kept)), done=True)


async def _delete(driver: Driver, checkpoint: PrunedCheckpoint) -> bool:
    """Delete a checkpoint; not if it has become another one since it was looked at, or whoever saved it may yet put its
    manifest again."""
    try:
        manifest, _ = await read_manifest(driver)
    except NotACheckpointError:
        return False
    if manifest.attempt != checkpoint.attempt:
        return False
    attempt = Attempt(checkpoint.attempt)
    if not await is_settled(driver, attempt, partial(clock_s, driver)):
        return False
    if not await delete_manifest(driver, attempt):  # durable on return: only now may the data go
        return False
    await driver.delete(attempt.marker)
    await driver.delete_all(attempt.prefix)
    return True


async def _is_checkpoint(driver: Driver) -> bool:
    try:
        await driver.stat(MANIFEST_KEY)
    except NotFoundError:
        return False
    return True


async def _delete_if_empty(driver: Driver, path: str) -> None:
    """Delete the folder of a checkpoint, unless something is in it: not ours, or a save that has just begun; or begins now,
    so this is for the sweep, which harms nobody alive."""
    async for _ in driver.list(path):
        return
    await driver.sweep(path)
