"""The promises of a weight channel, checked with the values that its trainers have published.

The truth is a copy of the weights of each push. It is compared with the weights of engines element
by element: no digest of the product takes part.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from holdfast.storage.format.manifest import MANIFEST_KEY, Manifest
from holdfast.storage.weights.channel import HEAD_KEY, LEASE_S, Head

from .checker import Violation
from .loop import PROCESS, Process
from .world import World

ROOT = "run/channel"
_IN_VERSION = re.compile(rf"/*{ROOT}/(?P<sequence>[0-9]{{8}})/(?P<key>.+)")
_SLEEPS = {"pause", "cut", "hang"}
Values = Mapping[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Push:
    """One push of a trainer, on all its ranks."""

    trainer: str
    version: int
    values: Values


@dataclass(frozen=True, eq=False)
class PublishedVersion:
    """A version whose manifest has been visible."""

    sequence: int
    attempt: str
    push: Push
    manifest: Manifest


@dataclass(frozen=True)
class _Lease:
    """A lease under which a living subscriber may read ``sequence``."""

    key: str
    sequence: int
    process: Process


@dataclass(eq=False)
class Truth:
    """The versions of a channel in one world, and the leases of those who read it."""

    world: World
    published: dict[int, PublishedVersion] = field(default_factory=dict)
    pushes: dict[str, Push] = field(default_factory=dict)
    """Pushes by attempt."""
    acknowledged: int = 0
    """The newest acknowledged version."""
    acknowledging: set[str] = field(default_factory=set)
    """Trainers whose leader received an acknowledgement for one of its versions."""
    leases: dict[str, _Lease] = field(default_factory=dict)
    deleted: set[int] = field(default_factory=set)
    returned: set[int] = field(default_factory=set)
    """Deleted versions whose manifest a publisher put later, after it had slept. Nobody reads or
    deletes them."""
    overtaken: list[Push] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.world.on_change = self.changed
        self.world.on_commit = self.committing
        self.world.on_power_cut = self.power_cut

    def of(self, world: World) -> Truth:
        """Return the truth for a copy of this world without living processes."""
        return Truth(
            world,
            dict(self.published),
            dict(self.pushes),
            self.acknowledged,
            deleted=set(self.deleted),
            returned=set(self.returned),
        )

    @property
    def newest(self) -> int:
        """Return the newest version, 0 for none."""
        return max(self.published, default=0)

    def committing(self, root: str, attempt: str) -> None:
        """Note the attempt of the current push: a trainer has one in flight."""
        self.pushes[attempt] = PROCESS.get().pushing  # type: ignore[union-attr]

    def changed(self, path: str) -> None:
        """Check a file of a version that appears, or vanishes."""
        if path.lstrip("/") == f"{ROOT}/{HEAD_KEY}":
            self._announced()
            return
        match = _IN_VERSION.fullmatch(path)
        if match is None:
            return
        sequence = int(match["sequence"])
        data = self.world.file(path.lstrip("/"))
        if data is None:
            self._gone(sequence, match["key"])
        elif match["key"] == MANIFEST_KEY:
            self._appeared(sequence, bytes(data))

    def _appeared(self, sequence: int, data: bytes) -> None:
        manifest = Manifest.decode(data)
        attempt = manifest.attempt
        known = self.published.get(sequence)
        if known is not None and self._is_overtaken(sequence):
            self.returned.add(sequence)
            self.overtaken.append(self.pushes[attempt])
            return
        if known is not None:
            if known.attempt != attempt:
                raise Violation(f"version {sequence} was {known.attempt}, and is now {attempt}")
            return
        push = self.pushes[attempt]
        self._check_publisher(push)
        if sequence != self.newest + 1:
            raise Violation(f"version {sequence} was published after version {self.newest}")
        if self.published and push.version <= self.published[self.newest].push.version:
            raise Violation(f"{push.version} is published again, or after a newer one")
        self.published[sequence] = PublishedVersion(sequence, attempt, push, manifest)

    def _announced(self) -> None:
        """Check that the head names only published versions."""
        head = self.head()
        if head is not None and head.sequence > self.newest:
            raise Violation(f"the head names version {head.sequence}; {self.newest} is the newest")

    def _is_overtaken(self, sequence: int) -> bool:
        """Return whether a version was deleted and hidden from readers, and a publisher has slept
        for a while."""
        head = self.head()
        slept = self.world.struck.keys() & _SLEEPS
        is_hidden = head is not None and sequence < head.offered
        return bool(slept) and sequence in self.deleted and is_hidden

    def _check_publisher(self, push: Push) -> None:
        """Raise Violation if a publisher publishes again after another one has followed it. Before
        its first acknowledgement it may, because it does not know that it has published."""
        line = [self.published[sequence].push.trainer for sequence in sorted(self.published)]
        if push.trainer in self.acknowledging and push.trainer in line and line[-1] != push.trainer:
            raise Violation(f"{push.trainer} publishes after {line[-1]}, and was not told of it")

    def _gone(self, sequence: int, key: str) -> None:
        version = self.published.get(sequence)
        process = PROCESS.get()
        if version is None or (process is not None and not process.alive):
            return  # a power cut removed it
        if key != MANIFEST_KEY and not key.startswith(f"data/{version.attempt}/"):
            return
        if ".safetensors" not in key:
            return  # not weights: its marker, for example
        self.deleted.add(sequence)
        for reader, read in self._read().items():
            if sequence in self.needed_for(read):
                raise Violation(f"{key} of version {sequence} is gone, and {reader} needs it")

    def _read(self) -> dict[str, int]:
        """Return the versions that may be read now, by reader."""
        found = {"whoever comes": self.newest}
        head = self.head()
        if head is not None:
            for sequence in range(head.offered, head.sequence + 1):
                found[f"a reader of the offered version {sequence}"] = sequence
        for lease in self.leases.values():
            if lease.process.alive and self._is_live(lease):
                found[str(lease.process)] = lease.sequence
        return found

    def _is_live(self, lease: _Lease) -> bool:
        put_s = self.world.modified_s(f"{ROOT}/{lease.key}")
        return put_s is not None and self.world.loop.now_s - put_s < LEASE_S

    def head(self) -> Head | None:
        """Return the head as it is stored."""
        data = self.world.file(f"{ROOT}/{HEAD_KEY}")
        return None if data is None else Head.decode(bytes(data))

    def needed_for(self, sequence: int) -> set[int]:
        """Return the versions that a new reader needs in order to read this one."""
        needed: set[int] = set()
        while sequence in self.published and sequence not in needed:
            needed.add(sequence)
            bases = self.published[sequence].manifest.bases
            if bases is not None and not bases.whole:
                sequence = (bases.anchor if bases.to_anchor else bases.previous).sequence
        return needed

    def power_cut(self) -> None:
        """Forget lost versions that were not acknowledged. All processes that saw them are dead."""
        for sequence in sorted(self.published, reverse=True):
            if self.world.file(f"{ROOT}/{sequence:08d}/{MANIFEST_KEY}") is not None:
                break
            if sequence in self.deleted:
                break
            if sequence <= self.acknowledged:
                raise Violation(f"a power cut took version {sequence}, which was acknowledged")
            del self.published[sequence]

    def told(self, push: Push) -> None:
        """Check that an acknowledged push is published."""
        found = [one.sequence for one in self.published.values() if one.push is push]
        if push in self.overtaken:
            return
        if not found:
            raise Violation(f"{push.trainer} is told that {push.version} is published: it is not")
        self.acknowledged = max(self.acknowledged, found[0])
        if getattr(PROCESS.get(), "rank", 0) == 0:
            self.acknowledging.add(push.trainer)

    def lease(self, key: str, sequence: int) -> None:
        """Record that a subscriber reads a version under a lease."""
        process = PROCESS.get()
        assert process is not None
        if gone := sorted(self.needed_for(sequence) & self.deleted - self.returned):
            raise Violation(f"{process} gets a lease of {sequence}, and {gone} are deleted")
        self.leases[key] = _Lease(key, sequence, process)

    def release(self, key: str) -> None:
        """Record that a subscriber has finished reading."""
        self.leases.pop(key, None)

    def check_space(self, keep: int, anchor: int) -> None:
        """Check that old weights have been deleted. A publisher that has slept may leave a record
        of its times and a temporary file."""
        head = self.head()
        assert head is not None
        last = self.newest - keep - 1  # withdrawn with the push before
        needed = set[int]().union(*map(self.needed_for, range(max(1, last), self.newest + 1)))
        first = min(needed)
        weights = [path for path in self.world.files() if ".safetensors" in path]
        if self.world.struck.keys() & _SLEEPS:
            weights = [path for path in weights if "/." not in path]
        matches = map(_IN_VERSION.fullmatch, weights)
        left = {int(match["sequence"]) for match in matches if match} - self.returned
        too_old = sorted(n for n in left if n < first)
        if too_old or len(left) > keep + anchor + 2:
            raise Violation(f"of versions before {first}, {too_old} are left; kept: {sorted(left)}")


def difference(found: Values, wanted: Values) -> str:
    """Return the names of the tensors that differ, with a few elements; "" if all are equal."""
    lines = []
    for name, values in wanted.items():
        one, other = (tensor.view(torch.uint8) for tensor in (found[name], values))
        if not torch.equal(one, other):
            at = (one != other).nonzero()[:3].flatten().tolist()
            lines.append(f"{name} at bytes {at}")
    return ", ".join(lines)
