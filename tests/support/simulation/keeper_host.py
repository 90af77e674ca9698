"""One host of a simulated job: its trainers and its keeper. The keeper decides with the real code.
Its memory, its messages to trainers, and the copying and hashing of images are simulated.

Trainers and seals are generators that advance one piece of work at a time. An image is a few
pieces. Each piece names its job, step and rank, so that any mixture shows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from holdfast.errors import DamagedError, HoldfastError
from holdfast.planner.image import PAGE_NBYTES
from holdfast.storage.arenas.hosts import KeeperHost
from holdfast.storage.arenas.label import GenerationId, Label
from holdfast.storage.arenas.messages import (
    Agreed,
    Event,
    Flush,
    FlushEnd,
    FlushLost,
    Inventory,
    Protected,
    Rebuild,
    Voided,
)
from holdfast.storage.keeper.agreement import Agreement
from holdfast.storage.keeper.decisions.generations import Generations
from holdfast.storage.keeper.decisions.lead import Lead
from holdfast.storage.keeper.decisions.slots import ENDED, Reason, Refusal
from holdfast.storage.keeper.parity.guards import Guards, rebuilt
from holdfast.storage.keeper.status import Counters
from holdfast.storage.training.keeper_inventory import Meeting

from .keeper_peers import PIECES, KeeperProcess, Memory, Slot, State
from .loop import PROCESS

if TYPE_CHECKING:
    from .keeper_hosts import Hosts


STATE_NBYTES = 120
"""A multiple of the size of any job here."""
FLUSH_EVERY = 4
RUN = "run"

Task = Iterator[None]


@dataclass(eq=False)
class Host:
    """A host, named after its keeper."""

    name: str
    keeper: HostKeeper = field(init=False)


@dataclass(eq=False)
class Job:
    """One start of the job. ``epoch``: -1 until it begins; ``readers``: the client on each host
    that reads the state to resume from."""

    number: int
    world: int
    hosts: tuple[Host, ...]
    chosen: int | None = None
    epoch: int = -1
    trainers: list[Trainer] = field(default_factory=list)
    meeting: Meeting = field(default_factory=Meeting)
    readers: dict[str, int] = field(default_factory=dict)
    has_failed: bool = False

    def host_of(self, rank: int) -> Host:
        """Return the host of a rank."""
        return self.hosts[rank * len(self.hosts) // self.world]


def step_of(sealed: tuple[int, bytes]) -> GenerationId:
    """Return the generation of a slot's label; one before all others if the label is damaged."""
    try:
        return Label.decode(sealed[1]).generation
    except DamagedError:
        return GenerationId(-1, -1)


class Trainer:
    """The process of one rank. ``mapped`` and ``sealed``: its slots, and their labels."""

    def __init__(self, world: Hosts, job: Job, rank: int) -> None:
        self.world, self.job, self.rank = world, job, rank
        self.host = job.host_of(rank)
        self.client = next(world.clients)
        self.alive = True
        self.paused = False
        self.step = job.chosen or 0
        self.keeper: HostKeeper | None = None
        self.mapped: dict[int, Memory] = {}
        self.sealed: dict[int, bytes] = {}
        self.wanted: set[GenerationId] = set()
        """Steps that it waits for to become durable."""
        self.ended: FlushEnd | None = None
        """The newest flush whose end it knows of."""
        self.hears: HostKeeper | None = None
        """The keeper whose events it receives."""
        self.task = self.train()

    def __str__(self) -> str:
        return f"rank {self.rank} of job {self.job.number}"

    @property
    def image_nbytes(self) -> int:
        return STATE_NBYTES // self.job.world

    @property
    def wishes(self) -> bool:
        """True for the one rank per host that requests flushes."""
        return self.rank == 0 or self.job.host_of(self.rank - 1) is not self.host

    def train(self) -> Task:
        """Take step after step, never more than one ahead of the others."""
        while True:
            yield
            if self.keeper is None or not self.keeper.alive:
                yield from self.connect()
            if self.world.rests:
                continue
            if self.step > min(other.step for other in self.job.trainers):
                continue
            self.step += 1
            if self.job is self.world.running:
                self.world.computed(self.step, self.job)
            yield from self.keep()

    def connect(self) -> Task:
        """Connect to the current keeper, and hand over all sealed images."""
        keeper, self.keeper = self.host.keeper, None
        mapped, sealed = self.mapped, self.sealed
        if keeper.enter(self) is not None:
            return
        self.world.count("entered", str(self))
        self.mapped, self.sealed = {}, {}
        self.hears = keeper
        for slot, encoded in sorted(sealed.items(), key=step_of):
            yield
            if not keeper.alive:
                self.mapped, self.sealed = mapped, sealed
                return
            id = step_of((slot, encoded))
            if not keeper.adopt(self, mapped[slot], encoded):
                self.wanted.discard(id)
            elif id in self.wanted:
                yield
                keeper.wish(self, id.step)
        self.wanted.intersection_update(map(step_of, sealed.items()))
        self.keeper = keeper

    def keep(self) -> Task:
        """Capture a step, if a slot is granted."""
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


class HostKeeper:
    """The keeper of one host: the real decisions, with simulated memory and messages.

    ``tasks``: images being sealed
    ``adopted``: generations handed over to it
    ``gone``: readers that have ended
    ``offered``: the memory that each reader may choose
    """

    def __init__(self, world: Hosts, host: Host) -> None:
        self.world = world
        self.host = host
        self.alive = True
        self.generations = Generations(world.budget_nbytes)
        self.generations.history = world.history
        self.slots: dict[int, Slot] = {}
        self.tasks: list[Task] = []
        self.adopted: set[GenerationId] = set()
        self.gone: set[int] = set()
        self.offered: dict[int, set[Memory]] = {}
        self.number = next(world.numbers)
        self.process = KeeperProcess(self, f"{host.name}#{self.number}")
        world.processes.append(self.process)
        self.context = copy_context()
        self.context.run(PROCESS.set, self.process)
        counters = Counters()
        pool: Any = self
        self.guards = Guards(RUN, "", self.changed)
        self.agreement = Agreement(
            host.name, pool, self.guards, counters, self.tell, self.run_later
        )
        self.agreement.reporting.lead = Lead(str(self.number))  # random in the real keeper
        self.writing = self.agreement.writing

    def __str__(self) -> str:
        return self.process.name

    @property
    def is_paused(self) -> bool:
        """True while its process sleeps."""
        return self.process.paused_until_s > self.world.loop.now_s

    @property
    def named(self) -> KeeperHost:
        """Its entry in lists of hosts."""
        return KeeperHost(self.host.name, self.host.name, self.host.name)

    def do(self, work: Callable[..., Any], *args: Any) -> Any:
        """Run ``work`` as this process."""
        return self.context.run(work, *args)

    def changed(self) -> None:
        """Report that parity was encoded, or could not be."""
        self.agreement.tell_later()

    def run_later(self, work: Coroutine[Any, Any, None]) -> None:
        """See the real keeper."""
        asyncio.ensure_future(work).add_done_callback(self.ended)

    def ended(self, task: asyncio.Task[Any]) -> None:
        """Record a failed task as the failure of the run."""
        if not task.cancelled() and task.exception() is not None and self.process.alive:
            self.world.failure = self.world.failure or task.exception()

    # Trainers.

    async def tell(self, event: Event) -> None:
        """Send an event to all trainers of this epoch."""
        ended = event if isinstance(event, FlushEnd) and event.final else None
        if ended or isinstance(event, FlushLost | Voided):
            for trainer in self.world.trainers:
                if trainer.hears is self:
                    trainer.wanted.discard(event.generation)
                    trainer.ended = ended or trainer.ended
        if isinstance(event, Agreed | Voided):
            self.world.awaited.discard((self, event.generation))
        if isinstance(event, Agreed):
            self.world.told_agreed(self, event.generation)
        elif isinstance(event, Protected):
            self.world.told_guarded(self, event.generation)
        elif ended is not None and not ended.problem:
            durable = self.world.told.setdefault("durable", {})
            newest = durable.get(self.host.name, event.generation)
            durable[self.host.name] = max(newest, event.generation)

    def enter(self, trainer: Trainer) -> Refusal | None:
        """Enter the epoch of a trainer's job."""
        job = trainer.job
        is_new = job.epoch > self.generations.epoch
        refusal = self.generations.enter(trainer.client, trainer.rank, job.epoch, job.chosen)
        if refusal is None:
            hosts, groups = job.meeting.hosts, job.meeting.groups
            self.do(self.agreement.enter, job.epoch, job.chosen, hosts, groups)
            self.do(self.writing.forget_dropped)
            self.do(self.run_later, self.writing.note_end(trainer.ended))
            self.forget_unheld()
            if is_new:
                self.offered.pop(ENDED, None)
        self.reader_released(job.readers.get(self.host.name, -1))
        return refusal

    def fill(self, trainer: Trainer, step: int, nbytes: int) -> int | None:
        """Grant a slot, and map its memory into the trainer."""
        slot = self.granted(trainer, step, nbytes)
        self.do(self.agreement.look_for_missing)  # others may wait for a step left out here
        return slot

    def granted(self, trainer: Trainer, step: int, nbytes: int) -> int | None:
        """Return a granted slot, if any."""
        world = trainer.job.world
        grant = self.generations.fill(trainer.client, trainer.rank, step, nbytes, world)
        self.forget_unheld()
        if isinstance(grant, Refusal):
            self.world.count(f"refused: {grant.reason.value}", f"{trainer} {step}")
            return None
        self.world.count("granted", f"slot {grant.slot} to {trainer} for step {step}")
        if grant.fresh and not self.make(trainer, grant.slot, nbytes):
            return None
        slot = self.slots[grant.slot]
        self.world.check_grant(trainer, slot.memory, nbytes)
        slot.label, slot.encoded = None, b""
        slot.memory.generation = None
        trainer.mapped[grant.slot] = slot.memory
        self.world.check_budget(self)
        return grant.slot

    def make(self, trainer: Trainer, slot: int, nbytes: int) -> bool:
        """Allocate the memory of a slot. Return False if there is none, or it comes later."""
        if self.world.full:
            self.generations.unmade(slot)
            self.world.count("no memory")
            return False
        slow = self.world.slow_memory
        if slow and self.world.random.random() < slow:
            self.world.count("slow memory")
            self.generations.dropped(slot, trainer.client)
            self.do(self.run_later, self._make_slowly(slot, nbytes))
            return False
        self.generations.made(slot)
        self.slots[slot] = Slot(Memory(nbytes))
        return True

    async def _make_slowly(self, slot: int, nbytes: int) -> None:
        for _ in range(self.world.random.choice([1, 5, 20])):
            await self.world.piece()
        if self.world.full:
            self.generations.unmade(slot)
            return
        self.generations.made(slot)
        self.slots[slot] = Slot(Memory(nbytes))
        self.world.check_budget(self)

    def dropped(self, trainer: Trainer, slot: int) -> None:
        """Take back a slot into which nothing was captured."""
        if self.alive:
            self.generations.dropped(slot, trainer.client)
            self.do(self.agreement.look_for_missing)

    def captured(self, trainer: Trainer, slot: int, step: int) -> bool:
        """Begin to seal a complete image. Return whether it was taken."""
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
            chunk_nbytes=PAGE_NBYTES,
            block_nbytes=PAGE_NBYTES,
            created_s=0.0,
            agreement=str(trainer.job.number),
            equal={"replicas": "other" if differs else "same"},
        )
        self.tasks.append(self.seal(trainer, slot, self.slots[slot], label))
        return True

    def seal(self, trainer: Trainer, number: int, slot: Slot, draft: Label) -> Task:
        """Hash an image, write its pages, label it, tell its trainer, and vote."""
        memory = slot.memory
        memory.users["sealing"] += 1
        hashed: list[State | None] = []
        for piece in range(PIECES):
            yield
            hashed.append(memory.pieces[piece])
        yield from self.write_pages(memory, hashed)
        label = replace(draft, digests=repr(hashed).encode())
        memory.users["sealing"] -= 1
        if not self.generations.is_sealing(number, draft.generation):
            self.generations.unsealed(number)
            return
        slot.label, slot.encoded = label, label.encode()
        memory.generation = label.generation
        self.generations.sealed(number)
        if number in trainer.mapped and trainer.keeper is self:
            trainer.sealed[number] = slot.encoded
        for _ in range(2 if self.world.random.random() < 0.1 else 1):
            yield
            self.vote(label)

    def write_pages(self, memory: Memory, hashed: list[State | None]) -> Task:
        """Write the pages behind an image."""
        yield
        memory.pages = tuple(hashed)

    def vote(self, label: Label) -> None:
        """Vote for a sealed image."""
        sealed = self.world.sealed.setdefault(label.generation, {})
        if sealed.get(label.rank) is not self and label.generation not in self.adopted:
            self.world.awaited.add((self, label.generation))
        sealed[label.rank] = self
        handed_over = label.generation in self.adopted
        self.do(self.run_later, self.agreement.vote(label, handed_over=handed_over))

    def wish(self, trainer: Trainer, step: int) -> None:
        """Accept a trainer's request to flush a step."""
        if self.alive and trainer.job.epoch == self.generations.epoch:
            id = GenerationId(trainer.job.epoch, step)
            self.do(self.writing.want, id, Flush(step, "storage"))

    def adopt(self, trainer: Trainer, memory: Memory, encoded: bytes) -> bool:
        """Take over an image of the previous keeper. Return whether it is held here now."""
        taken = self._adopted(trainer, memory, encoded)
        self.adopted |= {slot.label.generation for slot in self.slots.values() if slot.label}
        if self.alive:
            self.do(self.writing.handed_over, step_of((0, encoded)))
        return taken

    def _adopted(self, trainer: Trainer, memory: Memory, encoded: bytes) -> bool:
        try:
            label = Label.decode(encoded)
        except DamagedError:
            return False
        number = self.generations.adopt(
            trainer.client, label.generation, label.rank, label.world, label.nbytes
        )
        self.forget_unheld()
        if isinstance(number, Refusal):
            return number.reason is Reason.DUPLICATE
        self.slots[number] = Slot(memory, label, encoded)
        trainer.mapped[number] = memory
        trainer.sealed[number] = encoded
        self.world.check_budget(self)
        self.tasks.append(self.vote_later(label))
        return True

    def vote_later(self, label: Label) -> Task:
        """Vote for an image that was adopted."""
        yield
        self.vote(label)

    # Memory.

    def images(self, id: GenerationId) -> list[Slot]:
        """Return copies of a generation's slots by rank. The copies keep their labels."""
        found = [
            (slot.label.rank, number, slot)
            for number, slot in self.slots.items()
            if slot.label is not None and self.generations.holds(number, id)
        ]
        return [replace(slot) for _, _, slot in sorted(found, key=lambda one: one[:2])]

    def slot_of(self, id: GenerationId, rank: int) -> Slot | None:
        """Find the slot that holds the image of a rank."""
        for number, slot in self.slots.items():
            is_of_rank = slot.label is not None and slot.label.rank == rank
            if is_of_rank and self.generations.holds(number, id):
                return slot
        return None

    def is_whole(self, slot: Slot) -> bool:
        """Check an image and its label against their checksums."""
        return self.world.intact(slot, slot.memory.pieces)

    def forget_unheld(self) -> None:
        """Release memory of slots that the state machine has removed."""
        for number in self.slots.keys() - self.generations.slots:
            del self.slots[number]

    def keeps_for_flush(self, id: GenerationId | None) -> bool:
        """Return whether an image being flushed must stay. A follower drops images that a resume
        has dropped, and then finds its part damaged."""
        return self.agreement.reporting.leads or id in self.writing._parts

    # Restarts.

    def inventory(self) -> Inventory:
        """List the generations and parity to resume from."""
        return Inventory(
            self.generations.epoch,
            tuple(self.generations.restorable()),
            self.guards.inventory(),
            self.agreement.reporting.hosts,
        )

    def offer(self, reader: int) -> None:
        """Retain all restorable generations until the reader has chosen."""
        self.generations.offer(reader)
        self.guards.offer(reader, [one.generation for one in self.generations.restorable()])
        self.offered[reader] = {
            slot.memory
            for slot in self.slots.values()
            if slot.label is not None and self.generations.is_restorable(slot.label.generation)
        }

    def reader_released(self, reader: int) -> None:
        """Forget a reader whose job has begun its epoch."""
        self.gone.add(reader)
        self.offered.pop(reader, None)
        self.generations.released(reader)
        self.guards.released(reader)

    def reader_gone(self, reader: int) -> None:
        """Retain the offer to a reader that has ended, until the next epoch."""
        self.gone.add(reader)
        self.offered.setdefault(ENDED, set()).update(self.offered.pop(reader, ()))
        self.generations.client_gone(reader)
        self.guards.client_gone(reader)

    def open(self, client: int, id: GenerationId, rank: int) -> Slot | None:
        """Open an image to resume from."""
        number = self.generations.open(client, id, rank)
        return None if number is None else self.slots[number]

    async def rebuild(self, reader: int, request: Rebuild) -> str:
        """Rebuild an image. Return the reason if that is impossible. See the real keeper."""
        pin = self.generations.pin(request.generation)  # its slots must not be filled meanwhile
        try:
            return await self._rebuild_pinned(reader, request)
        finally:
            self.generations.unpin(pin)

    async def _rebuild_pinned(self, reader: int, request: Rebuild) -> str:
        id = request.generation
        damaged = self.slot_of(id, request.rank)
        if damaged is not None and self.is_whole(damaged):
            return ""
        try:
            label, memory = await rebuilt(request, RUN, "")
        except (HoldfastError, OSError) as error:
            return str(error)
        if damaged is not None:
            damaged.memory.pieces[:], damaged.memory.pages = memory.pieces, memory.pages
            damaged.label, damaged.encoded = label, label.encode()
            self.world.mended(self, id)
        else:
            number = self.generations.recall(id, label.rank, label.world, label.nbytes, epoch=False)
            self.forget_unheld()
            if isinstance(number, Refusal):
                return number.reason.value
            memory.generation = id
            self.slots[number] = Slot(memory, label, label.encode())
        self.generations.agreed(id)
        if reader not in self.gone:
            self.offer(reader)
        self.world.count("rebuilt", f"{id} rank {label.rank} at {self}")
        self.world.check_budget(self)
        return ""

    # Its process.

    def die(self) -> None:
        """End the process. Peers that wait for an answer get an error."""
        self.alive = self.process.alive = False
        for task in self.tasks:
            task.close()  # type: ignore[attr-defined]
        for slot in self.slots.values():
            slot.memory.users.clear()
        for answer in self.process.answers:
            if not answer.done():
                answer.set_exception(ConnectionResetError("it has died"))

    def recall_kept(self, before: HostKeeper) -> None:
        """Take over the memory of the previous keeper, as a service does."""
        kept = [
            (slot, slot.label)
            for number, slot in before.slots.items()
            if slot.label is not None and before.generations.holds(number, slot.label.generation)
        ]
        for slot, label in kept:
            number = self.generations.recall(
                label.generation, label.rank, label.world, label.nbytes, outlived=True
            )
            if isinstance(number, Refusal):
                continue
            self.slots[number] = Slot(slot.memory, label, slot.encoded)
            if before.generations.is_restorable(label.generation):
                self.generations.was_agreed(label.generation)
            self.world.count("kept for a service")
        self.world.check_budget(self)
