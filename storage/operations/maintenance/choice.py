"""Chooses the checkpoints to prune, and finds damage among those to keep. Deletes nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ....errors import CheckpointError
from ...pipeline.mapping import image_driver
from ...pipeline.verifier import verify_images
from ...protocol.current import read_manifest
from ..location import Place
from .listing import ListedCheckpoint

BUDGET_NBYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of :func:`prune`, as given by its arguments."""

    keep_last: int | None
    keep_every: int | None
    abandoned: bool
    verify: bool


async def chosen_by(root: Place, rules: Rules, listed: Sequence[ListedCheckpoint]) -> Choice:
    """Return the checkpoints to delete under the rules of :func:`prune`, and the damage found."""
    damaged = {c.path: c.damage for c in listed if c.damage is not None}
    verified: set[str] = set()
    while True:
        latest = _latest_of_each_folder([c for c in listed if c.path not in damaged])
        gone = choose(listed, rules.keep_last, rules.keep_every, latest, damaged)
        if rules.abandoned:
            gone += _abandoned_beside_a_whole_one(listed, damaged)
        counted = _counted_on(listed, gone, damaged) if rules.verify else []
        found = await _verified(root, [path for path in counted if path not in verified])
        if not found:
            return Choice(gone, damaged)
        verified.update(counted)
        damaged |= found


def _latest_of_each_folder(listed: Iterable[ListedCheckpoint]) -> set[str]:
    """Return the latest save of each folder, by the savers' clocks: these are only kept."""
    latest: dict[str, ListedCheckpoint] = {}
    for c in listed:
        if c.path and c.step is not None and c.problem is None and not c.abandoned:
            before = latest.setdefault(c.folder, c)
            latest[c.folder] = max(before, c, key=lambda c: (c.created_s, c.step or 0))
    return {c.path for c in latest.values()}


def _abandoned_beside_a_whole_one(
    listed: Iterable[ListedCheckpoint], damaged: Collection[str]
) -> list[ListedCheckpoint]:
    whole = {
        c.folder for c in listed if c.problem is None and not c.abandoned and c.path not in damaged
    }
    gone = [c for c in listed if c.abandoned and c.folder in whole]
    return sorted(gone, key=lambda c: (c.folder, c.step or 0))


def _counted_on(
    listed: Iterable[ListedCheckpoint], gone: Collection[ListedCheckpoint], damaged: Collection[str]
) -> list[str]:
    """Return the paths of retained checkpoints that justify deleting others."""
    folders = {c.folder for c in gone}
    going = {c.path for c in gone}
    kept = [c for c in listed if c.problem is None and not c.abandoned and c.path not in going]
    return [c.path for c in kept if c.folder in folders and c.path not in damaged]


async def _verified(root: Place, paths: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in paths:
        async with root.opened(path) as driver:
            try:
                manifest, _ = await read_manifest(driver)
                images = image_driver(driver, manifest)
                report = await verify_images(images, manifest, BUDGET_NBYTES, lambda *_: None)
            except CheckpointError as error:
                found[path] = error.message
                continue
            if not report.ok:
                damage = report.damages[0]
                found[path] = f"{damage.what} ({damage.key})"
    return found


@dataclass(frozen=True, slots=True)
class Choice:
    """The checkpoints to delete, in order, and damage by path."""

    gone: Sequence[ListedCheckpoint]
    damaged: Mapping[str, str] = field(default_factory=dict)


def choose(
    listed: Iterable[ListedCheckpoint],
    keep_last: int | None,
    keep_every: int | None,
    keep_paths: Collection[str] | None = None,
    damaged: Collection[str] = (),
) -> list[ListedCheckpoint]:
    """Return the checkpoints to delete, ordered by folder and step; see :func:`prune` for the
    rules. ``keep_paths`` are kept as well. Only steps decide, never clocks. Abandoned checkpoints
    are ignored. Pure."""
    if keep_last is None and keep_every is None:
        return []
    folders: dict[str, list[ListedCheckpoint]] = {}
    for c in listed:
        known = c.step is not None and c.problem is None and not c.abandoned
        if c.path and known:  # "" is the listed folder itself, not a member of it
            folders.setdefault(c.folder, []).append(c)
    gone = []
    for _, members in sorted(folders.items()):
        members.sort(key=lambda c: (c.step or 0, c.path))
        goes = _going(members, keep_last or 1, damaged)
        for c in members:
            is_multiple = keep_every is not None and (c.step or 0) % keep_every == 0
            if goes(c) and not is_multiple and c.path not in (keep_paths or ()):
                gone.append(c)
    return gone


def _going(
    members: Sequence[ListedCheckpoint], keep_last: int, damaged: Collection[str]
) -> Callable[[ListedCheckpoint], bool]:
    """Return a predicate: is a checkpoint older than the last ``keep_last`` whole ones, by step?"""
    steps = sorted({c.step or 0 for c in members if c.path not in damaged}, reverse=True)
    if len(steps) < keep_last:
        return lambda c: False  # too few whole ones: any checkpoint may be needed
    newest = steps[0]
    oldest_kept = steps[keep_last - 1]
    return lambda c: (c.step or 0) <= newest if c.path in damaged else (c.step or 0) < oldest_kept
