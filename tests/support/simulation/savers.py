"""Savers in a simulated job: each rank that saves hands its image to a process of its own. A saver
may die. It commits the save if the rank has died.

The shared memory and the connection between both processes are simulated. The saver's writes and
commits are real code.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from holdfast.drivers.contract import Driver
from holdfast.errors import HoldfastError, StorageError
from holdfast.storage.format.manifest import Manifest, image_key
from holdfast.storage.operations.rounds import Begun
from holdfast.storage.operations.saving.save_job import SaveJob
from holdfast.storage.operations.saving.saver_save import SaverSave, Will
from holdfast.storage.pipeline.base import Borrowing
from holdfast.storage.pipeline.capture import TensorChunks, capture_into
from holdfast.storage.pipeline.image_writer import WrittenImage
from holdfast.storage.pipeline.memory_writer import write_memory
from holdfast.storage.protocol.attempt import Attempt
from holdfast.storage.protocol.commit import commit
from holdfast.storage.ranks.team import Team
from holdfast.storage.runtime.buffers import HostBuffer
from holdfast.storage.saver import finishing
from holdfast.storage.saver.finishing import finish
from holdfast.storage.saver.messages import Write
from holdfast.storage.state.plan import SavePlan

from .breaking import Broken
from .checker import MAIN
from .loop import PROCESS, Crashed, Process
from .schedule import Schedule

if TYPE_CHECKING:
    from .world import World

LOOK_S = 0.05
"""Time until the death of another process is noticed."""


def with_savers(schedule: Schedule) -> Schedule:
    """Return the schedule with savers for all saves; half of the save jobs are killed."""
    rng = random.Random(~schedule.seed)
    actors = []
    for plan in schedule.actors:
        actor = plan
        if actor.kind == "save":
            killed_s = rng.choice(
                (0.0, rng.choice((0.03, 0.06, 0.1, 0.2, 0.5)) * (0.5 + rng.random()))
            )
            actor = replace(actor, saver=True, killed_s=0.0 if actor.slip else killed_s)
        actors.append(actor)
    return replace(schedule, actors=tuple(actors))


@dataclass
class _Memory:
    """Memory shared by a trainer and its saver."""

    whole: HostBuffer
    is_populated: bool = True

    @property
    def nbytes(self) -> int:
        return len(self.whole.view)

    def buffer(self, start: int, nbytes: int) -> HostBuffer:
        return self.whole.part(start, start + nbytes)


@dataclass
class _Request:
    """A message to a saver, and its answer."""

    write: Write
    plan: SavePlan
    memory: _Memory
    borrowing: Borrowing
    is_forgotten: bool = False
    answer: asyncio.Future[WrittenImage] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class SimSaverSave(SaverSave):
    """A save by a simulated saver."""

    @classmethod
    async def of(
        cls, job: SaveJob, driver: Driver, plan: SavePlan, team: Team
    ) -> SimSaverSave | None:
        """Return a save if the current process has savers, else None."""
        process = PROCESS.get()
        world: World | None = getattr(process, "has_savers_of", None)
        if process is None or world is None or not len(plan.layout.start):
            return None
        memory = _Memory(HostBuffer.allocate(plan.layout.nbytes))
        memory_: Any = memory
        made = cls(job, plan, team, ("", "", {}), memory_)
        made._process, made._world_of = process, world
        return made

    _process: Process
    _world_of: World

    async def write(
        self,
        driver: Driver,
        begin: Callable[[], Awaitable[Begun]],
        will: Will,
        until_ended: AsyncExitStack,
    ) -> WrittenImage:
        """See :meth:`SaverSave.write`. A saver that dies is replaced."""
        layout, callbacks = self._plan.layout, self._job.callbacks
        memory: Any = self._memory
        await capture_into(memory, layout, TensorChunks(layout, self._plan.source), self._moved)
        callbacks.captured()
        begun = await begin()
        self.borrowing = Borrowing(self._job.base, begun.base)
        key = image_key(begun.attempt, self._rank, self._job.packing)
        message = self._request(begun, key, False, *will())
        while True:
            request = _Request(message, self._plan, memory, self.borrowing)
            saver = serve(self._world_of, self._process, request)
            while not request.answer.done() and saver.alive:
                await asyncio.wait([request.answer], timeout=LOOK_S)
            if request.answer.done():
                until_ended.callback(setattr, request, "is_forgotten", True)
                callbacks.sealed()
                return request.answer.result()


def serve(world: World, trainer: Process, request: _Request) -> Process:
    """Start a saver for one request, and return its process."""
    process = world.process(f"saver of {trainer.name}", trainer.host)
    world.savers.append(process)
    world.loop.spawn(process, _serve(world, process, trainer, request))
    return process


def is_alive(trainer: Process) -> bool:
    """Return whether a trainer lives. A real saver learns that from the kernel."""
    return trainer.alive


async def _force(
    driver: Driver, attempt: Attempt, manifest: Manifest, *, overwrite: bool
) -> Attempt | None:
    """Commit although another process has decided otherwise."""
    await driver.delete(attempt.record_key)
    return await commit(driver, attempt, manifest, overwrite=overwrite)


BROKEN = [
    Broken(
        "a saver does not wait for the end of its trainer",
        lambda: iter([(sys.modules[__name__], "is_alive", lambda trainer: False)]),
        seed=7,
    ),
    Broken(
        "a saver removes the record of another process",
        lambda: iter([(finishing, "commit", _force)]),
        seed=47,
    ),
]


async def _serve(world: World, process: Process, trainer: Process, request: _Request) -> None:
    driver = world.driver(MAIN)
    try:
        try:
            written = await _written(driver, request)
        except HoldfastError as error:
            if not request.answer.done():
                request.answer.set_exception(error)
                request.answer.exception()
            return
        request.answer.set_result(written)
        while not request.is_forgotten and is_alive(trainer):
            await asyncio.sleep(LOOK_S)
        if not request.is_forgotten:
            await finish(driver, request.write, written)
            world.finished += 1
    except (HoldfastError, StorageError, Crashed):
        pass  # no trainer is left to receive the error
    finally:
        world.savers.remove(process)
        await driver.close()


async def _written(driver: Driver, request: _Request) -> WrittenImage:
    write, memory = request.write, request.memory
    shared: Any = memory
    compression: Any = write.compression or None
    borrower = (Borrowing(request.borrowing.base, write.choice), write.rank)
    return await write_memory(
        driver, write.key, request.plan.layout, shared, compression, borrower=borrower
    )
