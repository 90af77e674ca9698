"""Promises of keepers to trainers, and the invariants that follow.

A promise begins with an event that a keeper sends, and holds while its preconditions do. For an
agreed step, all its images must exist. For a protected step, no group may lose more members than it
tolerates. A member with damaged bytes of a protected step counts as lost.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast.errors import DamagedError
from holdfast.planner.parity import parity_of
from holdfast.storage.arenas.label import GenerationId, Label
from holdfast.storage.keeper.decisions.choice import Choice

from .keeper_host import HostKeeper, Job, Trainer
from .keeper_peers import PIECES, Memory, Slot, State

if TYPE_CHECKING:
    from .keeper_hosts import Hosts


class Violation(AssertionError):
    """A promise was broken."""


@dataclass(eq=False)
class Promise:
    """The promise that a restart finds this generation.

    ``holders``: keepers with each rank's image
    ``groups``: per group, the number of members it may lose, and its members (None if lost)
    ``others_lost``: number of other keepers lost since
    """

    id: GenerationId
    step: int
    holders: dict[int, list[HostKeeper]]
    groups: list[tuple[int, list[HostKeeper | None]]] = field(default_factory=list)
    others_lost: int = 0

    @property
    def is_void(self) -> bool:
        """True once every keeper that held some rank's image is gone with its memory."""
        return any(not any(one.alive for one in each) for each in self.holders.values())

    @property
    def is_used_up(self) -> bool:
        """True if some group has lost as many members as it may."""
        return any(
            sum(one is None or not one.alive for one in each) + self.others_lost >= may
            for may, each in self.groups
        )


class Promises:
    """The history of a run, the promises of keepers, and what these promises rely on.

    ``lineage``: the job that computed the state of each step
    ``storage``: the job of each step in storage
    ``diverged``: jobs and steps whose replicas differ
    ``sealed``: the keeper that has sealed the image of each rank
    ``written``: the images in storage by attempt and rank
    ``damaged``: hosts and generations with a flipped bit
    ``told``: the newest generation of each kind of event, by host
    ``awaited``: keepers and generations whose outcome trainers still wait for
    """

    def __init__(self, seed: int, log: Callable[[str], None] | None = None) -> None:
        self.log = log
        self.random = random.Random(seed)
        self.is_service = seed % 4 == 2
        """True if keepers are services, whose memory outlives them."""
        self.rests = False
        """True if all trainers idle."""
        self.counts: Counter[str] = Counter()
        self.lineage: dict[int, int] = {}
        self.storage: dict[int, int] = {}
        self.diverged: set[tuple[int, int]] = set()
        self.budget_nbytes = 0
        self.running: Job | None = None
        self.trainers: list[Trainer] = []
        self.epoch_jobs: dict[int, Job] = {}
        self.sealed: dict[GenerationId, dict[int, HostKeeper]] = {}
        self.written: dict[tuple[str, int], list[State | None]] = {}
        self.damaged: set[tuple[str, GenerationId]] = set()
        self.told: dict[str, dict[str, GenerationId]] = {}
        self.awaited: set[tuple[HostKeeper, GenerationId]] = set()
        self.agreed: Promise | None = None
        self.guarded: Promise | None = None
        self.newest_guarded = GenerationId(-1, -1)
        """Newest generation announced as protected. A restarted keeper may announce older ones."""

    def keeper_of(self, name: str) -> HostKeeper | None:
        """Return the keeper that can be reached by that name now."""
        raise NotImplementedError

    def count(self, what: str, details: str = "") -> None:
        """Count an event, and log it."""
        self.counts[what] += 1
        if self.log is not None:
            self.log(f"{what} {details}".rstrip())

    def computed(self, step: int, job: Job) -> None:
        """Record a step of the running job. Its replicas may differ."""
        if self.lineage.get(step) == job.number:
            return
        self.lineage[step] = job.number
        if self.random.random() < 0.08 and job.world > 1:
            self.diverged.add((job.number, step))

    def committed(self, world: int, written: list[list[State | None]]) -> None:
        """Record a checkpoint in storage."""
        states = {piece for pieces in written for piece in pieces}
        ranks = sorted(state[2] for state in states if state)
        if None in states or ranks != list(range(world)):
            raise Violation(f"storage holds {written}")
        found = {state[:2] for state in states if state}
        if len(found) != 1:
            raise Violation(f"storage holds a mixture: {written}")
        job, step = found.pop()
        self.count("flushed", f"step {step}")
        if self.lineage.get(step) == job:
            self.storage[step] = job

    def newest_stored(self) -> int:
        """Return the newest step in storage that no resume has dropped."""
        return max((s for s, j in self.storage.items() if self.lineage.get(s) == j), default=0)

    def intact(self, slot: Slot, pieces: list[State | None]) -> bool:
        """Return whether an image matches its label and its pages."""
        try:
            label = Label.decode(slot.encoded)
        except DamagedError:
            return False
        return repr(pieces).encode() == label.digests and slot.memory.pages == tuple(pieces)

    def whole(self, candidate: Choice, states: list[list[State | None]]) -> tuple[int, int]:
        """Return the step and the job of the images, which must be the same for all ranks."""
        found = {state for pieces in states for state in pieces}
        steps = {(state[1], state[0]) for state in found if state}
        ranks = {state[2] for state in found if state}
        if None in found or len(steps) != 1 or ranks != set(range(candidate.world)):
            raise Violation(f"a restart resumes from {states}")
        self.count("resumed from memory")
        return steps.pop()

    def raises(
        self, found: tuple[int, int] | None, failed: list[int], touched: list[State | None]
    ) -> bool:
        """Return whether a rank refuses to resume: a load failed, and no intact step was found."""
        return found is None and bool(failed)

    def all_raise(
        self,
        found: tuple[int, int] | None,
        failed: list[int],
        touched: Iterable[list[State | None]],
    ) -> bool:
        """Return whether all ranks refuse to resume. ``touched``: pieces left by loads, by rank."""
        raising = {self.raises(found, failed, pieces) for pieces in touched}
        if len(raising) > 1:
            raise Violation("one rank raises, and another resumes")
        return True in raising

    def check_filled(
        self, found: tuple[int, int] | None, filled: dict[int, list[State | None]]
    ) -> None:
        """Check that each state is that of the step to resume from, or untouched."""
        step, number = found or (0, 0)
        for rank, pieces in filled.items():
            if set(pieces) != {(number, step, rank)}:
                raise Violation(f"step {step} is gone on from, and rank {rank} holds {pieces}")

    def told_agreed(self, keeper: HostKeeper, id: GenerationId) -> None:
        """Check that a generation may be announced as agreed, and promise it."""
        job, sealed = self.epoch_jobs[id.epoch], self.sealed.get(id, {})
        if sealed.keys() != set(range(job.world)):
            raise Violation(f"{id} is agreed, and {sorted(sealed)} of {job.world} have sealed it")
        if (job.number, id.step) in self.diverged:
            raise Violation(f"{id} is agreed, and replicas have diverged")
        for held in keeper.images(id):
            self.check_image(keeper, held, id)
        self.count("told agreed", f"{id} by {keeper}")
        told = self.told.setdefault("agreed", {})
        told[keeper.host.name] = max(id, told.get(keeper.host.name, id))
        if self.guarded is not None and self.guarded.is_used_up and id.step > self.guarded.step:
            self.guarded = None  # the promise would not survive one more loss
        if job is not self.running or not self.is_on_line(id):
            return  # a later job has resumed from some step
        if self.agreed is None or id.step > self.agreed.step:
            holders = {rank: [by] for rank, by in sealed.items()}
            self.agreed = Promise(id, id.step, holders)

    def told_guarded(self, keeper: HostKeeper, id: GenerationId) -> None:
        """Promise a generation even if hosts are lost."""
        self.count("told guarded", f"{id} by {keeper}")
        told = self.told.setdefault("guarded", {})
        told[keeper.host.name] = max(id, told.get(keeper.host.name, id))
        if (
            self.epoch_jobs[id.epoch] is self.running
        ):  # else a later job has taken up from somewhere
            self.promise_guarded(id)

    def promise_guarded(self, id: GenerationId) -> None:
        """Promise a generation while no group loses too many members. Members without their part of
        it count as lost from the start."""
        job = self.epoch_jobs[id.epoch]
        if id < self.newest_guarded or not self.is_on_line(id):
            return
        if self.guarded is not None and id.step <= self.guarded.step:
            return
        self.newest_guarded = id
        groups = []
        for group in job.meeting.groups:
            members: list[HostKeeper | None] = []
            for place, name in enumerate(group.names):
                member = self.keeper_of(name)
                problem = "it is gone"
                if member is not None:
                    problem = self.lacks(member, id, group.ranks[place])
                members.append(None if problem else member)
                sealed = {self.sealed[id].get(rank) for rank in group.ranks[place]}
                is_new = member is not None and id in member.adopted
                if problem and sealed == {member} and not is_new and not self.has_flipped(id):
                    raise Violation(f"{id} is told guarded, and {name} has {problem}")
            groups.append((parity_of(group.mode), members))
        self.guarded = Promise(id, id.step, {}, groups)

    def note_protected(self, keeper: HostKeeper) -> None:
        """Promise a generation protected in an earlier epoch, once all keepers know of it. No
        trainer is told."""
        newer = keeper.agreement.protected
        if newer is not None and self.guarded is not None and newer.step > self.guarded.step:
            self.promise_guarded(newer)

    def lacks(self, keeper: HostKeeper, id: GenerationId, ranks: Sequence[int]) -> str:
        """Return the missing part of a protected generation on a member; "" if complete."""
        parity = keeper.guards._held.get(id)
        if parity is None:
            return "no parity"
        job = self.epoch_jobs[id.epoch]
        for piece in parity.pieces:  # type: ignore[attr-defined]
            for rank, state in piece.items():
                if state != (job.number, id.step, rank):
                    return f"parity of {state} for rank {rank}"
        held = {image.label.rank for image in keeper.images(id) if image.label is not None}
        return "" if held >= set(ranks) else f"the images of {held} alone"

    def check_image(self, keeper: HostKeeper, slot: Slot, id: GenerationId) -> None:
        """Check that a labelled image holds the state of its generation, unless it was damaged."""
        assert slot.label is not None
        expected = (self.epoch_jobs[id.epoch].number, id.step, slot.label.rank)
        if set(slot.memory.pieces) != {expected} and (keeper.host.name, id) not in self.damaged:
            raise Violation(f"{id} is agreed, and {keeper} has {slot.memory.pieces}")

    def is_on_line(self, id: GenerationId) -> bool:
        """Return whether a generation belongs to the history of the running job."""
        job = self.epoch_jobs[id.epoch]
        return self.lineage.get(id.step) == job.number

    def check_choice(self, id: GenerationId) -> None:
        """Check that a restart never considers a generation of an abandoned branch."""
        if not self.is_on_line(id):
            raise Violation(f"{id} was dropped, and may be gone on from")

    def mended(self, keeper: HostKeeper, id: GenerationId) -> None:
        """Mark a keeper as undamaged again, once all its bytes of a generation are intact."""
        if not is_damaged(keeper, id):
            self.damaged.discard((keeper.host.name, id))

    def has_flipped(self, id: GenerationId) -> bool:
        """Return whether any bit of a generation has flipped, anywhere."""
        return any(other == id for _, other in self.damaged)

    def holds(self, promise: Promise, names: set[str]) -> bool:
        """Return whether the preconditions of a promise hold, given the reachable keepers."""

        def is_there(keeper: HostKeeper | None) -> bool:
            return keeper is not None and keeper.alive and keeper.host.name in names

        def is_well(keeper: HostKeeper | None) -> bool:
            assert keeper is not None
            return is_there(keeper) and (keeper.host.name, promise.id) not in self.damaged

        if promise.holders and all(any(map(is_well, of)) for of in promise.holders.values()):
            return True
        if not promise.groups:
            return False
        return all(
            sum(of is None or not is_well(of) for of in each) + promise.others_lost <= may
            for may, each in promise.groups
        )

    def lost(self, keeper: HostKeeper) -> None:
        """Record the loss of a keeper with its memory."""
        members = [one for _, group in self.guarded.groups for one in group] if self.guarded else []
        if self.guarded is not None and keeper not in members:
            self.guarded.others_lost += 1

    def check_grant(self, trainer: Trainer, memory: Memory, nbytes: int) -> None:
        """Check that memory about to be filled is neither in use nor promised."""
        keeper = trainer.host.keeper
        if memory.nbytes != nbytes:
            raise Violation(f"a slot of {memory.nbytes} bytes for an image of {nbytes}")
        users = +memory.users
        if not keeper.keeps_for_flush(memory.generation):
            users.pop("flush", None)
        if users:
            raise Violation(f"a slot is to be filled, and in use: {dict(users)}")
        if any(memory in of for of in keeper.offered.values()):
            raise Violation(f"{memory.generation} is offered, and written over by {keeper}")
        self.note_protected(keeper)
        for promise in (self.agreed, self.guarded):
            if promise is None or promise.id != memory.generation or promise.is_void:
                continue
            members = [one for _, group in promise.groups for one in group]
            relied_on = keeper in members or any(keeper in of for of in promise.holders.values())
            if relied_on and self.knows_better(keeper, promise.id):
                continue
            if any(other.label.rank == trainer.rank for other in keeper.images(promise.id)):
                continue  # the image in this slot was dropped before, and rebuilt in another
            if relied_on and not self.has_flipped(promise.id):
                raise Violation(f"{promise.id} is promised, and written over by {keeper}")
        for other in self.trainers:
            if other is not trainer and other.alive and memory in other.mapped.values():
                raise Violation(f"{other} can write to a slot of another")
        newest = self.running
        is_over = newest is not None and trainer.job is not newest
        if is_over and keeper.generations.epoch >= newest.epoch >= 0:
            raise Violation(f"job {trainer.job.number} is over, and was given a slot")

    def knows_better(self, keeper: HostKeeper, id: GenerationId) -> bool:
        """Return whether a keeper without a rank of this job retains a later step instead. It never
        learned from which step the job resumed."""
        newest, job = keeper.generations.newest_agreed, self.running
        is_of_job = job is not None and keeper.host in job.hosts
        return not is_of_job and newest is not None and newest > id

    def check_budget(self, keeper: HostKeeper) -> None:
        """Check that a keeper stays within its budget."""
        held = sum(slot.memory.nbytes for slot in keeper.slots.values())
        if held > self.budget_nbytes:
            raise Violation(f"{held} bytes are held, and {self.budget_nbytes} allowed")

    def check_commit(self, keeper: HostKeeper, fragments: Sequence[tuple[Label, str]]) -> None:
        """Check that a leader may commit: all parts are written, and no resume that it knows of has
        dropped the generation."""
        id, generations = fragments[0][0].generation, keeper.generations
        if generations.epoch > id.epoch and not generations.is_agreed(id):
            raise Violation(
                f"{id} is committed, in epoch {generations.epoch}, which has dropped it"
            )
        for label, attempt in fragments:
            if (attempt, label.rank) not in self.written:
                raise Violation(f"{id} is committed, and nobody has written rank {label.rank}")

    def commit(self, fragments: Sequence[tuple[Label, str]]) -> None:
        """Record a commit."""
        parts = [self.written[attempt, label.rank] for label, attempt in fragments]
        self.committed(fragments[0][0].world, parts)


def is_damaged(keeper: HostKeeper, id: GenerationId) -> bool:
    """Return whether a keeper holds damaged bytes of a generation."""
    parity: Any = keeper.guards._held.get(id)
    if parity is not None and any(None in piece.values() for piece in parity.pieces):
        return True
    return any(_is_flipped(slot) for slot in keeper.images(id))


def _is_flipped(slot: Slot) -> bool:
    try:
        Label.decode(slot.encoded)
    except DamagedError:
        return True
    return None in slot.memory.pieces


def flip(world: Hosts, keeper: HostKeeper, only: GenerationId | None = None) -> bool:
    """Flip a bit in the memory of a keeper; if ``only`` is given, in that generation. Return
    whether there was a bit to flip."""
    draw = world.random
    kind = draw.choice(["image", "label", "parity"])
    sealed = [
        held
        for held in keeper.slots.values()
        if held.label is not None and only in (None, held.label.generation)
    ]
    parities: list[Any] = [
        parity for parity in keeper.guards._held.values() if only in (None, parity.generation)
    ]
    if kind == "parity" and parities:
        parity = draw.choice(parities)
        piece = draw.choice(parity.pieces)
        piece[draw.choice(sorted(piece))] = None
        id = parity.generation
    elif kind != "parity" and sealed:
        held = draw.choice(sealed)
        assert held.label is not None
        id = held.label.generation
        if kind == "image":
            held.memory.pieces[draw.randrange(PIECES)] = None
        else:
            held.encoded = held.encoded[:-1] + bytes([held.encoded[-1] ^ 1])
    else:
        return False
    world.damaged.add((keeper.host.name, id))
    world.count("flipped", f"{kind} of {id} at {keeper}")
    return True


def flip_protected(world: Hosts) -> bool:
    """Flip bits of the protected step at one or two members of a group. Return whether any
    flipped."""
    guarded = world.guarded
    if guarded is None or not guarded.groups:
        return False
    _, members = world.random.choice(guarded.groups)
    living = [keeper for keeper in members if keeper is not None and keeper.alive]
    chosen = world.random.sample(living, min(len(living), world.random.choice([1, 1, 2])))
    flipped = [flip(world, keeper, guarded.id) for keeper in chosen]
    return any(flipped)


def flip_all(world: Hosts) -> bool:
    """Flip bits of all steps, on every host. Return whether any flipped."""
    flipped = [
        flip(world, host.keeper, id)
        for host in world.placed
        for id in sorted({s.label.generation for s in host.keeper.slots.values() if s.label})
    ]
    return any(flipped)
