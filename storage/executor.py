"""The asyncio shell around the scheduler: it performs instructions and reports how they ended. Nothing else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any

from .scheduler import Instruction, Release, Scheduler

__all__ = ["at_most", "execute"]


async def execute(
    scheduler: Scheduler,
    nbytes: Sequence[int],
    perform: Callable[[int, str], Awaitable[None]],
    release: Callable[[int], None] = lambda job: None,
) -> None:
    """Run one job per entry of ``nbytes`` through the scheduler's stages.

    ``perform(job, stage_name)`` does one stage; ``release(job)`` is called exactly once for every job that was started,
    after its last stage has ended. After a failure nothing new starts, what runs is waited for (its buffers are in use),
    and the first error is raised. Cancelled: what runs is cancelled, and waited for likewise.
    """
    tasks: dict[asyncio.Task[None], int] = {}
    first_error: BaseException | None = None
    failures: list[Exception] = []  # in the order in which they happened: of tasks that end together, a set tells none

    def obey(instructions: Iterable[Instruction]) -> None:
        for todo in instructions:
            if isinstance(todo, Release):
                release(todo.job)
            else:
                stage = scheduler.stages[todo.stage].name
                tasks[asyncio.ensure_future(_perform(perform, todo.job, stage, failures))] = todo.job

    obey(scheduler.submit(nbytes))
    while tasks:
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError as cancelled:
            first_error = cancelled
            ended = await _cancel(tasks)
        for task in ended:
            job = tasks.pop(task)
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            first_error = first_error or (failures[0] if failures else error)
            # Cancelled, a stage may end well all the same; what comes after it is not begun any more.
            obey(scheduler.done(job) if first_error is None else scheduler.fail(job))
    if first_error is not None:
        raise first_error


async def at_most(limit: int, coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all of them, at most ``limit`` at a time; when all have ended, raise the first error if there was one."""
    gate = asyncio.Semaphore(limit)

    async def gated(coroutine: Coroutine[Any, Any, None]) -> None:
        async with gate:
            await coroutine

    given = list(coroutines)
    try:
        outcomes = await asyncio.gather(*map(gated, given), return_exceptions=True)
    finally:
        for coroutine in given:
            coroutine.close()  # cancelled, it may never have had its turn
    for outcome in outcomes:
        if outcome is not None:
            raise outcome


async def _perform(
    perform: Callable[[int, str], Awaitable[None]], job: int, stage: str, failures: list[Exception]
) -> None:
    try:
        await perform(job, stage)
    except Exception as error:
        failures.append(error)
        raise


async def _cancel(tasks: Iterable[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    running = list(tasks)
    for task in running:
        task.cancel()
    while not all(task.done() for task in running):
        with contextlib.suppress(asyncio.CancelledError):  # once is enough
            await asyncio.wait(running)
    return set(running)
