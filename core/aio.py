"""Additions to asyncio: waiting out a cancellation, and groups of coroutines that end together.

A cancelled task often must not return immediately: a thread, or a request in flight, still uses
memory that the caller gets back when the task returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def wait_out(
    futures: Collection[asyncio.Future[Any]],
    *,
    on_cancel: Callable[[], object] | None = None,
) -> asyncio.CancelledError | None:
    """Wait until all ``futures`` are done, even if this task is cancelled meanwhile.

    ``on_cancel`` is called at each cancellation. Returns the last one, which the caller must raise
    after cleaning up; None without a cancellation.
    """
    cancelled: asyncio.CancelledError | None = None
    while not all(future.done() for future in futures):
        try:
            # Unlike awaiting the futures, this does not cancel them when the task is cancelled.
            await asyncio.wait(futures)
        except asyncio.CancelledError as error:
            cancelled = error
            if on_cancel is not None:
                on_cancel()
    return cancelled


async def to_the_end(
    work: Awaitable[T],
    *,
    grace_s: float | None = None,
    on_cancel: Callable[[], object] = lambda: None,
) -> T:
    """Return the result of ``work``, or raise its error.

    If the caller is cancelled, this waits until ``work`` has ended, and only then raises
    CancelledError: the outcome is known, and nothing uses the caller's memory any more. An error of
    ``work`` becomes the cause. After ``grace_s`` seconds ``work`` is cancelled and waited for
    again; if ``grace_s`` is None, never. Then ``work`` needs its own deadline. ``on_cancel`` is
    called at each cancellation.
    """
    task = asyncio.ensure_future(work)
    timer: asyncio.TimerHandle | None = None

    def begin_grace() -> None:
        nonlocal timer
        on_cancel()
        if timer is None and grace_s is not None:
            timer = asyncio.get_running_loop().call_later(grace_s, task.cancel)

    cancelled = await wait_out([task], on_cancel=begin_grace)
    if timer is not None:
        timer.cancel()
    if cancelled is None:
        return task.result()
    if task.cancelled():
        raise cancelled from None
    raise cancelled from task.exception()


async def side_by_side(*coroutines: Coroutine[Any, Any, Any]) -> list[Any]:
    """Run all coroutines concurrently, and return their results in order.

    If some fail, this waits for the others and raises the failure that is first in order. If the
    caller is cancelled, this cancels all of them and waits for them.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    cancelled = await wait_out(tasks, on_cancel=_cancel_once(tasks))
    errors = [task.exception() for task in tasks if not task.cancelled()]
    if cancelled is not None:
        raise cancelled
    for error in errors:
        if error is not None:
            raise error
    return [task.result() for task in tasks]


async def at_most(limit: int, coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all coroutines, at most ``limit`` at a time; otherwise like :func:`side_by_side`."""
    gate = asyncio.Semaphore(limit)

    async def gated(coroutine: Coroutine[Any, Any, T]) -> T:
        async with gate:
            return await coroutine

    given = list(coroutines)
    try:
        return await side_by_side(*map(gated, given))
    finally:
        for coroutine in given:
            coroutine.close()  # some never started, because this was cancelled


async def all_or_none(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all coroutines concurrently; when one fails or is cancelled, cancel the others.

    The first failure is raised after all have ended. The same holds if the caller is cancelled.
    """
    tasks: list[asyncio.Future[None]] = []
    first: asyncio.Future[None] | None = None
    cancel_all = _cancel_once(tasks)

    def begun(coroutine: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        task = asyncio.ensure_future(coroutine)
        task.add_done_callback(ended)
        return task

    def ended(task: asyncio.Future[None]) -> None:
        nonlocal first
        if task.cancelled() or task.exception() is not None:
            first = first or task
            cancel_all()

    tasks += map(begun, coroutines)
    cancelled = await wait_out(tasks, on_cancel=cancel_all)
    try:
        if cancelled is not None:
            raise cancelled
        if first is not None:
            first.result()
    finally:
        # The error's frames include this one, and so would keep all memory used there alive.
        tasks.clear()
        first = cancelled = None


def _cancel_once(tasks: Collection[asyncio.Future[Any]]) -> Callable[[], None]:
    """Return a function that cancels all tasks when it is first called."""
    asked_to_end = False

    def cancel_all() -> None:
        nonlocal asked_to_end
        if not asked_to_end:
            asked_to_end = True
            for task in tasks:
                task.cancel()

    return cancel_all
