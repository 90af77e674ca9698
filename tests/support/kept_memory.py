"""A keeper within this process, trainers that use its memory, and what they save: for tests of what
keepers do, without the start of other processes."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import torch

from holdfast.storage.arenas.arena import Arena, Capture, FillingSlot
from holdfast.storage.arenas.folder import KeeperFolder
from holdfast.storage.arenas.messages import VERSION, Agreed, Enter, Event, Hello
from holdfast.storage.arenas.sockets import Line, listening
from holdfast.storage.format.fragment import fragment_of
from holdfast.storage.format.tables import ImageTable
from holdfast.storage.keeper.decisions.generations import Generations
from holdfast.storage.keeper.decisions.slots import Slot
from holdfast.storage.keeper.descriptor_store import DescriptorStore
from holdfast.storage.keeper.keeper import Keeper
from holdfast.storage.keeper.options import KeeperOptions
from holdfast.storage.state.flattening.flatten import flatten
from holdfast.storage.state.plan import SavePlan, plan_save

RUN = "0" * 32
DEADLINE_S = 20.0


@asynccontextmanager
async def kept(
    name: str = "keeper",
    domain: str = "here",
    store: DescriptorStore | None = None,
    **options: object,
) -> AsyncIterator[tuple[Keeper, KeeperFolder]]:
    """A keeper that listens, within this process, and has again what ``store`` has kept."""
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
    """What a keeper tells, in order."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def take(self, event: Event) -> bool:
        """A listener that wants to be told more."""
        self.events.append(event)
        return True

    async def until(self, kind: type[Event] | tuple[type[Event], ...]) -> Event:
        """The first event of a kind."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                for event in self.events:
                    if isinstance(event, kind):
                        return event
                await asyncio.sleep(0.005)


@asynccontextmanager
async def trainer(
    folder: KeeperFolder, rank: int = 0, world: int = 1, deadline_s: float = DEADLINE_S
) -> AsyncIterator[Arena]:
    """One rank's memory of the keeper."""
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
    """What a rank saves: weights that are the number of the step, and its own."""
    return {f"w{rank}": torch.full((70_000 + 5_000 * rank,), float(step) + rank)}


def planned(step: int, rank: int = 0) -> SavePlan:
    """How it saves that."""
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
    captured = Capture(plan.layout, True, 1.0, draft.encode())
    assert await arena.captured(slot, step, captured, told.take), arena.problem
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
