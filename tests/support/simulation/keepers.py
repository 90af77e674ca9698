"""A run whose steps are kept in memory: the real state machines of a keeper, and the real choice of
what a restart goes on from, among simulated trainers that die, pause and wake.

Everything is a task that goes on when the seed says so, one piece of its work at a time: trainers,
which capture piece by piece; the keeper's sealing, votes and flushes; and the restarts of jobs,
which read what they go on from. The state of training is known for every step, so what is in a slot
is known to be right or wrong.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from holdfast.errors import DamagedError
from holdfast.storage.arenas.hosts import KeeperHost
from holdfast.storage.arenas.label import GenerationId, Label
from holdfast.storage.arenas.messages import Inventory
from holdfast.storage.keeper.decisions.choice import Choice
from holdfast.storage.keeper.decisions.generations import Generations
from holdfast.storage.keeper.decisions.slots import Reason, Refusal
from holdfast.storage.keeper.decisions.votes import Ballot, Outcome, Vote
from holdfast.storage.training import keeper_inventory as memory_survey
from holdfast.storage.training.epochs import Epochs
from holdfast.storage.training.keeper_inventory import InMemory

__all__ = ["SIZE_MAX", "SimulatedKeeper", "Trainer", "Violation", "World", "run_seed"]

PIECES = 3
TURNS = 900
"""How many pieces of work are done among faults."""
CALM_TURNS = 4000
"""How many may be done afterwards until everything is as it should be."""
STATE_NBYTES = 12
FLUSH_EVERY = 4
SIZE_MAX = 3
"""Of a job, in ranks."""
RUN = "run"
HOST = KeeperHost("keeper", "host")

State = tuple[int, int, int]
"""The job, the step and the rank that an image is of."""
Task = Iterator[None]


class Violation(AssertionError):
    """A promise was broken."""


@dataclass(eq=False)
class Memory:
    """The memory of a slot. ``users``: what reads or hashes it now."""

    nbytes: int
    pieces: list[State | None] = field(default_factory=lambda: [None] * PIECES)
    pages: tuple[State | None, ...] = ()
    users: Counter[str] = field(default_factory=Counter)
    generation: GenerationId | None = None

    def close(self) -> None:
        """Give it back."""

    def digest(self) -> bytes:
        """Of what is in it."""
        return repr(self.pieces).encode()


@dataclass(eq=False)
class Held:
    """A slot of a keeper, and the bytes of its label."""

    memory: Memory
    label: Label | None = None
    encoded: bytes = b""


@dataclass(eq=False)
class Job:
    """One start of the job. ``epoch``: None until it has been told. ``steps``: where each rank
    is."""

    number: int
    world: int
    chosen: int | None = None
    epoch: int = -1
    reader: int | None = None
    """The client that has read what it goes on from."""
    trainers: list[Trainer] = field(default_factory=list)


def step_of(sealed: tuple[int, bytes]) -> GenerationId:
    """Of a sealed image: a rank that hands over a later one first has none of the earlier ones, as
    far as a keeper can tell."""
    try:
        return Label.decode(sealed[1]).generation
    except DamagedError:
        return GenerationId(-1, -1)


class Trainer:
    """One rank of a job: a process."""

    def __init__(self, world: World, job: Job, rank: int) -> None:
        self.world, self.job, self.rank = world, job, rank
        self.client = next(world.clients)
        self.alive = True
        self.paused = False
        self.step = job.chosen or 0
        self.keeper: SimulatedKeeper | None = None
        self.mapped: dict[int, Memory] = {}
        self.sealed: dict[int, bytes] = {}
        self.wanted: set[GenerationId] = set()
        """What it waits for to be in storage."""
        self.hears: SimulatedKeeper | None = None
        """Whose word it takes for it."""
        self.task = self.train()

    def __str__(self) -> str:
        return f"rank {self.rank} of job {self.job.number}"

    @property
    def is_current(self) -> bool:
        """Whether no later job has taken up from somewhere."""
        return self.job is self.world.running

    def train(self) -> Task:
        """Step by step, and never more than one ahead of the others."""
        while True:
            yield
            if self.keeper is None or not self.keeper.alive:
                yield from self.connect()
            if self.world.rests:
                continue
            if self.step > min(other.step for other in self.job.trainers):
                continue
            self.step += 1
            if self.is_current:
                self.world.computed(self.step, self.job)
            yield from self.keep()

    def found(self) -> SimulatedKeeper:
        """The keeper of this host."""
        return self.world.keeper

    @property
    def image_nbytes(self) -> int:
        """Of its part of the state."""
        return STATE_NBYTES // self.job.world

    @property
    def wishes(self) -> bool:
        """Whether it is the one that wants steps in storage."""
        return self.rank == 0

    def connect(self) -> Task:
        """To the keeper that there is now, and hand over what is sealed."""
        keeper, self.keeper = self.found(), None
        mapped, sealed = self.mapped, self.sealed
        if keeper.enter(self) is not None:
            return
        self.world.count("entered", str(self))
        self.mapped, self.sealed = {}, {}
        wanted, self.wanted = self.wanted, set()
        self.hears = keeper
        for slot, encoded in sorted(sealed.items(), key=step_of):
            yield
            if not keeper.alive:
                self.mapped, self.sealed = mapped, sealed
                self.wanted = wanted
                return
            id = step_of((slot, encoded))
            if keeper.adopt(self, mapped[slot], encoded) and id in wanted:
                self.wanted.add(id)
                yield
                keeper.wish(self, id.step)
        self.keeper = keeper
        self.world.handed_over(self)

    def keep(self) -> Task:
        """Capture a step, if there is a slot for it."""
        keeper = self.keeper
        if keeper is None or not keeper.alive:
            return
        slot = keeper.fill(self, self.step, self.image_nbytes)
        if slot is None:
            return
        self.sealed.pop(slot, None)
        memory = self.mapped[slot]
        step = self.step
        for piece in range(PIECES):
            yield
            memory.pieces[piece] = (self.job.number, step, self.rank)
        yield
        if self.world.random.random() < self.world.drops:
            keeper.dropped(self, slot)
            return
        taken = keeper.captured(self, slot, step)
        if self.world.random.random() < 0.1:
            keeper.captured(self, slot, step)
        if self.wishes and step % FLUSH_EVERY == 0:
            if taken:
                self.wanted.add(GenerationId(self.job.epoch, step))
            yield
            keeper.wish(self, step)


class SimulatedKeeper:
    """What the keeper's process does around its state machines, one piece at a time."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.alive = True
        self.generations = Generations(world.budget_nbytes)
        self.ballot = Ballot()
        self.slots: dict[int, Held] = {}
        self.tasks: list[Task] = []
        self.wishes: set[GenerationId] = set()

    def enter(self, trainer: Trainer) -> Refusal | None:
        """A trainer goes on in the epoch of its job."""
        job = trainer.job
        refusal = self.generations.enter(trainer.client, trainer.rank, job.epoch, job.chosen)
        if job.reader is not None:
            self.generations.client_gone(job.reader)
        self.forget_unheld()
        return refusal

    def fill(self, trainer: Trainer, step: int, nbytes: int) -> int | None:
        """A slot, whose memory the trainer has mapped then."""
        world = trainer.job.world
        grant = self.generations.fill(trainer.client, trainer.rank, step, nbytes, world)
        self.forget_unheld()
        if isinstance(grant, Refusal):
            self.world.count(f"refused: {grant.reason.value}", f"{trainer} {step}")
            return None
        self.world.count("granted", f"slot {grant.slot} to {trainer} for step {step}")
        if grant.fresh and not self.make(trainer, grant.slot, nbytes):
            return None
        held = self.slots[grant.slot]
        self.world.check_grant(trainer, held.memory, nbytes)
        held.label, held.encoded = None, b""
        held.memory.generation = None
        trainer.mapped[grant.slot] = held.memory
        self.world.check_budget(self)
        return grant.slot

    def make(self, trainer: Trainer, slot: int, nbytes: int) -> bool:
        """Take the memory of a slot from the system; whether there was enough, in time."""
        self.generations.made(slot)
        self.slots[slot] = Held(Memory(nbytes))
        return True

    def dropped(self, trainer: Trainer, slot: int) -> None:
        """Nothing was captured."""
        if self.alive:
            self.generations.dropped(slot, trainer.client)

    def captured(self, trainer: Trainer, slot: int, step: int) -> bool:
        """An image is whole: it is sealed from now on, piece by piece. Whether it is taken."""
        id = GenerationId(trainer.job.epoch, step)
        if not self.alive or not self.generations.is_filling(slot, trainer.client, id):
            return False
        self.generations.captured(slot)
        differs = (trainer.job.number, step) in self.world.diverged and trainer.rank == 0
        label = Label(
            run=RUN,
            generation=id,
            rank=trainer.rank,
            world=trainer.job.world,
            nbytes=self.slots[slot].memory.nbytes,
            hashed_end=0,
            chunk_nbytes=1,
            block_nbytes=1,
            created_s=0.0,
            agreement=str(trainer.job.number),
            equal={"replicas": "other" if differs else "same"},
        )
        self.tasks.append(self.seal(trainer, slot, self.slots[slot], label))
        return True

    def seal(self, trainer: Trainer, slot: int, held: Held, draft: Label) -> Task:
        """Hash, write the pages, label, tell, vote."""
        memory = held.memory
        memory.users["sealing"] += 1
        hashed: list[State | None] = []
        for piece in range(PIECES):
            yield
            hashed.append(memory.pieces[piece])
        yield from self.write_pages(memory, hashed)
        label = _with_digests(draft, repr(hashed).encode())
        memory.users["sealing"] -= 1
        if not self.generations.is_sealing(slot, draft.generation):
            self.generations.unsealed(slot)
            return
        held.label, held.encoded = label, label.encode()
        memory.generation = label.generation
        self.generations.sealed(slot)
        if slot in trainer.mapped and trainer.keeper is self:
            trainer.sealed[slot] = held.encoded
        for _ in range(2 if self.world.random.random() < 0.1 else 1):
            yield
            self.vote(label)

    def write_pages(self, memory: Memory, hashed: list[State | None]) -> Task:
        """Behind the image."""
        yield
        memory.pages = tuple(hashed)

    def vote(self, label: Label) -> None:
        """Count a vote, and tell what comes of it."""
        id = label.generation
        outcome = self.ballot.cast(Vote.of(label))
        if outcome is Outcome.VOID:
            self.generations.void(id)
            self.told_end(id)
        elif outcome is Outcome.AGREED and self.generations.agreed(id):
            self.world.told_agreed(self, id)
            if id in self.wishes:
                self.wishes.discard(id)
                self.tasks.append(self.flush(id))

    def wish(self, trainer: Trainer, step: int) -> None:
        """A trainer wants a step in storage."""
        id = GenerationId(trainer.job.epoch, step)
        if not self.alive or trainer.job.epoch != self.generations.epoch:
            return
        if self.generations.is_agreed(id):
            self.tasks.append(self.flush(id))
        else:
            self.wishes.add(id)

    def flush(self, id: GenerationId) -> Task:
        """Write a generation to storage, until that succeeds."""
        pin = self.generations.pin(id)
        images = self.images(id)
        for image in images:
            image.memory.users["flush"] += 1
        written: list[list[State | None]] = []
        while self.generations.is_agreed(id):
            written = [[] for _ in images]
            for pieces, image in zip(written, images, strict=True):
                for piece in range(PIECES):
                    yield
                    pieces.append(image.memory.pieces[piece])
            if self.world.random.random() > self.world.flush_fails:
                break
        for image in images:
            image.memory.users["flush"] -= 1
        labels = [image.label for image in images if image.label is not None]
        intact = len(labels) == len(images) and all(
            repr(pieces).encode() == label.digests
            for pieces, label in zip(written, labels, strict=False)
        )
        if not intact:
            self.ballot.decide(id, Outcome.VOID)
            self.generations.void(id)
        elif self.generations.is_agreed(id):
            self.world.committed(labels[0].world, written)
        self.generations.unpin(pin)
        self.forget_unheld()
        self.told_end(id)

    def told_end(self, id: GenerationId) -> None:
        """Trainers do not wait any longer for this to be in storage."""
        for trainer in self.world.trainers:
            if trainer.hears is self:
                trainer.wanted.discard(id)

    def images(self, id: GenerationId) -> list[Held]:
        """Of all ranks, in order."""
        found = [
            (held.label.rank, slot, held)
            for slot, held in self.slots.items()
            if held.label is not None and self.generations.holds(slot, id)
        ]
        return [held for _, _, held in sorted(found, key=lambda one: one[:2])]

    def inventory(self) -> Inventory:
        """What there is to go on from."""
        held = self.generations.restorable()
        return Inventory(
            self.generations.epoch,
            tuple(held),
        )

    def open(self, client: int, id: GenerationId, rank: int) -> Held | None:
        """An image to go on from."""
        slot = self.generations.open(client, id, rank)
        return None if slot is None else self.slots[slot]

    def die(self) -> None:
        """Nothing of it happens any more."""
        self.alive = False
        for task in self.tasks:
            task.close()  # type: ignore[attr-defined]
        for held in self.slots.values():
            held.memory.users.clear()

    def recall_kept(self, before: SimulatedKeeper) -> None:
        """What the keeper before had in memory was kept: it was a service, and so is this one."""
        kept = [
            (held, held.label)
            for slot, held in before.slots.items()
            if held.label is not None and before.generations.holds(slot, held.label.generation)
        ]
        for held, label in kept:
            number = self.generations.recall(
                label.generation, label.rank, label.world, label.nbytes, outlived=True
            )
            if isinstance(number, Refusal):
                continue
            self.slots[number] = Held(held.memory, label, held.encoded)
            if before.generations.is_restorable(label.generation):
                self.generations.was_agreed(label.generation)
            self.world.count("kept for a service")
        self.world.check_budget(self)

    def adopt(self, trainer: Trainer, memory: Memory, encoded: bytes) -> bool:
        """An image of a keeper that is gone; whether it is taken."""
        try:
            label = Label.decode(encoded)
        except DamagedError:
            return False
        slot = self.generations.adopt(
            trainer.client, label.generation, label.rank, label.world, label.nbytes
        )
        if isinstance(slot, Refusal):
            return slot.reason is Reason.DUPLICATE
        self.slots[slot] = Held(memory, label, encoded)
        trainer.mapped[slot] = memory
        trainer.sealed[slot] = encoded
        self.world.check_budget(self)
        self.tasks.append(self.vote_later(label))
        return True

    def vote_later(self, label: Label) -> Task:
        """For an image that was adopted."""
        yield
        self.vote(label)

    def forget_unheld(self) -> None:
        """Give back memory."""
        for slot in self.slots.keys() - self.generations.slots:
            del self.slots[slot]


def _with_digests(draft: Label, digests: bytes) -> Label:
    values = {name: getattr(draft, name) for name in draft.__dataclass_fields__}
    return Label(**{**values, "digests": digests})


class Record:
    """What has happened in a run, and what of that is right: how far each job has come, and what is
    in storage. ``lineage``: by step, the job whose state it is; ``diverged``: whose replicas were
    not alike, by job and step; ``flipped``: generations of which a bit has flipped."""

    def __init__(self, seed: int, log: Callable[[str], None] | None = None) -> None:
        self.log = log
        self.random = random.Random(seed)
        self.is_service = seed % 4 == 2
        """Whether what keeps a keeper's memory starts it anew."""
        self.rests = False
        """Whether nobody trains any more."""
        self.counts: Counter[str] = Counter()
        self.lineage: dict[int, int] = {}
        self.storage: dict[int, int] = {}
        self.diverged: set[tuple[int, int]] = set()
        self.flipped: set[GenerationId] = set()

    def count(self, what: str, details: str = "") -> None:
        """For the tally of what has happened, and its log."""
        self.counts[what] += 1
        if self.log is not None:
            self.log(f"{what} {details}".rstrip())

    def computed(self, step: int, job: Job) -> None:
        """The job that runs now has got so far."""
        if self.lineage.get(step) == job.number:
            return
        self.lineage[step] = job.number
        if self.random.random() < 0.08 and job.world > 1:
            self.diverged.add((job.number, step))

    def committed(self, world: int, written: list[list[State | None]]) -> int | None:
        """A checkpoint is in storage; its step, if training goes on from there."""
        states = {piece for pieces in written for piece in pieces}
        ranks = sorted(state[2] for state in states if state)
        if None in states or ranks != list(range(world)):
            raise Violation(f"storage holds {written}")
        found = {state[:2] for state in states if state}
        if len(found) != 1:
            raise Violation(f"storage holds a mixture: {written}")
        job, step = found.pop()
        self.count("flushed", f"step {step}")
        if self.lineage.get(step) != job:
            return None
        self.storage[step] = job
        return step

    def newest_stored(self) -> int:
        """The newest step in storage that no restart has dropped."""
        return max((s for s, j in self.storage.items() if self.lineage.get(s) == j), default=0)

    def intact(self, held: Held, pieces: list[State | None]) -> bool:
        """Whether an image is what its label and its pages say."""
        try:
            label = Label.decode(held.encoded)
        except DamagedError:
            return False
        return repr(pieces).encode() == label.digests and held.memory.pages == tuple(pieces)

    def whole(self, candidate: Choice, states: list[list[State | None]]) -> tuple[int, int]:
        """The step and the job that the images are of: one, of all ranks."""
        found = {state for pieces in states for state in pieces}
        steps = {(state[1], state[0]) for state in found if state}
        ranks = {state[2] for state in found if state}
        if None in found or len(steps) != 1 or ranks != set(range(candidate.world)):
            raise Violation(f"a restart goes on from {states}")
        self.count("resumed from memory")
        return steps.pop()

    def raises(
        self, found: tuple[int, int] | None, failed: list[int], touched: list[State | None]
    ) -> bool:
        """Tell whether a rank refuses to go on: a load has failed, and nothing whole is found."""
        return found is None and bool(failed)

    def all_raise(
        self,
        found: tuple[int, int] | None,
        failed: list[int],
        touched: Iterable[list[State | None]],
    ) -> bool:
        """Tell whether all ranks refuse to go on. ``touched``: what loads have left on each rank."""
        raising = {self.raises(found, failed, pieces) for pieces in touched}
        if len(raising) > 1:
            raise Violation("one rank raises, and another goes on")
        return True in raising

    def check_filled(
        self, found: tuple[int, int] | None, filled: dict[int, list[State | None]]
    ) -> None:
        """Check that each state is of the step that is gone on from, or untouched."""
        step, number = found or (0, 0)
        for rank, pieces in filled.items():
            if set(pieces) != {(number, step, rank)}:
                raise Violation(f"step {step} is gone on from, and rank {rank} holds {pieces}")


class World(Record):
    """One host, its keeper, the jobs of a run one after another, and storage."""

    def __init__(self, seed: int, log: Callable[[str], None] | None = None) -> None:
        super().__init__(seed, log)
        draw = self.random
        self.clients = itertools.count(1)
        self.jobs = itertools.count(1)
        self.budget_nbytes = draw.choice([2, 3, 3, 4]) * STATE_NBYTES
        self.flush_fails = draw.choice([0.0, 0.5])
        self.drops = draw.choice([0.0, 0.1])
        self.resizes = draw.choice([0.0, 0.3])
        self.fault_rate = draw.choice([0.01, 0.03, 0.06])
        self.seal_weight = draw.choice([0.3, 1.0, 3.0])
        self.size = draw.randint(1, SIZE_MAX)
        self.job_of: dict[GenerationId, int] = {}
        self.promised = 0
        """The newest step that nothing that happened since can have lost."""
        self.promised_id: GenerationId | None = None
        self.to_be_agreed_again: GenerationId | None = None
        self.trainers: list[Trainer] = []
        self.deaths: list[Trainer | int] = []
        self.keeper = SimulatedKeeper(self)
        self.epochs = Epochs()
        self.must_reach = 0
        """What was promised when the restart that is under way has looked."""
        self.stored_at_look = 0
        self.newest_told = GenerationId(-1, -1)
        self.must_reach_id: GenerationId | None = None
        self.job: Job | None = None
        self.running: Job | None = None
        self.restart: Task | None = None
        self.begin_job()

    # What the world is told, and what must hold then.

    def told_agreed(self, keeper: SimulatedKeeper, id: GenerationId) -> None:
        """Trainers rely on this generation from now on."""
        images = keeper.images(id)
        states = [set(held.memory.pieces) for held in images]
        job = self.running
        newest, self.newest_told = self.newest_told, max(id, self.newest_told)
        known = {(j, s) for state in states for piece in state if piece for j, s, _ in [piece]}
        if id in self.flipped:
            self.promise_nothing()
        if id in self.flipped or id < newest:
            return
        if len(known) != 1 or any(len(state) != 1 for state in states):
            raise Violation(f"{id} is agreed, and its images are {states}")
        (number, step), world = known.pop(), images[0].label.world if images[0].label else 0
        ranks = [piece[2] for state in states for piece in state if piece]
        if ranks != list(range(world)):
            raise Violation(f"{id} is agreed, and there are the images of {ranks} of {world}")
        if (number, step) in self.diverged:
            raise Violation(f"{id} is agreed, and replicas have diverged")
        self.count("agreed", str(id))
        if job is not None and job.number == number and step > self.promised:
            self.promised, self.promised_id = step, id

    def committed(self, world: int, written: list[list[State | None]]) -> int | None:
        """It outlives what is in memory."""
        step = super().committed(world, written)
        if step is not None and step >= self.promised:
            self.promised, self.promised_id = step, None
        return step

    def check_grant(self, trainer: Trainer, memory: Memory, nbytes: int) -> None:
        """Nobody else may use what is to be filled."""
        if memory.nbytes != nbytes:
            raise Violation(f"a slot of {memory.nbytes} bytes for an image of {nbytes}")
        if +memory.users:
            raise Violation(f"a slot is to be filled, and in use: {dict(+memory.users)}")
        if memory.generation is not None and memory.generation == self.promised_id:
            raise Violation("the newest agreed generation is written over")
        newest = self.running
        for other in self.trainers:
            if other is trainer or not other.alive or memory not in other.mapped.values():
                continue
            raise Violation(f"rank {other.rank} of job {other.job.number} can write to a slot")
        if newest is not None and trainer.job is not newest and self._has_entered(newest):
            raise Violation(f"job {trainer.job.number} is over, and was given a slot")

    def _has_entered(self, job: Job) -> bool:
        return self.keeper.generations.epoch >= job.epoch >= 0

    def check_budget(self, keeper: SimulatedKeeper) -> None:
        """Memory is kept within limits."""
        held = sum(slot.memory.nbytes for slot in keeper.slots.values())
        if held > self.budget_nbytes:
            raise Violation(f"{held} bytes are held, and {self.budget_nbytes} allowed")

    def handed_over(self, trainer: Trainer) -> None:
        """A trainer is with the new keeper."""

    def promise_nothing(self) -> None:
        """But what is in storage: the newest generation in memory is lost, or damaged."""
        self.promised_id = None
        self.promised = self.newest_stored()
        self.must_reach = min(self.must_reach, self.stored_at_look)

    # Jobs.

    def begin_job(self) -> None:
        """A job begins, perhaps on another number of ranks; the one before is over."""
        if self.job is not None and self.random.random() < self.resizes:
            self.size = self.random.randint(1, SIZE_MAX)
        self.job = Job(next(self.jobs), self.size)
        self.restart = self.resume(self.job)

    def resume(self, job: Job) -> Task:
        """Find what to go on from, read it, and enter the next epoch."""
        yield
        keeper = self.keeper
        client = next(self.clients)
        keeper.generations.offer(client)
        statement = InMemory(keeper.inventory(), HOST) if keeper.alive else InMemory()
        stocks = memory_survey.stocks_of([statement] * job.world)
        newest = self.stored_at_look = self.newest_stored()
        self.must_reach, self.must_reach_id = self.promised, self.promised_id
        found: tuple[int, int] | None = None
        id: GenerationId | None = None
        filled: dict[int, list[State | None]] = {}
        failed: list[int] = []
        try:
            kept, _ = memory_survey.kept_in_memory(stocks, [], job.world, newest, self.epochs)
            for candidate in kept:
                states = yield from self.read(keeper, client, candidate, filled)
                if states is None:
                    failed.append(candidate.generation.step)
                else:
                    found = self.whole(candidate, states)
                    filled = {rank: filled[rank] for rank in range(candidate.world)}
                    id = candidate.generation
                    break
            if found is None and newest:
                found = newest, self.storage[newest]
                filled = {0: [(found[1], newest, 0)] * PIECES}
            if self.all_raise(found, failed, [filled.get(r, []) for r in range(job.world)]):
                self.restart = None
                self.start_anew()
                return
            self.check_filled(found, filled)
            job.epoch = memory_survey.next_epoch(stocks, self.epochs)
            self.take_up(job, found, id)
            job.reader = client
        finally:
            if job.reader is None:
                keeper.generations.client_gone(client)
        job.trainers = [Trainer(self, job, rank) for rank in range(job.world)]
        self.trainers += job.trainers
        self.restart = None

    def start_anew(self) -> None:
        """End the keeper, as an operator does once all ranks have refused to go on. Nothing that was
        promised may be among what they could not read."""
        if self.must_reach:
            raise Violation(f"step {self.must_reach} was promised, and a restart refuses to go on")
        self.count("refused to go on")
        self.keeper.die()
        self.promise_nothing()
        self.newest_told = GenerationId(-1, -1)
        self.keeper = SimulatedKeeper(self)
        self.begin_job()

    def read(
        self,
        keeper: SimulatedKeeper,
        client: int,
        candidate: Choice,
        filled: dict[int, list[State | None]],
    ) -> Iterator[None]:
        """Read all images of a generation into ``filled``; None where one is damaged."""
        id = candidate.generation
        states: list[list[State | None]] = []
        used: list[Memory] = []
        damaged = False
        try:
            for rank in range(candidate.world):
                yield
                held = keeper.open(client, id, rank) if keeper.alive else None
                if held is None:
                    if keeper.alive and id not in self.flipped:
                        raise Violation(f"{id} was offered, and rank {rank} is not there")
                    damaged = True
                    break
                held.memory.users["restart"] += 1
                used.append(held.memory)
                pieces: list[State | None] = []
                filled[rank] = pieces
                for piece in range(PIECES):
                    yield
                    pieces.append(held.memory.pieces[piece])
                if not self.intact(held, pieces):
                    if id not in self.flipped:
                        raise Violation(f"{id} is damaged, and nothing has damaged it")
                    damaged = True
                    break
                states.append(pieces)
        finally:
            for memory in used:
                memory.users["restart"] -= 1
        return None if damaged else states

    def take_up(self, job: Job, found: tuple[int, int] | None, id: GenerationId | None) -> None:
        """Training goes on from there: nothing that was promised may be lost."""
        step, number = found or (0, 0)
        if step and self.lineage.get(step) != number:
            raise Violation(f"step {step} of job {number} was dropped, and is gone on from")
        if step < self.must_reach:
            raise Violation(f"step {self.must_reach} was promised, and {step} is gone on from")
        self.running = job
        job.chosen = step or None
        self.epochs = self.epochs.with_next(job.epoch, job.chosen)
        self.lineage = {s: j for s, j in self.lineage.items() if s <= step}
        self.promised, self.promised_id = step, id
        if id in self.flipped:
            self.promise_nothing()
        self.count("resumed", f"job {job.number} in epoch {job.epoch} from step {step}")

    # Faults.

    def kill(self, trainer: Trainer) -> None:
        """The keeper is told later."""
        self.count("killed", str(trainer))
        trainer.alive = False
        self.deaths.append(trainer)

    def kill_all(self) -> None:
        """All processes of the job that runs, but not the keeper's; it begins anew."""
        for trainer in self.trainers:
            if trainer.alive and not trainer.paused:
                self.kill(trainer)
        if self.restart is not None:
            self.restart.close()  # type: ignore[attr-defined]
        if self.job is not None and self.job.reader is not None:
            self.keeper.generations.client_gone(self.job.reader)
        old = self.running.trainers if self.running is not None else []
        if old and all(trainer.alive for trainer in old):
            self.kill(self.random.choice(old))  # a whole job does not go on beside the next one
        self.begin_job()

    def kill_keeper(self) -> None:
        """Another takes its place, which knows nothing, or what a service has kept."""
        before = self.keeper
        before.die()
        if not self.is_service:
            self.promise_nothing()
        self.newest_told = GenerationId(-1, -1)
        self.keeper = SimulatedKeeper(self)
        if self.is_service:
            self.keeper.recall_kept(before)
        if self.restart is not None:
            self.kill_all()

    def flip(self) -> None:
        """A bit, in an image that is sealed, or in its label."""
        sealed = [held for held in self.keeper.slots.values() if held.label is not None]
        if not sealed:
            return
        held = self.random.choice(sealed)
        assert held.label is not None
        if self.random.random() < 0.5:
            held.memory.pieces[self.random.randrange(PIECES)] = None
        else:
            held.encoded = held.encoded[:-1] + bytes([held.encoded[-1] ^ 1])
        id = held.label.generation
        self.flipped.add(id)
        self.count("flipped", str(id))
        if id in (self.promised_id, self.must_reach_id):
            self.promise_nothing()

    def fault(self) -> None:
        """One of them."""
        living = [trainer for trainer in self.trainers if trainer.alive and not trainer.paused]
        kind = self.random.choice(["one", "all", "all", "keeper", "pause", "pause", "wake", "flip"])
        self.count(f"fault: {kind}")
        if kind == "one" and living:
            self.kill(self.random.choice(living))
        elif kind == "all":
            self.kill_all()
        elif kind == "keeper":
            self.kill_keeper()
        elif kind == "pause" and living:
            self.random.choice(living).paused = True
        elif kind == "wake":
            for trainer in self.trainers:
                trainer.paused = False
        elif kind == "flip":
            self.flip()

    # Time.

    def run(self) -> None:
        """The whole of it."""
        for _ in range(TURNS):
            if self.random.random() < self.fault_rate:
                self.fault()
            else:
                self.turn()
        self.calm()

    def turn(self) -> None:
        """One piece of somebody's work."""
        trainers = [t for t in self.trainers if t.alive and not t.paused]
        tasks = self.keeper.tasks
        choices = [(1.0, "trainer")] * bool(trainers) + [(self.seal_weight, "task")] * bool(tasks)
        choices += [(1.0, "restart")] * (self.restart is not None)
        choices += [(0.3, "death")] * bool(self.deaths) + [(0.05, "launcher")]
        weights = [weight for weight, _ in choices]
        kind = self.random.choices([name for _, name in choices], weights)[0]
        if kind == "trainer":
            next(self.random.choice(trainers).task)
        elif kind == "task":
            self.advance(self.random.choice(tasks))
        elif kind == "restart" and self.restart is not None:
            next(self.restart, None)
        elif kind == "death":
            self.notice(self.deaths.pop(self.random.randrange(len(self.deaths))))
        elif self.job is not None and not all(t.alive for t in self.job.trainers):
            self.kill_all()

    def notice(self, trainer: Trainer | int) -> None:
        """The keeper is told of a process that has ended."""
        assert isinstance(trainer, Trainer)
        self.keeper.generations.client_gone(trainer.client)
        trainer.mapped.clear()
        if trainer in self.trainers:
            self.trainers.remove(trainer)

    def advance(self, task: Task) -> None:
        """A piece of the keeper's work."""
        if next(task, self) is self:
            self.keeper.tasks.remove(task)

    def calm(self) -> None:
        """Nothing goes wrong any more: a restart works, and memory is of use again, if there is
        enough of it."""
        self.flush_fails = self.drops = 0.0
        for trainer in self.trainers:
            trainer.paused = False
        self.kill_all()
        for trainer in self.trainers:
            if trainer.alive and not trainer.is_current:
                self.kill(trainer)
        begun = self.counts["resumed"]
        enough = self.budget_nbytes >= 3 * STATE_NBYTES
        agreed = self.counts["agreed"]
        for _ in range(CALM_TURNS):
            self.turn()
            if self.counts["resumed"] > begun and (
                not enough or self.counts["agreed"] > agreed + 2
            ):
                return
        raise Violation(f"nothing comes of it in {CALM_TURNS} turns: {dict(self.counts)}")


def run_seed(seed: int, log: Callable[[str], None] | None = None) -> Counter[str]:
    """Run the schedule of a seed; what has happened in it. Raises :class:`Violation`."""
    world = World(seed, log)
    world.run()
    return world.counts
