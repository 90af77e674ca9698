"""Runs pipelines: the asyncio shell around the scheduler. It executes the scheduler's instructions
and reports their completion. The current recorder, if any, counts every stage of every job."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from ...core.aio import wait_out
from ...core.spans import NOT_COUNTED, NOWHERE, Span, Where, current
from .scheduler import Budget, Instruction, Release, Scheduler, StageSpec, Start

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stage(StageSpec, Generic[T]):
    """One stage of a pipeline; ``run(job)`` executes it for one job."""

    run: Callable[[T], Awaitable[None]]


class Pipeline(Generic[T]):
    """Stages that every job passes in order, within a budget; see :mod:`.scheduler`. Runs once.
    ``release(job)`` is called exactly once for every started job, after its last stage.
    ``where(job)`` returns the storage location of its stages, for recording.

    A task that has finished a stage continues with the next stage that may start: for small chunks,
    a task per stage would cost more than the stage."""

    def __init__(
        self,
        stages: Sequence[Stage[T]],
        budget: Budget,
        *,
        drain: bool = True,
        release: Callable[[T], None] = lambda job: None,
        where: Callable[[T], Where] = lambda job: NOWHERE,
    ) -> None:
        self._stages = stages
        self._release = release
        self._where = where
        self._scheduler = Scheduler(stages, budget, drain=drain)
        self._jobs: Sequence[T] = ()
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None
        self._cancelled = False
        self._recorder = current()
        self._held: dict[int, int] = {}  # by job, the bytes recorded as held
        # Tasks that have not taken their first step yet, with their start instructions.
        self._pending: dict[asyncio.Task[None], Start] = {}

    async def run(self, jobs: Sequence[T], nbytes: Sequence[int]) -> None:
        """Run all ``jobs``; ``nbytes`` is each one's share of the budget. After a failure nothing
        new starts. Running stages still use their buffers, so they are waited for; then the first
        error is raised. A cancellation cancels the running stages and waits for them, too."""
        self._jobs = jobs
        self._ended = asyncio.get_running_loop().create_future()
        self._execute(self._scheduler.submit(nbytes))
        if not self._tasks:
            return
        cancelled = await wait_out([self._ended], on_cancel=self._cancel)
        if cancelled is not None:
            raise cancelled
        if self._error is not None:
            raise self._error

    def _execute(self, instructions: Iterable[Instruction]) -> None:
        """Execute the instructions; each start gets its own task."""
        for instruction in instructions:
            if isinstance(instruction, Release):
                self._release(self._jobs[instruction.job])
                if self._recorder is not None:
                    self._recorder.hold(-self._held.pop(instruction.job, 0))
            else:
                task = asyncio.ensure_future(self._perform(instruction))
                task.add_done_callback(self._task_ended)
                self._tasks.add(task)
                self._pending[task] = instruction

    def _cancel(self) -> None:
        """Start nothing new and cancel running tasks; only once, so that cleanup is undisturbed."""
        if self._cancelled:
            return
        self._cancelled = True
        self._keep_first(asyncio.CancelledError())
        for task in self._tasks:
            task.cancel()

    async def _perform(self, start: Start | None) -> None:
        task = asyncio.current_task()
        assert task is not None
        del self._pending[task]
        while start is not None:
            try:
                with self._span(start):
                    await self._stages[start.stage].run(self._jobs[start.job])
            except BaseException as error:
                self._keep_first(error)
            start = self._stage_ended(start.job)

    def _span(self, start: Start) -> Span:
        if self._recorder is None:
            return NOT_COUNTED
        where = partial(self._where, self._jobs[start.job])
        if start.stage == 0:
            self._held[start.job] = where().nbytes
            self._recorder.hold(self._held[start.job])
        waiting = self._scheduler.waiting(start.stage)
        return self._recorder.span(self._stages[start.stage].name, where, waiting)

    def _stage_ended(self, job: int) -> Start | None:
        """Execute the scheduler's instructions at the end of a stage of ``job``. Returns the first
        start among them, which the calling task continues with. Returns none while a task of an
        earlier start is pending, because stages may have to begin in order."""
        if self._error is None:
            instructions = self._scheduler.done(job)
        else:  # even if this stage succeeded: after a cancellation nothing new starts
            instructions = self._scheduler.fail(job)
        first = None
        if not self._pending:
            first = next((i for i in instructions if isinstance(i, Start)), None)
        self._execute(i for i in instructions if i is not first)
        return first

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        never_begun = self._pending.pop(task, None)
        if never_begun is not None:  # cancelled before its first step
            self._keep_first(asyncio.CancelledError())
            self._stage_ended(never_begun.job)
        if not self._tasks and not self._ended.done():
            self._ended.set_result(None)

    def _keep_first(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
