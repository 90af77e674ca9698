"""An event loop whose time passes only when nothing else can happen, and processes that may pause
and die.

Each callback belongs to the *process* that was current when its task or timer was made. Callbacks
of a dead process never run. Callbacks of a paused process run when the pause ends. The loop uses no
threads, file descriptors or real waiting, so two runs with the same input behave the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context, ContextVar, copy_context
from typing import Any

from holdfast.core.lru import LruCache
from holdfast.storage.operations.saving.global_plan import GlobalPlans
from holdfast.storage.operations.saving.save_job import PLANS_KEPT

from ..clock import WithoutThreads


class Crashed(BaseException):
    """The current process is dead: it does nothing more, not even cleanup."""


class Deadlock(AssertionError):
    """Tasks wait, and no timer is set: nothing will ever wake them."""


class Process:
    """One process of one simulated host."""

    def __init__(self, name: str, host: str) -> None:
        self.name, self.host = name, host
        self.alive = True
        self.paused_until_s = 0.0
        self.skew_s = 0.0
        """Seconds by which its clock is ahead of the storage's."""
        self.plans: GlobalPlans = LruCache(PLANS_KEPT)

    def __repr__(self) -> str:
        return self.name


PROCESS: ContextVar[Process | None] = ContextVar("simulated-process", default=None)


def check_alive() -> None:
    """Raise Crashed if the current process has just died: it must not finish its step."""
    process = PROCESS.get()
    if process is not None and not process.alive:
        raise Crashed


_Due = list[Any]
"""A callback (None if cancelled), its arguments, and its context."""


class _Handle(_Due):
    __slots__ = ("when_s",)

    def __init__(
        self, callback: Callable[..., Any], args: tuple[Any, ...], context: Context, when_s: float
    ) -> None:
        super().__init__((callback, args, context))
        self.when_s = when_s

    def cancel(self) -> None:
        self[0] = None

    def cancelled(self) -> bool:
        return self[0] is None

    def when(self) -> float:
        return self.when_s


class SimLoop(WithoutThreads):
    """The part of an event loop that tasks, futures, timeouts and sleeps need. Time starts at 0."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.problems: list[str] = []
        """Exceptions that were never retrieved."""
        self._tasks: list[asyncio.Task[Any]] = []  # also of the dead: nothing else refers to them
        self._dropped: list[_Due] = []
        self._ready: deque[_Due] = deque()
        self._timers: list[tuple[float, int, _Due | asyncio.Future[None]]] = []
        self._count = itertools.count()

    def time(self) -> float:
        """Return the seconds since the run began."""
        return self.now_s

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> Any:  # type: ignore[override]
        """See asyncio. Callbacks run in the order of calls. Only tasks and futures pass a context;
        they never cancel, so they get no handle."""
        if context is not None:
            self._ready.append([callback, args, context])
            return None
        handle = _Handle(callback, args, copy_context(), 0.0)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # one thread runs at a time

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> Any:  # type: ignore[override]
        """See asyncio."""
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> Any:  # type: ignore[override]
        """See asyncio. Callbacks due at the same moment run in the order of calls."""
        handle = _Handle(callback, args, copy_context() if context is None else context, when)
        heapq.heappush(self._timers, (when, next(self._count), handle))
        return handle

    def after(self, delay_s: float) -> asyncio.Future[None]:
        """Sleep like asyncio.sleep, at lower real cost. One task must await the result at once."""
        future: asyncio.Future[None] = asyncio.Future(loop=self)
        heapq.heappush(self._timers, (self.now_s + delay_s, next(self._count), future))
        return future

    def create_future(self) -> asyncio.Future[Any]:
        """See asyncio."""
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: Context | None = None
    ) -> Any:  # type: ignore[override]
        """See asyncio."""
        task = asyncio.Task(coro, loop=self, name=name or "-", context=context)
        self._tasks.append(task)
        return task

    get_debug = staticmethod(bool)  # always False; asyncio asks for each future

    def is_closed(self) -> bool:
        """Return False: there is nothing to close."""
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Record an exception that was never retrieved."""
        if not isinstance(context.get("exception"), Crashed):
            self.problems.append(f"{context.get('message')}: {context.get('exception')!r}")

    def spawn(self, process: Process, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine as that process."""
        context = copy_context()
        context.run(PROCESS.set, process)
        return self.create_task(coroutine, name=process.name, context=context)  # type: ignore[no-any-return]

    @property
    def pending(self) -> list[asyncio.Task[Any]]:
        """Unfinished tasks. Tasks of dead processes never finish."""
        return [task for task in self._tasks if not task.done()]

    def run_until(self, done: Callable[[], bool]) -> None:
        """Run until ``done()`` is true, which is asked whenever nothing is ready. Raises Deadlock
        if nothing more can happen."""
        with self.entered():
            self.settle()
            while not done():
                self.pass_time()
                self.settle()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make this the running loop during the body."""
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            yield
        finally:
            asyncio._set_running_loop(before)

    def run_until_complete(self, future: Any) -> Any:
        """See asyncio."""
        task = future if isinstance(future, asyncio.Future) else self.create_task(future)
        self.run_until(task.done)
        return task.result()

    def settle(self) -> None:
        """Run all ready callbacks, and those that become ready meanwhile."""
        ready = self._ready
        while ready:
            due = ready.popleft()
            callback, args, context = due
            if callback is None:
                continue
            process = context.get(PROCESS)
            if process is not None and (not process.alive or process.paused_until_s > self.now_s):
                self._hold(process, due)
            else:
                context.run(callback, *args)

    def _hold(self, process: Process, due: _Due) -> None:
        if process.alive:
            heapq.heappush(self._timers, (process.paused_until_s, next(self._count), due))
        else:
            self._dropped.append(due)

    def raise_the_dead(self) -> None:
        """Requeue the callbacks of dead processes, so that their tasks can end."""
        self._ready.extend(self._dropped)
        self._dropped.clear()

    def pass_time(self) -> None:
        """Advance to the next timer. Raises Deadlock if there is none."""
        timers = self._timers
        while timers:
            when_s, _, due = heapq.heappop(timers)
            if isinstance(due, list):
                if due[0] is None:
                    continue
                self._ready.append(due)
            elif due.done():
                continue
            else:
                due.set_result(None)
            self.now_s = max(self.now_s, when_s)
            return
        waiting = [f"{t.get_name()}: {t.get_coro()}" for t in self.pending]
        raise Deadlock(f"after {self.now_s:g} s nothing can happen any more; there wait {waiting}")
