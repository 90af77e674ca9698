"""Invariants of a run: at each moment, after each power cut, for each acknowledgement that an actor
received, and at the end."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, replace

from holdfast.storage.format.manifest import Manifest

from .loop import PROCESS
from .schedule import ActorPlan
from .states import OTHER_STATE, Expected, expected, identity, identity_of
from .world import World

MAIN, OTHER, EARLIER, UNCOMMITTED = "run/a", "run/b", "run/c", "run/d"
EARLIER_STATE = 5
LAST, FEW = 4, 2
"""State and number of chunks of the final save, after the run."""


class Violation(AssertionError):
    """A promise was broken."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The start of a period in which this was the checkpoint; ``attempt`` is None if there was
    none."""

    at_s: float
    attempt: str | None
    state: int | None


class Checker:
    """Checks the invariants of one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.chunks = world.schedule.chunks
        self.history: list[Moment] = []
        self.acknowledged = 0
        """Index in ``history`` of the newest acknowledged checkpoint, or deletion."""
        self.looked = 0
        self.doomed: set[str] = set()
        """Attempts whose checkpoints a prune has chosen to delete."""
        self.lenders: set[str] = set()
        """Committed attempts: their images may be copied from."""
        self._manifest: bytes | None = None
        self._committing: dict[tuple[str, str], str] = {}
        """The process that claimed an attempt, by folder and attempt."""
        world.on_commit = self.committing
        world.on_copy = self.copied
        world.on_change = self.changed
        world.on_power_cut = self.power_cut

    def of(self, world: World) -> Checker:
        """Return a checker with the same knowledge for ``world``, which continues this one."""
        other = Checker(world)
        other.history, other.acknowledged, other.doomed = (
            list(self.history),
            self.acknowledged,
            set(self.doomed),
        )
        other._manifest, other.lenders = self._manifest, set(self.lenders)
        return other

    def prepare(self) -> None:
        """Store the checkpoints that exist when the run begins."""
        self._plant(OTHER, "20251231T000000-0000000b", OTHER_STATE, 1)
        if self.world.schedule.before:
            self._plant(MAIN, "20251231T000000-0000000a", 0, 2)
        saves = [plan for plan in self.world.schedule.actors if plan.base and plan.kind == "save"]
        if saves:
            self._plant(EARLIER, "20251231T000000-0000000c", EARLIER_STATE, saves[0].world)
            attempt = "20251231T000000-0000000d"
            self._plant(UNCOMMITTED, attempt, EARLIER_STATE, saves[-1].world, committed=False)
        self._look()

    def _plant(
        self, root: str, attempt: str, state: int, world: int, *, committed: bool = True
    ) -> None:
        told = expected(state, world, self.chunks)
        self.world.plant(f"{root}/data/{attempt}/fate", b"")
        for rank, data in told.images.items():
            self.world.plant(f"{root}/data/{attempt}/{rank}.safetensors", data)
        if committed:
            self.lenders.add(attempt)
            self.world.plant(f"{root}/manifest.safetensors", manifest_of(told, attempt))

    def changed(self, path: str) -> None:
        """Check the checkpoint after a name appeared, disappeared or got other content."""
        path = path.lstrip("/")
        if path == f"{MAIN}/manifest.safetensors":
            self._look()
        elif self.history and path.startswith(f"{MAIN}/data/{self.history[-1].attempt}/"):
            self.check_whole()
        elif path.startswith((OTHER, EARLIER)):
            self.check_whole()  # a change of a lender must not affect a borrower

    def copied(self, path: str) -> None:
        """Check that bytes copied into an upload come from a committed checkpoint."""
        attempt = path.partition("/data/")[2].partition("/")[0]
        if attempt not in self.lenders:
            raise Violation(f"{PROCESS.get()} borrows from {path}, which was never committed")

    def power_cut(self) -> None:
        """Raise Violation unless the acknowledged checkpoint, or a later one, survived."""
        before = len(self.history)
        self._manifest = None
        self._look(again=True)
        found = self.history.pop() if len(self.history) > before else self.history[-1]
        survived = [i for i, m in enumerate(self.history) if m.attempt == found.attempt]
        if not survived or survived[-1] < self.acknowledged:
            known = self.history[self.acknowledged]
            raise Violation(
                f"after a power cut the checkpoint is {_named(found)}; somebody was told of "
                f"{_named(known)} before"
            )
        self.history.append(Moment(self.world.loop.now_s, found.attempt, found.state))
        self.acknowledged = len(self.history) - 1  # it is durable now

    def _look(self, *, again: bool = False) -> None:
        data = self.world.file(f"{MAIN}/manifest.safetensors")
        if data is None:
            attempt = state = None
            self._manifest = None
            if not again and self.acknowledged == len(self.history) - 1:
                self._may_be_gone()
        else:
            if self._manifest == data and not again:
                return
            self._manifest = bytes(data)
            manifest, told = self._named()
            attempt, state = manifest.attempt, told.state
        if attempt is not None:
            self.lenders.add(attempt)
        if not self.history or again or self.history[-1].attempt != attempt:
            self.history.append(Moment(self.world.loop.now_s, attempt, state))
        self.check_whole()

    def _named(self) -> tuple[Manifest, Expected]:
        assert self._manifest is not None
        try:
            manifest, told = identity(self._manifest)
        except Exception as error:
            raise Violation(f"the manifest cannot be read: {error!r}") from error
        for state, world, chunks in self._possible():
            if identity_of(state, world, chunks) == told:
                return manifest, expected(state, world, chunks)
        raise Violation(
            f"the manifest names attempt {manifest.attempt}, and is none that any save would write"
        )

    def _possible(self) -> Iterator[tuple[int, int, int]]:
        """Yield the possible saves: state, ranks, chunks."""
        for plan in self.world.schedule.actors:
            if plan.kind == "save" and not plan.odd:
                yield plan.state, plan.world, self.chunks
        yield from ((0, 2, self.chunks), (OTHER_STATE, 1, self.chunks), (LAST, 1, FEW))

    def check_whole(self) -> tuple[int, int, int, bytes] | None:
        """Raise Violation unless all images that the manifest names exist, byte for byte.

        Return state, ranks, chunks, and the manifest's bytes if it spreads images over files.
        Return None if there is no checkpoint.
        """
        self.looked += 1
        if self._manifest is None:
            return None
        manifest, told = self._named()
        attempt = manifest.attempt
        for row, (rank, data) in enumerate(told.images.items()):
            found = self._image(manifest, row, len(data))
            if found != data:
                what = (
                    "is missing"
                    if found is None
                    else f"has other bytes ({len(found)} of {len(data)})"
                )
                raise Violation(f"the manifest names attempt {attempt}, whose image {rank} {what}")
        spread = b"" if manifest.extents is None else self._manifest
        return told.state, told.world, told.chunks, spread

    def _image(self, manifest: Manifest, row: int, nbytes: int) -> bytes | bytearray | None:
        """Return the bytes of an image, or None if a file is missing."""
        keys = [f"{MAIN}/{file.key}" for file in manifest.files]
        if manifest.extents is None:
            return self.world.file(keys[row])
        found = b""
        for part in manifest.file_ranges(row, 0, nbytes):
            data = self.world.file(keys[part.file])
            if data is None:
                return None
            found += data[part.start : part.start + part.nbytes]
        return found

    def unused(self) -> list[str]:
        """List image and link files of the current attempt that its manifest does not name."""
        manifest, _ = self._named()
        named = {f"{MAIN}/{file.key}" for file in manifest.files}
        folder = f"{MAIN}/data/{manifest.attempt}/"
        there = [path for path in self.world.files() if path.startswith(folder)]
        return [p for p in there if p.endswith((".safetensors", ".blocks")) and p not in named]

    def committing(self, root: str, attempt: str) -> None:
        """Raise Violation if two processes claim one attempt. Otherwise one of them could settle
        it while the other puts its manifest."""
        process = str(PROCESS.get())
        other = self._committing.setdefault((root, attempt), process)
        if other != process:
            raise Violation(f"{other} and {process} have both claimed attempt {attempt}")

    def saved(self, plan: ActorPlan, attempt: str, began_s: float) -> None:
        """Check a save or a copy that has returned, and count it as acknowledged."""
        if plan.odd:
            raise Violation(f"{plan.name} returned, and its ranks do not agree on who holds what")
        at = [i for i, m in enumerate(self.history) if m.attempt == attempt]
        if not at or (plan.kind == "save" and self.history[at[-1]].state != plan.state):
            raise Violation(
                f"{plan.name} returned, and its attempt {attempt} never was the checkpoint"
            )
        self.acknowledged = max(self.acknowledged, at[-1])
        if self.history[-1].attempt is None:
            self._may_be_gone()

    def _may_be_gone(self) -> None:
        """Raise Violation if the last checkpoint is gone and no prune has chosen it."""
        last = next((m for m in reversed(self.history) if m.attempt is not None), None)
        if last is not None and last.attempt not in self.doomed:
            raise Violation(f"{_named(last)} was deleted, and no pruning has chosen it")

    def during(self, began_s: float) -> list[Moment]:
        """List the checkpoints since ``began_s``."""
        first = bisect.bisect_left([m.at_s for m in self.history], began_s)
        return self.history[max(0, first - 1) :]

    def loaded(self, name: str, state: int, began_s: float) -> None:
        """Raise Violation unless ``state`` was the checkpoint since the reader began."""
        there = {m.state for m in self.during(began_s)}
        if state not in there:
            raise Violation(f"{name} got state {state} while the checkpoint was {there}")


def manifest_of(told: Expected, attempt: str) -> bytes:
    """Encode its manifest with the name of an attempt."""
    key = (told.state, told.world, told.chunks, attempt)
    if key not in _manifests:
        _manifests[key] = replace(told.manifest, attempt=attempt).encode()
    return _manifests[key]


_manifests: dict[tuple[int, int, int, str], bytes] = {}


def _named(moment: Moment) -> str:
    return "none" if moment.attempt is None else f"attempt {moment.attempt} (state {moment.state})"
