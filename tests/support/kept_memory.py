"""Keepers in this process, one or several that serve each other, and trainers that use their
memory."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from holdfast.storage.arenas.arena import Arena, FillingSlot
from holdfast.storage.arenas.folder import KeeperFolder
from holdfast.storage.arenas.hosts import GuardedGroup, KeeperHost
from holdfast.storage.arenas.label import GenerationId
from holdfast.storage.arenas.messages import (
    VERSION,
    Agreed,
    Captured,
    Enter,
    Event,
    FlushEnd,
    Hello,
    Rebuild,
    Voided,
)
from holdfast.storage.arenas.sockets import Line, listening
from holdfast.storage.format.fragment import fragment_of
from holdfast.storage.format.tables import ImageTable
from holdfast.storage.keeper.decisions.choice import Choice, DamagedImage, Stock
from holdfast.storage.keeper.decisions.generations import Generations
from holdfast.storage.keeper.decisions.slots import Slot
from holdfast.storage.keeper.descriptor_store import DescriptorStore
from holdfast.storage.keeper.keeper import Keeper
from holdfast.storage.keeper.options import KeeperOptions
from holdfast.storage.keeper.serving.serve import serve
from holdfast.storage.serving.options import ServeOptions
from holdfast.storage.state.flattening.flatten import flatten
from holdfast.storage.state.plan import SavePlan, plan_save
from holdfast.storage.training.epochs import Epochs
from holdfast.storage.training.keeper_inventory import (
    GuardOption,
    Tried,
    kept_in_memory,
    meeting,
)

RUN = "0" * 32
DEADLINE_S = 20.0
TOKEN = "f" * 32


@asynccontextmanager
async def kept(
    name: str = "keeper",
    domain: str = "here",
    store: DescriptorStore | None = None,
    **options: object,
) -> AsyncIterator[tuple[Keeper, KeeperFolder]]:
    """Run a keeper that listens, in this process, after it has recalled what ``store`` has kept."""
    with tempfile.TemporaryDirectory(prefix="hk") as base:
        folder = KeeperFolder.of(RUN, Path(base))
        folder.make()
        keeper = Keeper(KeeperOptions(RUN, domain, **options), name, store)  # type: ignore[arg-type]
        await keeper.recall()
        keeper.welcomes()
        sock = listening(folder.socket)

        async def accept() -> None:
            while True:
                connection, _ = await asyncio.get_running_loop().sock_accept(sock)
                keeper.run_later(keeper.attend(Line(connection)))

        accepting = asyncio.ensure_future(accept())
        try:
            yield keeper, folder
        finally:
            accepting.cancel()
            sock.close()
            await keeper.finish(0.1)
            await keeper.close()


def pinned(generations: Generations) -> list[Slot]:
    """Return the slots that flushes, peers and rebuilds read."""
    return [slot for slot in generations._slots.values() if slot.pins]


class Told:
    """The events that a keeper sends, in order."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def take(self, event: Event) -> bool:
        """Record an event; ask for more."""
        self.events.append(event)
        return True

    async def until(self, kind: type[Event] | tuple[type[Event], ...]) -> Event:
        """Return the first event of a kind."""
        return await self.until_any(lambda event: isinstance(event, kind))

    async def until_durable(self) -> Event:
        """Return the end of a flush that has succeeded."""
        return await self.until_any(lambda event: isinstance(event, FlushEnd) and not event.problem)

    async def until_any(self, holds: Callable[[Event], bool]) -> Event:
        """Return the first event for which ``holds`` is true."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                for event in self.events:
                    if holds(event):
                        return event
                await asyncio.sleep(0.005)


@asynccontextmanager
async def trainer(
    folder: KeeperFolder, rank: int = 0, world: int = 1, deadline_s: float = DEADLINE_S
) -> AsyncIterator[Arena]:
    """Connect one rank to the memory of the keeper."""
    arena = Arena(folder, Hello(VERSION, RUN, rank, world, "here"), deadline_s)
    assert await arena.open(), arena.problem
    try:
        yield arena
    finally:
        await arena.close()


@asynccontextmanager
async def entered(**options: object) -> AsyncIterator[tuple[Keeper, Arena]]:
    """Run a keeper with one trainer that has entered the first epoch."""
    async with kept(**options) as (keeper, folder), trainer(folder) as arena:  # type: ignore[arg-type]
        assert await arena.enter(Enter(0, None))
        yield keeper, arena


def state_of(step: int, rank: int = 0) -> dict[str, torch.Tensor]:
    """Return the state of a rank: weights that equal the step's number plus its own."""
    return {f"w{rank}": torch.full((70_000 + 5_000 * rank,), float(step) + rank)}


def planned(step: int, rank: int = 0) -> SavePlan:
    """Return the rank's plan to save that state."""
    return plan_save(flatten(state_of(step, rank)), rank, None)


async def capture(arena: Arena, step: int, told: Told, rank: int = 0) -> FillingSlot:
    """Capture a step."""
    plan = planned(step, rank)
    slot = await arena.fill(step, plan.layout.nbytes)
    assert slot is not None, arena.problem
    plan.source.copy(0, plan.layout.hashed_end, slot.memory.buffer(0, plan.layout.hashed_end))
    flat = flatten(state_of(step, rank))
    none = np.empty(0, np.int64)
    images = ImageTable(none, none, np.empty((0, 16), np.uint8))
    draft = fragment_of(("", step, 1.0), rank, plan.reported, plan.shards, images, flat.tree)
    sizes = plan.layout.hashed_end, plan.layout.chunk_nbytes, plan.layout.block_nbytes
    captured = Captured(slot.number, step, *sizes, 1.0)
    assert await arena.captured(captured, draft.encode(), told.take), arena.problem
    return slot


async def capture_until(arena: Arena, step: int, kind: type[Event]) -> Told:
    """Capture a step, wait for an event of a kind, and return all events."""
    told = Told()
    await capture(arena, step, told)
    await told.until(kind)
    return told


async def two_steps(arena: Arena) -> None:
    """Have the keeper agree on the steps 1 and 2 of epoch 3."""
    assert await arena.enter(Enter(3, None))
    for step in (1, 2):
        await capture_until(arena, step, Agreed)


# Several hosts.


@dataclass(eq=False)
class KeptHost:
    """A host: its keeper, and the ranks that train there. ``port``: its server's port."""

    name: str
    keeper: Keeper
    arenas: dict[int, Arena]
    stack: AsyncExitStack
    port: int

    @property
    def host(self) -> KeeperHost:
        """Return this host's name among its peers."""
        return replace(self.keeper.host, ranks=tuple(sorted(self.arenas)))


@dataclass(eq=False)
class KeptHosts:
    """All hosts of a job."""

    world: int
    mode: str
    hosts: dict[str, KeptHost] = field(default_factory=dict)
    epoch: int = 0

    async def add(self, name: str, ranks: Sequence[int]) -> KeptHost:
        """Start a host with trainers of these ranks."""
        stack = AsyncExitStack()
        keeper, folder = await stack.enter_async_context(kept(name, name))
        options = ServeOptions(TOKEN, "127.0.0.1")
        server = await stack.enter_async_context(
            serve(keeper.catalog, options, keeper.reporting.hear)
        )
        keeper.serves_at(f"127.0.0.1:{server.port}", TOKEN)
        arenas = {
            rank: await stack.enter_async_context(trainer(folder, rank, self.world))
            for rank in ranks
        }
        self.hosts[name] = KeptHost(name, keeper, arenas, stack, server.port)
        return self.hosts[name]

    async def lose(self, name: str) -> None:
        """Lose a host with its memory."""
        host = self.hosts.pop(name)
        await host.keeper.reporting.close()
        await host.stack.aclose()

    def stocks(self) -> list[Stock]:
        """Return the inventories of the running keepers."""
        return [Stock(host.host, host.keeper.inventory()) for host in self.hosts.values()]

    async def enter(self, chosen: int | None = None) -> None:
        """Enter the next epoch on all hosts."""
        met = meeting(self.stocks(), self.world, GuardOption(self.mode))
        assert met.problem == ""
        for host in self.hosts.values():
            for arena in host.arenas.values():
                assert await arena.enter(Enter(self.epoch, chosen, met.hosts, met.groups))
                await arena.release()
        self.epoch += 1

    async def step(self, step: int, kind: type[Event] = Agreed) -> list[Told]:
        """Capture a step on every rank, and wait until each sees ``kind`` or the step is voided.

        Return the events of each rank.
        """
        told: list[Told] = []
        for host in self.hosts.values():
            for rank, arena in host.arenas.items():
                told.append(Told())
                await capture(arena, step, told[-1], rank)
        await asyncio.gather(*(one.until((kind, Voided)) for one in told))
        return told

    def choices(self, struck: Collection[DamagedImage] = ()) -> tuple[list[Choice], list[str]]:
        """Return the steps that a restart could resume from, without the images in ``struck``."""
        return kept_in_memory(self.stocks(), [], self.world, -1, Epochs(), Tried(struck))

    async def rebuild(self, choice: Choice) -> list[str]:
        """Rebuild the lost images of a choice; return the problems."""
        problems = []
        peers = tuple(stock.host for stock in self.stocks())
        for lost in choice.rebuilt:
            arena = next(iter(self.hosts[lost.at].arenas.values()))
            request = Rebuild(choice.generation, lost.rank, lost.group, lost.lost, peers)
            if not await arena.rebuild(request):
                problems.append(arena.problem)
        return problems

    async def image(self, generation: GenerationId, rank: int, name: str) -> bytes:
        """Return the bytes of an image that a keeper holds."""
        arena = next(iter(self.hosts[name].arenas.values()))
        _, memory = await arena.image(generation, rank)
        try:
            return bytes(memory.view)
        finally:
            memory.close()

    def group(self) -> GuardedGroup:
        """Return the single group of all hosts."""
        (group,) = meeting(self.stocks(), self.world, GuardOption(self.mode)).groups
        return group


@asynccontextmanager
async def kept_hosts(mode: str, *ranks: Sequence[int]) -> AsyncIterator[KeptHosts]:
    """Start hosts a, b, c … with these ranks, in the first epoch."""
    job = KeptHosts(sum(map(len, ranks)), mode)
    try:
        for name, of in zip("abcdef", ranks, strict=False):
            await job.add(name, of)
        await job.enter()
        yield job
    finally:
        for name in list(job.hosts):
            await job.lose(name)
