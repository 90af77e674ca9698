"""One of several simulated hosts, and the keeper on it: the real code of a keeper, but for its
messages to trainers, and its memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from holdfast.errors import HoldfastError
from holdfast.storage.arenas.hosts import KeeperHost
from holdfast.storage.arenas.label import GenerationId, Label
from holdfast.storage.arenas.messages import (
    Agreed,
    Durable,
    Event,
    Flush,
    FlushFailed,
    Inventory,
    Protected,
    Rebuild,
    Voided,
)
from holdfast.storage.keeper.agreement import Agreement
from holdfast.storage.keeper.decisions.lead import Lead
from holdfast.storage.keeper.decisions.slots import Refusal
from holdfast.storage.keeper.flushing.writing import Writing
from holdfast.storage.keeper.parity.guards import Guards, rebuilt
from holdfast.storage.keeper.status import Counters
from holdfast.storage.training.keeper_inventory import Meeting

from .keeper_peers import KeeperProcess
from .keepers import RUN, Held, Job, Memory, SimulatedKeeper, Trainer, step_of
from .loop import PROCESS

if TYPE_CHECKING:
    from .keeper_hosts import Hosts

__all__ = ["STATE_NBYTES", "Host", "HostJob", "HostKeeper", "HostTrainer"]

STATE_NBYTES = 120
"""Divides by the size of any job here."""


@dataclass(eq=False)
class Host:
    """A host, by the name of its keeper."""

    name: str
    keeper: HostKeeper = field(init=False)


@dataclass(eq=False)
class HostJob(Job):
    """One start of the job. ``readers``: the client that reads what it goes on from, by host."""

    hosts: tuple[Host, ...] = ()
    meeting: Meeting = field(default_factory=Meeting)
    readers: dict[str, int] = field(default_factory=dict)
    has_failed: bool = False

    def host_of(self, rank: int) -> Host:
        """Where a rank is."""
        return self.hosts[rank * len(self.hosts) // self.world]


class HostTrainer(Trainer):
    """One rank of a job, on one of the hosts."""

    def __init__(self, world: Any, job: HostJob, rank: int) -> None:
        super().__init__(world, job, rank)
        self.host = job.host_of(rank)

    def found(self) -> SimulatedKeeper:
        """The keeper of this host."""
        return self.host.keeper

    @property
    def image_nbytes(self) -> int:
        """Of its part of the state."""
        return STATE_NBYTES // self.job.world

    @property
    def wishes(self) -> bool:
        """Whether it is the one of its host that wants steps in storage."""
        assert isinstance(self.job, HostJob)
        return self.rank == 0 or self.job.host_of(self.rank - 1) is not self.host


class HostKeeper(SimulatedKeeper):
    """The keeper of one host: the real one, but for its messages to trainers, and its memory."""

    world: Hosts

    def __init__(self, world: Hosts, host: Host) -> None:
        super().__init__(world)  # type: ignore[arg-type]
        self.host = host
        self.adopted: set[GenerationId] = set()
        self.gone: set[int] = set()
        """Readers that have ended."""
        self.offered: dict[int, set[Memory]] = {}
        """What each reader may choose."""
        self.number = next(world.numbers)
        self.process = KeeperProcess(self, f"{host.name}#{self.number}")
        world.processes.append(self.process)
        self.context = copy_context()
        self.context.run(PROCESS.set, self.process)
        counters = Counters()
        self.guards = Guards(RUN, "", self.changed)
        self.agreement = Agreement(
            host.name,
            self,  # type: ignore[arg-type]
            self.guards,
            counters,
            self.tell,
            self.run_later,
            "",
        )
        reporting = self.agreement.reporting
        reporting.lead = Lead(str(self.number))  # by chance otherwise
        self.writing = Writing(
            self,  # type: ignore[arg-type]
            None,
            counters,
            reporting,
            self.tell,
            self.agreement.damaged,
        )
        self.agreement.writes(self.writing)

    def __str__(self) -> str:
        return self.process.name

    @property
    def is_paused(self) -> bool:
        """Whether its process sleeps."""
        return self.process.paused_until_s > self.world.loop.now_s

    @property
    def named(self) -> KeeperHost:
        """As others name it."""
        return KeeperHost(self.host.name, self.host.name, self.host.name)

    def do(self, work: Callable[..., Any], *args: Any) -> Any:
        """Run ``work`` as this process."""
        return self.context.run(work, *args)

    def changed(self) -> None:
        """Parity was made, or could not be."""
        self.agreement.tell_later()

    def run_later(self, work: Coroutine[Any, Any, None]) -> None:
        """See the real keeper."""
        asyncio.ensure_future(work).add_done_callback(self.ended)

    def ended(self, task: asyncio.Task[Any]) -> None:
        """A task has; none may fail."""
        if not task.cancelled() and task.exception() is not None and self.process.alive:
            self.world.failure = self.world.failure or task.exception()

    async def tell(self, event: Event) -> None:
        """Trainers of this epoch are told."""
        is_final = isinstance(event, FlushFailed) and event.final
        if is_final or isinstance(event, Durable | Voided):
            self.told_end(event.generation)
        if isinstance(event, Agreed | Voided):
            self.world.awaited.discard((self, event.generation))
        if isinstance(event, Agreed):
            self.world.told_agreed(self, event.generation)
        elif isinstance(event, Protected):
            self.world.told_guarded(self, event.generation)
        elif isinstance(event, Durable):
            durable = self.world.told.setdefault("durable", {})
            newest = durable.get(self.host.name, event.generation)
            durable[self.host.name] = max(newest, event.generation)

    def enter(self, trainer: Trainer) -> Refusal | None:
        """A trainer goes on in the epoch of its job."""
        job = trainer.job
        assert isinstance(job, HostJob)
        refusal = self.generations.enter(trainer.client, trainer.rank, job.epoch, job.chosen)
        if refusal is None:
            hosts, groups = job.meeting.hosts, job.meeting.groups
            self.do(self.agreement.enter, job.epoch, job.chosen, hosts, groups)
            self.do(self.writing.forget_dropped)
            self.forget_unheld()
        self.reader_gone(job.readers.get(self.host.name, -1))
        return refusal

    def offer(self, reader: int) -> None:
        """What is here stays until the reader has chosen what to go on from."""
        self.generations.offer(reader)
        self.guards.offer(reader, [one.generation for one in self.generations.restorable()])
        self.offered[reader] = {
            held.memory
            for held in self.slots.values()
            if held.label is not None and self.generations.is_restorable(held.label.generation)
        }

    def reader_gone(self, reader: int) -> None:
        """It has chosen, or its process has ended."""
        self.gone.add(reader)
        self.offered.pop(reader, None)
        self.generations.client_gone(reader)
        self.guards.released(reader)

    def fill(self, trainer: Trainer, step: int, nbytes: int) -> int | None:
        """A slot; others may wait for a step that this rank has left out."""
        slot = super().fill(trainer, step, nbytes)
        self.do(self.agreement.look_for_missing)
        return slot

    def make(self, trainer: Trainer, slot: int, nbytes: int) -> bool:
        """The system may have no memory left, or take its time."""
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
        return super().make(trainer, slot, nbytes)

    async def _make_slowly(self, slot: int, nbytes: int) -> None:
        """It is there for a later step."""
        for _ in range(self.world.random.choice([1, 5, 20])):
            await self.world.piece()
        if self.world.full:
            self.generations.unmade(slot)
            return
        self.generations.made(slot)
        self.slots[slot] = Held(Memory(nbytes))
        self.world.check_budget(self)

    def dropped(self, trainer: Trainer, slot: int) -> None:
        """Nothing was captured."""
        super().dropped(trainer, slot)
        if self.alive:
            self.do(self.agreement.look_for_missing)

    def adopt(self, trainer: Trainer, memory: Memory, encoded: bytes) -> bool:
        """An image of the keeper before, which may have said that it has parity of it."""
        adopted = super().adopt(trainer, memory, encoded)
        self.adopted |= {held.label.generation for held in self.slots.values() if held.label}
        if self.alive:
            self.do(self.writing.handed_over, step_of((0, encoded)))
        return adopted

    def vote(self, label: Label) -> None:
        """An image is sealed."""
        sealed = self.world.sealed.setdefault(label.generation, {})
        if sealed.get(label.rank) is not self and label.generation not in self.adopted:
            self.world.awaited.add((self, label.generation))
        sealed[label.rank] = self
        handed_over = label.generation in self.adopted
        self.do(self.run_later, self.agreement.vote(label, handed_over=handed_over))

    def wish(self, trainer: Trainer, step: int) -> None:
        """A trainer wants a step in storage."""
        if self.alive and trainer.job.epoch == self.generations.epoch:
            id = GenerationId(trainer.job.epoch, step)
            self.do(self.writing.want, id, Flush(step, "storage"))

    def images(self, id: GenerationId) -> list[Held]:
        """With their labels, whatever becomes of their slots."""
        return [replace(held) for held in super().images(id)]

    def keeps_for_flush(self, id: GenerationId | None) -> bool:
        """Whether what is written to storage has to stay. A keeper that is not the lead keeper lets
        go of what a resume has dropped, and then finds it damaged if it is still being written."""
        return self.agreement.reporting.leads or id in self.writing._parts

    def inventory(self) -> Inventory:
        """What there is to go on from."""
        hosts = self.agreement.reporting.hosts
        return replace(super().inventory(), guards=self.guards.inventory(), hosts=hosts)

    async def rebuild(self, reader: int, request: Rebuild) -> str:
        """Rebuild an image; return why it cannot be. See the real keeper."""
        pin = self.generations.pin(request.generation)  # no slot of it is filled meanwhile
        try:
            return await self._make_again(reader, request)
        finally:
            self.generations.unpin(pin)

    async def _make_again(self, reader: int, request: Rebuild) -> str:
        id = request.generation
        struck = self.slot_of(id, request.rank)
        if struck is not None and self.is_whole(struck):
            return ""
        try:
            label, memory = await rebuilt(request, RUN, "")
        except (HoldfastError, OSError) as error:
            return str(error)
        if struck is not None:
            struck.memory.pieces[:], struck.memory.pages = memory.pieces, memory.pages
            struck.label, struck.encoded = label, label.encode()
            self.world.mended(self, id)
        else:
            number = self.generations.recall(id, label.rank, label.world, label.nbytes, epoch=False)
            self.forget_unheld()
            if isinstance(number, Refusal):
                return number.reason.value
            memory.generation = id
            self.slots[number] = Held(memory, label, label.encode())
        self.generations.agreed(id)
        if reader not in self.gone:
            self.offer(reader)
        self.world.count("rebuilt", f"{id} rank {label.rank} at {self}")
        self.world.check_budget(self)
        return ""

    def slot_of(self, id: GenerationId, rank: int) -> Held | None:
        """Find the slot that holds the image of a rank."""
        for slot, held in self.slots.items():
            is_of_rank = held.label is not None and held.label.rank == rank
            if is_of_rank and self.generations.holds(slot, id):
                return held
        return None

    def is_whole(self, held: Held) -> bool:
        """Check an image and its label against their checksums."""
        return self.world.intact(held, held.memory.pieces)

    def die(self) -> None:
        """Nothing of it happens any more, and whoever waits for an answer learns of it."""
        super().die()
        self.process.alive = False
        for answer in self.process.answers:
            if not answer.done():
                answer.set_exception(ConnectionResetError("it has died"))
