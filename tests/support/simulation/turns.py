"""Saves and loads in turns: each access to storage is a step, and the test picks the next actor.

This covers all orders of a few actors, where random seeds would miss some. The only faults are
crashes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.operations.loading.load import run_build
from holdfast.storage.operations.saving.save import SaveJob, run_save
from holdfast.storage.ranks.team import Team
from holdfast.storage.state.flattening.flatten import flatten

from ..drivers import HookedDriver
from .loop import Crashed, SimLoop

BUDGET_NBYTES = 64 << 20

Choose = Callable[[list["Actor"]], "Actor"]


def run_inline(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run ``coroutine`` without threads, in virtual time."""
    return Context().run(SimLoop().run_until_complete, coroutine)


@dataclass
class Actor:
    """One save or load, which waits before each access to storage until it is released."""

    name: str
    driver: HookedDriver = field(init=False)
    task: asyncio.Task[Any] = field(init=False)
    waiting: list[asyncio.Future[None]] = field(default_factory=list)
    at: list[str] = field(default_factory=list)
    steps: int = 0
    dead: bool = False

    async def before(self, operation: str, key: str) -> None:
        if self.dead:
            raise Crashed
        turn = asyncio.get_running_loop().create_future()
        self.waiting.append(turn)
        self.at.append(f"{operation} {key}")
        await turn

    @property
    def ready(self) -> bool:
        return bool(self.waiting) and not self.dead

    def step(self) -> str:
        """Perform the access that has waited longest; say which."""
        self.steps += 1
        self.waiting.pop(0).set_result(None)
        return f"{self.name}: {self.at.pop(0)}"


def save_of(state: Any) -> Callable[[HookedDriver], Coroutine[Any, Any, Any]]:
    """An actor that saves ``state``."""
    return lambda driver: run_save(driver, Team(), SaveJob(flatten(state), None, BUDGET_NBYTES))


class Simulation:
    """Actors on one storage."""

    def __init__(self, arrange: Callable[[list[str]], list[str]] = sorted) -> None:
        self.storage = MemoryDriver()
        self.arrange = arrange
        self.actors: list[Actor] = []
        self.log: list[str] = []

    def add(self, name: str, act: Callable[[HookedDriver], Coroutine[Any, Any, Any]]) -> Actor:
        """Start another actor."""
        actor = Actor(name)
        actor.driver = HookedDriver(self.storage, before=actor.before, arrange=self.arrange)
        actor.task = asyncio.ensure_future(act(actor.driver))
        self.actors.append(actor)
        return actor

    async def settle(self) -> None:
        """Wait until every actor waits for its turn or has ended."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        while True:
            await asyncio.sleep(0)
            if loop.idle:
                return

    async def step(self, actor: Actor) -> None:
        """Let ``actor`` do one access."""
        self.log.append(actor.step())
        await self.settle()

    async def run(self, choose: Choose, checked: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run all actors to their end in the order of ``choose``.

        Call ``checked`` after each step.
        """
        await self.settle()
        while ready := await self._ready():
            await self.step(choose(ready))
            await checked()

    async def _ready(self) -> list[Actor]:
        """Return the actors that wait for a turn; if all wait for time, let time pass."""
        while True:
            ready = [a for a in self.actors if a.ready]
            if ready or all(a.dead or a.task.done() for a in self.actors):
                return ready
            await asyncio.sleep(1.0)
            await self.settle()

    def crash(self, actor: Actor) -> None:
        """Crash an actor: it does nothing more."""
        actor.dead = True
        self.log.append(f"{actor.name}: dies at {actor.at}")

    async def load(self) -> Any:
        """Load the current checkpoint."""
        state = (await run_build(self.storage, 0, BUDGET_NBYTES))[0]
        return state

    async def end(self) -> None:
        """Cancel the tasks of dead actors; the storage refuses their cleanup."""
        for actor in self.actors:
            actor.dead = actor.dead or not actor.task.done()
            actor.task.cancel()
        await asyncio.gather(*(a.task for a in self.actors), return_exceptions=True)
