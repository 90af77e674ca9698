"""What keepers of several hosts promise to trainers, and what must hold because of that.

What is promised is known from what keepers tell, and holds as long as what it relies on is there: a
step that is agreed on, while all its images are; one that is guarded, while each group has lost no
more members than it may.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from holdfast.planner.parity import parity_of
from holdfast.storage.arenas.label import GenerationId, Label

from .keeper_host import HostJob, HostKeeper, HostTrainer
from .keeper_strikes import is_struck
from .keepers import Held, Memory, Record, SimulatedKeeper, State, Trainer, Violation

__all__ = ["Promise", "Promises"]


@dataclass(eq=False)
class Promise:
    """That a restart finds this generation. ``holders``: of each rank's image; ``groups``: how many
    members each may lose, and the keepers that are its members, None for one that is lost;
    ``others_lost``: how many keepers were lost since that are none of them."""

    id: GenerationId
    step: int
    holders: dict[int, list[HostKeeper]]
    groups: list[tuple[int, list[HostKeeper | None]]] = field(default_factory=list)
    others_lost: int = 0

    @property
    def is_used_up(self) -> bool:
        """Whether a group has lost as many members as it may."""
        return any(
            sum(one is None or not one.alive for one in each) + self.others_lost >= may
            for may, each in self.groups
        )


class Promises(Record):
    """What was told, and what it relies on."""

    def __init__(self, seed: int, log: Callable[[str], None] | None = None) -> None:
        super().__init__(seed, log)
        self.budget_nbytes = 0
        self.running: HostJob | None = None
        self.trainers: list[HostTrainer] = []
        self.epoch_jobs: dict[int, HostJob] = {}
        self.sealed: dict[GenerationId, dict[int, HostKeeper]] = {}
        """Which keeper has sealed the image of each rank."""
        self.written: dict[tuple[str, int], list[State | None]] = {}
        """What is in storage for each attempt, of each rank."""
        self.damaged: set[tuple[str, GenerationId]] = set()
        """Where a bit has flipped."""
        self.told: dict[str, dict[str, GenerationId]] = {}
        """The newest that was told, of each kind, by host."""
        self.awaited: set[tuple[HostKeeper, GenerationId]] = set()
        """What trainers have sealed, and have not been told the outcome of since."""
        self.agreed: Promise | None = None
        self.guarded: Promise | None = None
        self.newest_guarded = GenerationId(-1, -1)
        """The newest that was told: a keeper that has begun anew may be told older ones late."""

    def keeper_of(self, name: str) -> HostKeeper | None:
        """The one that can be reached by that name now."""
        raise NotImplementedError

    def told_agreed(self, keeper: HostKeeper, id: GenerationId) -> None:
        """Trainers rely on this generation from now on."""
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
            self.guarded = None  # the next loss would be one too many, and this one outlives none
        if job is not self.running or not self.is_on_line(id):
            return  # a later job has taken up from somewhere
        if self.agreed is None or id.step > self.agreed.step:
            holders = {rank: [by] for rank, by in sealed.items()}
            self.agreed = Promise(id, id.step, holders)

    def told_guarded(self, keeper: HostKeeper, id: GenerationId) -> None:
        """Trainers rely on it even where hosts are lost."""
        self.count("told guarded", f"{id} by {keeper}")
        told = self.told.setdefault("guarded", {})
        told[keeper.host.name] = max(id, told.get(keeper.host.name, id))
        if (
            self.epoch_jobs[id.epoch] is self.running
        ):  # else a later job has taken up from somewhere
            self.promise_guarded(id)

    def promise_guarded(self, id: GenerationId) -> None:
        """A restart finds this generation, or a newer one, as long as each group lacks no more members
        than it may: those that have their part of it now are noted."""
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
        """What was guarded in a former epoch takes the place of what was before it once all keepers
        know, though no trainer is told."""
        newer = keeper.agreement.protected
        if newer is not None and self.guarded is not None and newer.step > self.guarded.step:
            self.promise_guarded(newer)

    def lacks(self, keeper: HostKeeper, id: GenerationId, ranks: Sequence[int]) -> str:
        """What a member of a group has not of a guarded generation."""
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

    def check_image(self, keeper: HostKeeper, held: Held, id: GenerationId) -> None:
        """An image that is labelled is of one state, that of its generation."""
        assert held.label is not None
        expected = (self.epoch_jobs[id.epoch].number, id.step, held.label.rank)
        if set(held.memory.pieces) != {expected} and (keeper.host.name, id) not in self.damaged:
            raise Violation(f"{id} is agreed, and {keeper} has {held.memory.pieces}")

    def is_on_line(self, id: GenerationId) -> bool:
        """Whether the job that runs has come by there."""
        job = self.epoch_jobs[id.epoch]
        return self.lineage.get(id.step) == job.number

    def check_choice(self, id: GenerationId) -> None:
        """A restart may go on from what the job that runs has come by, and from nothing else,
        whether it is the best that there is or not."""
        if not self.is_on_line(id):
            raise Violation(f"{id} was dropped, and may be gone on from")

    def mended(self, keeper: HostKeeper, id: GenerationId) -> None:
        """Count a keeper as undamaged again, if nothing that it holds of a generation is."""
        if not is_struck(keeper, id):
            self.damaged.discard((keeper.host.name, id))

    def has_flipped(self, id: GenerationId) -> bool:
        """Whether any bit of it has, anywhere."""
        return any(other == id for _, other in self.damaged)

    def holds(self, promise: Promise, names: set[str]) -> bool:
        """Whether what a promise relies on is still there; keepers are known by these names."""

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
        """A keeper is no more, with what it held."""
        members = [one for _, group in self.guarded.groups for one in group] if self.guarded else []
        if self.guarded is not None and keeper not in members:
            self.guarded.others_lost += 1

    def check_grant(self, trainer: Trainer, memory: Memory, nbytes: int) -> None:
        """Nobody else may use what is to be filled."""
        assert isinstance(trainer, HostTrainer)
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
            if promise is None or promise.id != memory.generation:
                continue
            members = [one for _, group in promise.groups for one in group]
            relied_on = keeper in members or any(keeper in of for of in promise.holders.values())
            if relied_on and self.knows_better(keeper, promise.id):
                continue
            if any(other.label.rank == trainer.rank for other in keeper.images(promise.id)):
                continue  # what was here was given up before, and was made again elsewhere
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
        """Whether a keeper that is not of this job, and was not told what that goes on from, keeps a
        later step instead: of which this job has found that it is damaged, or that was agreed on
        after the keeper was asked, with a trainer of the former job that has lived on."""
        newest, job = keeper.generations.newest_agreed, self.running
        is_of_job = job is not None and keeper.host in job.hosts
        return not is_of_job and newest is not None and newest > id

    def check_budget(self, keeper: SimulatedKeeper) -> None:
        """Memory is kept within limits."""
        held = sum(slot.memory.nbytes for slot in keeper.slots.values())
        if held > self.budget_nbytes:
            raise Violation(f"{held} bytes are held, and {self.budget_nbytes} allowed")

    def handed_over(self, trainer: Trainer) -> None:
        """A trainer is with the new keeper."""

    def check_commit(self, keeper: HostKeeper, fragments: Sequence[tuple[Label, str]]) -> None:
        """A lead keeper begins to commit what all have written. It does not if it knows better; what
        it learns meanwhile comes too late, and shows in the line that the checkpoint is of."""
        id, generations = fragments[0][0].generation, keeper.generations
        if generations.epoch > id.epoch and not generations.is_agreed(id):
            raise Violation(
                f"{id} is committed, in epoch {generations.epoch}, which has dropped it"
            )
        for label, attempt in fragments:
            if (attempt, label.rank) not in self.written:
                raise Violation(f"{id} is committed, and nobody has written rank {label.rank}")

    def commit(self, fragments: Sequence[tuple[Label, str]]) -> None:
        """The manifest is in storage."""
        parts = [self.written[attempt, label.rank] for label, attempt in fragments]
        self.committed(fragments[0][0].world, parts)
