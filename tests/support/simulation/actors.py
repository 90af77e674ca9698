"""The actors of a run: jobs of several ranks, copies, prunes. Each ends in time, with an allowed
outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from holdfast.core.spans import Recorder, recording
from holdfast.errors import (
    CoordinationError,
    DamagedError,
    DeadlineError,
    HoldfastError,
    MismatchError,
    NotACheckpointError,
    ReplacedError,
    UsageError,
)
from holdfast.storage.operations.loading.load import finish, run_build, run_load
from holdfast.storage.operations.maintenance import choice, copy, prune
from holdfast.storage.operations.maintenance.listing import ListedCheckpoint
from holdfast.storage.operations.saving.save import run_save
from holdfast.storage.pipeline.base import Base
from holdfast.storage.ranks.store_team import StoreTeam
from holdfast.storage.ranks.team import Team

from .checker import MAIN, OTHER, Checker, Violation
from .loop import Crashed, Process
from .schedule import ActorPlan
from .slips import Slipping
from .states import BUDGET_NBYTES, OTHER_STATE, SILENCE_S, Store, odd_job, same_as, save_job, target
from .world import SimPlace, World

TRIES = 3
AGAIN_S = 5.0


class Crew:
    """All actors of a run. ``outcomes``: the outcome of each rank by actor and try: a result, an
    error, or None if it died."""

    def __init__(self, world: World, checker: Checker) -> None:
        self.world, self.checker = world, checker
        self.outcomes: list[tuple[ActorPlan, list[Any]]] = []
        self._stores: dict[str, Store] = {}
        self.running = 0
        self.problem: BaseException | None = None
        for plan in world.schedule.actors:
            self.running += 1
            life = world.loop.create_task(self._life(plan))
            life.add_done_callback(self._over)

    def _over(self, life: asyncio.Task[None]) -> None:
        self.running -= 1
        if not life.cancelled() and life.exception() is not None:
            self.problem = self.problem or life.exception()

    async def _life(self, plan: ActorPlan) -> None:
        await asyncio.sleep(plan.begin_s)
        for number in range(TRIES if plan.again or _dies(plan) else 1):
            self.world.calm_s = max(self.world.calm_s, self.world.loop.now_s)
            ended = await self._try(plan, number)
            self.outcomes.append((plan, ended))
            if all(
                not isinstance(outcome, BaseException) and outcome is not None for outcome in ended
            ):
                break
            await asyncio.sleep(AGAIN_S)

    async def _try(self, plan: ActorPlan, number: int) -> list[Any]:
        """Run all ranks until each has ended or died. A restarted job keeps its store, as with a
        real launcher, which also kills the remaining processes."""
        store = self._stores.setdefault(plan.name, Store(self.world.loop))
        for former in self.world.processes:
            if former.alive and former.name.startswith(f"{plan.name}."):
                self.world.kill(former)
        ranks = []
        slipping = (
            Slipping(self.world, plan, store, number) if plan.slip and plan.world > 1 else None
        )
        for rank in range(plan.world):
            process = self.world.process(f"{plan.name}.{number}/{rank}", f"{plan.name}-{rank // 2}")
            process.store = store  # type: ignore[attr-defined]
            process.has_savers_of = self.world if plan.saver else None  # type: ignore[attr-defined]
            team = (
                Team() if plan.world == 1 else StoreTeam(store, rank, plan.world, "job", SILENCE_S)
            )
            act: Callable[..., Coroutine[Any, Any, Any]] = getattr(self, f"_{plan.kind}")
            save = partial(self._act, act, plan)
            acting = save(team) if slipping is None else slipping.call(rank, process, save)
            ranks.append((process, self.world.loop.spawn(process, acting)))
        if plan.killed_s and not number:
            await self._kill(plan, ranks)
        while not all(task.done() or not process.alive for process, task in ranks):
            await self._one_ended(ranks)
        return [self._outcome(plan, process, task) for process, task in ranks]

    async def _kill(self, plan: ActorPlan, ranks: list[tuple[Process, asyncio.Task[Any]]]) -> None:
        """Let the launcher kill all ranks that have not ended."""
        await asyncio.sleep(plan.killed_s)
        for process, task in ranks:
            if process.alive and not task.done():
                self.world.kill(process)
                await asyncio.sleep(plan.killed_s / 10)

    async def _one_ended(self, ranks: list[tuple[Process, asyncio.Task[Any]]]) -> None:
        """Wait until a rank ends. A death wakes nobody, so poll for it."""
        pending = {task for process, task in ranks if not task.done() and process.alive}
        await asyncio.wait(pending, timeout=5.0, return_when=asyncio.FIRST_COMPLETED)

    async def _act(
        self, act: Callable[..., Coroutine[Any, Any, Any]], plan: ActorPlan, team: Any
    ) -> Any:
        began_s = self.world.loop.now_s
        return await act(plan, team, began_s)

    def _outcome(self, plan: ActorPlan, process: Process, task: asyncio.Task[Any]) -> Any:
        if not process.alive or not task.done():
            return None
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            return task.result()
        if self.world.log is not None:
            self.world.log(f"{self.world.loop.now_s:12.4f} {process}: raised {error!r:.300}")
        if isinstance(error, Crashed):
            return None
        if isinstance(error, Violation) or not isinstance(error, HoldfastError):
            raise error
        self._allowed(plan, process, error)
        return error

    def _allowed(self, plan: ActorPlan, process: Process, error: HoldfastError) -> None:
        """Raise Violation if there was no reason for the error."""
        if isinstance(error, DamagedError | MismatchError):
            raise Violation(f"{process}: {error!r}") from error
        crowd = [
            a
            for a in self.world.schedule.actors
            if a.kind not in ("load", "remove") and a is not plan
        ]
        tried = sum(p is plan for p, _ in self.outcomes)
        if _dies(plan) and not tried:  # the surviving ranks
            return
        tried -= _dies(plan)
        if isinstance(error, NotACheckpointError):
            excused = any(m.attempt is None for m in self.checker.history)
        elif isinstance(error, CoordinationError) and plan.world == 1:
            excused = False
        elif plan.slip and isinstance(error, DeadlineError | UsageError) and not self.world.struck:
            excused = False  # another job never makes ranks lose each other
        else:
            excused = bool(self.world.struck or tried or crowd or plan.odd) or isinstance(
                error, ReplacedError
            )
        if not excused:
            raise Violation(f"{process} failed for no reason: {error!r}") from error

    async def _save(self, plan: ActorPlan, team: Any, began_s: float) -> Any:
        driver = self.world.driver(MAIN)
        try:
            job = (odd_job if plan.odd else save_job)(
                plan.state, team.rank, plan.world, self.world.schedule.chunks
            )
            if plan.base:
                key = None if plan.base == "-" else plan.base
                job.base = Base(SimPlace(self.world).opened, lambda: key)
            clock = asyncio.get_running_loop().time
            with recording(Recorder(team.rank, clock, clock)):
                attempt, *_ = await run_save(driver, team, job)
        finally:
            await driver.close()
        self.checker.saved(plan, attempt, began_s)
        return attempt

    async def _load(self, plan: ActorPlan, team: Any, began_s: float) -> Any:
        driver = self.world.driver(MAIN)
        try:
            if plan.world == 1:
                found = (await run_build(driver, 0, BUDGET_NBYTES))[0]
            else:
                saved = await self._saved_by(driver)
                job, found = target(plan.world, team.rank, self.world.schedule.chunks, saved)
                manifest, _ = await run_load(driver, team, job)
                finish(job, manifest, team.rank)
        except MismatchError:
            return "another shape"  # jobs of other sizes save other shapes here
        finally:
            await driver.close()
        state = same_as(found)
        self.checker.loaded(plan.name, state, began_s)
        return state

    async def _saved_by(self, driver: Any) -> int:
        """Return the number of ranks that saved the checkpoint, for a target of its shape."""
        from holdfast.storage.protocol.current import read_manifest

        return int((await read_manifest(driver))[0].world)

    async def _copy(self, plan: ActorPlan, team: Any, began_s: float) -> Any:
        theirs, ours = self.world.driver(OTHER), self.world.driver(MAIN)
        base = self.world.driver(f"run/{plan.base}") if plan.base else None
        try:
            await copy.copy_checkpoint(theirs, ours, copy.Orders(True, BUDGET_NBYTES), base=base)
        finally:
            await ours.close()
        if not any(m.state == OTHER_STATE for m in self.checker.during(began_s)):
            raise Violation(f"{plan.name} returned, and what it copied never was the checkpoint")
        return "copied"

    async def _prune(self, plan: ActorPlan, team: Any, began_s: float) -> Any:
        place = SimPlace(self.world)
        found = await prune.plan_pruning(place, _but_the_last, 60.0)
        self.checker.doomed.update(c.attempt for c in found.report.checkpoints)
        return await prune.carry_out(place, found, 60.0)

    async def _remove(self, plan: ActorPlan, team: Any, began_s: float) -> Any:
        """Remove a folder as ``rm -rf`` does: file by file, in any order."""
        driver = self.world.driver(f"run/{plan.base}")
        try:
            keys = [info.key async for info in driver.list()]
            while keys:
                await driver.delete(keys.pop(self.world.below(len(keys))))
        finally:
            await driver.close()
        return "removed"


def _dies(plan: ActorPlan) -> bool:
    """Return whether ranks die in the first try, so that the job is restarted."""
    slips = plan.slip is not None and plan.world > 1 and plan.slip.kind == "death"
    return slips or plan.killed_s > 0


async def _but_the_last(listed: Sequence[ListedCheckpoint]) -> choice.Choice:
    return choice.Choice(choice.choose(listed, 1, None))
