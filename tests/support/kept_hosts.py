"""Keepers of several hosts within this process, each with its own memory, address and trainers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

from holdfast.storage.arenas.arena import Arena
from holdfast.storage.arenas.hosts import GuardedGroup, KeeperHost
from holdfast.storage.arenas.label import GenerationId
from holdfast.storage.arenas.messages import Agreed, Enter, Event, Rebuild, Voided
from holdfast.storage.keeper.decisions.choice import Choice, Stock
from holdfast.storage.keeper.keeper import Keeper
from holdfast.storage.keeper.options import ServeOptions
from holdfast.storage.keeper.serving.serve import serve
from holdfast.storage.training.epochs import Epochs
from holdfast.storage.training.keeper_inventory import (
    DamagedImage,
    GuardOption,
    kept_in_memory,
    meeting,
)

from .kept_memory import Told, capture, kept, trainer

TOKEN = "f" * 32
DEADLINE_S = 20.0


@dataclass(eq=False)
class KeptHost:
    """A host: its keeper, and the ranks that train there. ``port``: where it serves."""

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
        return kept_in_memory(self.stocks(), [], self.world, -1, Epochs(), struck)

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
