"""Deleting checkpoints that are not to be kept, and what dead attempts left behind.

The manifest goes first, durably, and then the data: a reader finds a whole checkpoint or none. What
a crash leaves in between is an attempt that no manifest names, which the next pruning collects.

Unlike a save, pruning takes nothing over. So it spares what may be alive: attempts that were
written to lately.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from ...core.aio import at_most
from ...drivers.contract import Driver
from ...errors import NotACheckpointError, NotFoundError, UsageError
from ..format.lineage import LINEAGE_KEY
from ..format.manifest import MANIFEST_KEY
from ..protocol.attempt import Attempt, attempts
from ..protocol.commit import GRACE_S, IDLE_S, clock_s, collect, delete_manifest, is_settled, sweep
from ..protocol.current import read_manifest
from ..protocol.fate import SENTENCE, fate_of
from ..protocol.prune_lock import PRUNING_KEY, is_sign
from ..runtime.engine import run
from .choice import Choice, Rules, chosen_by
from .listing import ListedCheckpoint, Listing
from .location import Place

__all__ = ["Leftover", "PruneReport", "PrunedCheckpoint", "prune", "prune_here"]

_FOLDERS = 8
"""Folders that are worked on at a time."""
_OURS = re.compile(
    r"(?:(?P<folder>.+)/)?"
    rf"(?:{re.escape(MANIFEST_KEY)}|data/(?P<attempt>[0-9]{{8}}T[0-9]{{6}}-[0-9a-f]{{8}})/.+|(?P<sign>{PRUNING_KEY}))"
)

UriLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class PrunedCheckpoint:
    """A committed checkpoint that is deleted; ``nbytes`` of files. ``abandoned``: training had gone
    back to an earlier one. ``damage``: what was wrong with it."""

    path: str
    step: int | None
    attempt: str
    nbytes: int
    abandoned: bool = False
    damage: str | None = None


@dataclass(frozen=True, slots=True)
class Leftover:
    """Files of an attempt below ``path`` that no manifest names."""

    path: str
    attempt: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What is deleted, or would be: ``done`` tells. Paths are relative to ``uri``, which is
    redacted."""

    uri: str
    checkpoints: tuple[PrunedCheckpoint, ...]
    leftovers: tuple[Leftover, ...]
    kept: tuple[str, ...]
    """Paths of the other checkpoints: also of those that were to be deleted, and were spared, since
    their saver may not be done, or somebody else has replaced them."""
    done: bool = False
    damaged: Mapping[str, str] = field(default_factory=dict)
    """Of ``kept``, those that have lost files, or whose bytes are not what was written, and what is
    wrong with each."""

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(c.nbytes for c in self.checkpoints) + sum(x.nbytes for x in self.leftovers)


def prune(
    uri: UriLike,
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    abandoned: bool = False,
    verify: bool = False,
    idle_s: float = IDLE_S,
    dry_run: bool = False,
    storage_options: Mapping[str, object] | None = None,
    confirm: Callable[[PruneReport], bool] = lambda report: True,
) -> PruneReport:
    """Delete the checkpoints at and below ``uri`` that are not to be kept, and what dead attempts
    left; say what it was.

    ``keep_last`` keeps the checkpoints of as many of the highest steps in each folder,
    ``keep_every`` those whose step is a multiple of it; a checkpoint goes if neither keeps it, and
    none goes if neither is given. What was saved last in its folder is always kept, and so is what
    has no step, or cannot be opened.

    A checkpoint counts as kept only if it is whole: all its images are there with their sizes, and,
    with ``verify``, every byte matches its checksum. One that is damaged goes once enough others
    are whole, and no folder loses its only whole one. Abandoned checkpoints, those that training
    went back before, do not count either; they stay unless ``abandoned``.

    An attempt is dead when nothing was written to it for ``idle_s`` seconds; 0 is for when nobody
    saves. ``storage_options`` are options of the storage; those in the URI win.

    ``confirm`` is asked once all is known, and nothing is deleted before. Whatever stops it, each
    checkpoint is whole or gone. Raises UsageError, StorageError; DamagedError where the record of a
    run's branches cannot be read.
    """
    root = Place.of(uri, storage_options)
    for name, value, least in (
        ("keep_last", keep_last, 1),
        ("keep_every", keep_every, 1),
        ("idle_s", idle_s, 0),
    ):
        if value is not None and value < least:
            raise UsageError(f"{name} is at least {least}, not {value}")
    rules = Rules(keep_last, keep_every, abandoned, verify)
    plan = run(_plan(root, partial(chosen_by, root, rules), idle_s))
    if dry_run or not confirm(plan.report):
        return plan.report
    return run(_carry_out(root, plan, idle_s))


async def prune_here(
    root: Place,
    chosen: Callable[[Sequence[ListedCheckpoint]], Sequence[ListedCheckpoint]],
    only: Callable[[str], bool],
    idle_s: float = IDLE_S,
) -> PruneReport:
    """As :func:`prune`, on the engine's loop, by another rule: of the checkpoints whose path is
    ``only``, those that are ``chosen`` go, and what dead attempts left at such paths."""

    async def choice(listed: Sequence[ListedCheckpoint]) -> Choice:
        return Choice(chosen(listed))

    return await _carry_out(root, await _plan(root, choice, idle_s, only), idle_s)


@dataclass(frozen=True, slots=True)
class _Plan:
    report: PruneReport
    folders: tuple[str, ...]
    """Wherever something of ours lies."""
    signs: frozenset[str]
    """Where somebody prunes, or died doing it."""


async def _plan(
    root: Place,
    chosen: Callable[[Sequence[ListedCheckpoint]], Awaitable[Choice]],
    idle_s: float,
    only: Callable[[str], bool] = lambda path: True,
) -> _Plan:
    async with root.opened() as driver:
        survey = await _survey(driver)
        folders = {path: files for path, files in survey.folders.items() if only(path)}
        listed = await Listing(driver, survey.files).checkpoints(
            [path for path, files in folders.items() if "" in files]
        )
    choice = await chosen(listed)
    gone = choice.gone
    checkpoints = [
        PrunedCheckpoint(
            *(c.path, c.step, c.attempt, sum(folders[c.path].get(a, 0) for a in ("", c.attempt))),
            abandoned=c.abandoned,
            damage=choice.damaged.get(c.path),
        )
        for c in gone
    ]
    current = {c.path: c for c in listed}
    leftovers: list[Leftover] = []

    async def look(path: str) -> None:
        async with root.opened(path) as driver:
            leftovers.extend(await _leftovers(driver, path, current.get(path), idle_s))

    # A checkpoint without leftovers, the common case, has one attempt.
    usual = {"", PRUNING_KEY}
    suspects = [
        p
        for p, files in folders.items()
        if set(files) - usual - {current[p].attempt if p in current else ""}
    ]
    await at_most(_FOLDERS, map(look, suspects))
    leftovers.sort(key=lambda x: (x.path, x.attempt))
    kept = sorted(set(current) - {c.path for c in gone})
    signs = frozenset(path for path, files in folders.items() if PRUNING_KEY in files)
    damaged = {path: what for path, what in choice.damaged.items() if path in kept}
    report = PruneReport(
        root.uri.redacted, tuple(checkpoints), tuple(leftovers), tuple(kept), damaged=damaged
    )
    return _Plan(report, tuple(folders), signs)


@dataclass(frozen=True, slots=True)
class _Survey:
    folders: dict[str, dict[str, int]]
    """By folder and attempt, the bytes that lie there; those of the manifest under ``""``, of a
    pruning under its key."""
    files: dict[str, int]
    """The size of every file that a listing of checkpoints may want to know of."""


async def _survey(driver: Driver) -> _Survey:
    found = _Survey({}, {})
    async for info in driver.list():
        match = _OURS.fullmatch(info.key)
        if match or info.key.rpartition("/")[2] == LINEAGE_KEY:
            found.files[info.key] = info.nbytes
        if match and (not match["sign"] or await is_sign(driver, info)):
            files, part = (
                found.folders.setdefault(match["folder"] or "", {}),
                match["attempt"] or match["sign"] or "",
            )
            files[part] = files.get(part, 0) + info.nbytes
    return found


async def _leftovers(
    driver: Driver, path: str, current: ListedCheckpoint | None, idle_s: float
) -> list[Leftover]:
    """What :func:`collect` would delete, were it now; by the clock of this host."""
    now_s, found = time.time(), []
    for attempt, trace in (await attempts(driver)).items():
        claimed = trace.decided and await fate_of(driver, attempt.fate) not in (None, SENTENCE)
        salvage = claimed and current is not None and current.problem is not None
        least_s = max(
            idle_s, GRACE_S if claimed else 0, 0 if driver.traits.exclusive_is_atomic else IDLE_S
        )
        if (
            attempt.id != (current and current.attempt)
            and not salvage
            and max(0.0, now_s - trace.written_s) >= least_s
        ):
            found.append(Leftover(path, attempt.id, trace.nbytes))
    return found


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
            collected.extend(
                x for x in plan.report.leftovers if x.path == path and x.attempt not in still
            )

    await at_most(_FOLDERS, map(tidy, plan.folders))
    async with root.opened() as driver:
        for path in ({x.path for x in deleted} | {x.path for x in collected} | plan.signs) - {""}:
            await _delete_if_empty(driver, path)
    collected.sort(key=lambda x: (x.path, x.attempt))
    report = plan.report
    return PruneReport(
        report.uri, tuple(deleted), tuple(collected), tuple(sorted(kept)), True, report.damaged
    )


async def _delete(driver: Driver, checkpoint: PrunedCheckpoint) -> bool:
    """Delete a checkpoint; not if it has become another one since it was looked at, or whoever
    saved it may yet put its manifest again."""
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
    """Delete the folder of a checkpoint, unless something is in it: not ours, or a save that has
    just begun; or begins now, so this is for the sweep, which harms nobody alive."""
    async for _ in driver.list(path):
        return
    await driver.sweep(path)
