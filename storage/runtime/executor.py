"""The asyncio shell around the scheduler: it performs instructions and reports how they ended.
Nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

from ...core.aio import wait_out
from .scheduler import Instruction, Release, Scheduler, Start

__all__ = ["execute"]


async def execute(
    scheduler: Scheduler,
    nbytes: Sequence[int],
    perform: Callable[[int, str], Awaitable[None]],
    release: Callable[[int], None] = lambda job: None,
) -> None:
    """Run one job per entry of ``nbytes`` through the scheduler's stages.

    ``perform(job, stage_name)`` does one stage; ``release(job)`` is called exactly once for every
    job that was started, after its last stage has ended. After a failure nothing new starts, what
    runs is waited for (its buffers are in use), and the first error is raised. Cancelled: what runs
    is cancelled, and waited for likewise.
    """
    run = _Run(scheduler, perform, release)
    run.begin(scheduler.submit(nbytes))
    try:
        if run.tasks:
            await run.ended
    except asyncio.CancelledError as cancelled:
        run.error = cancelled
        await _cancel(run.tasks)
    if run.error is not None:
        raise run.error


class _Run:
    """One call of :func:`execute`. A task that has ended a stage goes on with what may start then:
    a task for each stage would cost more than the stage, where chunks are small."""

    def __init__(
        self,
        scheduler: Scheduler,
        perform: Callable[[int, str], Awaitable[None]],
        release: Callable[[int], None],
    ) -> None:
        self._scheduler, self._perform, self._release = scheduler, perform, release
        self.tasks: set[asyncio.Task[None]] = set()
        self.error: BaseException | None = None
        self.ended = asyncio.get_running_loop().create_future()
        self._given: dict[
            asyncio.Task[None], Start
        ] = {}  # what tasks were made for that have not begun

    def begin(self, instructions: Iterable[Instruction]) -> None:
        """Obey, each start with a task of its own."""
        for todo in instructions:
            if isinstance(todo, Release):
                self._release(todo.job)
            else:
                task = asyncio.ensure_future(self._go_on(todo))
                task.add_done_callback(self._over)
                self.tasks.add(task)
                self._given[task] = todo

    async def _go_on(self, start: Start | None) -> None:
        me = asyncio.current_task()
        assert me is not None
        del self._given[me]
        while start is not None:
            try:
                await self._perform(start.job, self._scheduler.stages[start.stage].name)
            except BaseException as error:
                self.error = self.error or error
            start = self._after(start.job)

    def _after(self, job: int) -> Start | None:
        """Obey what follows the end of a stage of ``job``, but for the first start, which is
        returned; not where another has not begun yet that was started before: stages may have to
        begin in order."""
        # Cancelled, a stage may end well all the same; what comes after it is not begun any more.
        todo = self._scheduler.done(job) if self.error is None else self._scheduler.fail(job)
        first = None if self._given else next((t for t in todo if isinstance(t, Start)), None)
        self.begin(t for t in todo if t is not first)
        return first

    def _over(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        never = self._given.pop(task, None)
        if never is not None:  # cancelled before its first step
            self.error = self.error or asyncio.CancelledError()
            self._after(never.job)
        if not self.tasks and not self.ended.done():
            self.ended.set_result(None)


async def _cancel(tasks: set[asyncio.Task[None]]) -> None:
    """Cancel them, and wait until all have left the set; further cancellations change nothing."""
    for task in tasks:
        task.cancel()
    while tasks:
        await wait_out(tasks)
