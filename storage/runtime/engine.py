"""The engine's event loop: one daemon thread per process, started at first use.

Saves and loads are coroutines. They run here, not in the caller's thread, so that an asynchronous
save goes on while the trainer trains, and so that a caller who is inside an event loop of its own
is not disturbed.

Nothing that waits for the engine may run on its thread: a log handler that saves, say, would wait
for itself. That is a UsageError.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from ...core.aio import to_the_end
from ...core.forks.renewal import in_child, new_lock, new_rlock
from ...errors import HoldfastError, UsageError

__all__ = [
    "CPU_THREADS",
    "EngineFuture",
    "check_may_wait",
    "close_later",
    "offload",
    "on_engine",
    "run",
    "start",
]

T = TypeVar("T")

CPU_THREADS = max(2, min(8, os.cpu_count() or 2))
"""Threads that copy and hash. Memory bandwidth, not the number of cores, is what they use up."""

_log = logging.getLogger(__name__)

EXIT_S = 3600.0
CLEAN_UP_S = 60.0

_unfinished: set[Future[Any]] = set()
_closing: set[asyncio.Task[None]] = set()
_lock = new_lock()
_loop: asyncio.AbstractEventLoop | None = None
_of_parents: list[asyncio.AbstractEventLoop] = []


def on_engine() -> bool:
    """Whether the engine's own thread calls this."""
    return _loop is not None and asyncio._get_running_loop() is _loop


def check_may_wait() -> None:
    """Raise UsageError on the engine's thread, which cannot wait for what only it can do."""
    if on_engine():
        raise UsageError(
            "a call that waits was made on the engine's own thread, and would wait for itself",
            advice=(
                "Something that Holdfast calls (a log handler, a driver) calls Holdfast: let "
                "another thread do that."
            ),
        )


class EngineFuture(Future[T]):
    """A future that the engine fulfils. Waiting for it on the engine's thread is a UsageError, and
    so is waiting in a forked child for what the parent's engine does."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = threading.Condition(new_rlock())  # the engine may hold it at a fork
        self._pid = os.getpid()

    def done(self) -> bool:
        """See :meth:`Future.done`. Raises UsageError in a forked child, where it would be False for
        ever."""
        done = super().done()
        if not done and self._pid != os.getpid():
            raise UsageError(
                "what is asked for is under way in the parent process, and this forked child does "
                "not learn of its end",
                advice="Wait for it in the process that has begun it.",
            )
        return done

    def result(self, timeout: float | None = None) -> T:
        """See :meth:`Future.result`. Raises UsageError where it would never return."""
        if not self.done():
            check_may_wait()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See :meth:`Future.exception`. Raises UsageError where it would never return."""
        if not self.done():
            check_may_wait()
        return super().exception(timeout)


class _Started(EngineFuture[T]):
    """The outcome of ``work``, a coroutine on the engine's loop."""

    def __init__(self, work: Future[T]) -> None:
        super().__init__()
        self._work: Future[T] | None = work
        work.add_done_callback(self._end)

    def cancel(self) -> bool:
        """Cancel the coroutine; False where it has ended."""
        work = self._work
        return work is not None and work.cancel()

    def _end(self, work: Future[T]) -> None:
        self._work = None
        if work.cancelled():
            super().cancel()
        elif (error := work.exception()) is not None:
            self.set_exception(error)
        else:
            self.set_result(work.result())


def start(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Run ``coroutine`` on the engine's loop; return its future at once. The interpreter does not
    exit before it ends.

    To wait for the future on the engine's thread is a UsageError."""
    future = _Started(asyncio.run_coroutine_threadsafe(coroutine, _running_loop()))
    _unfinished.add(future)
    future.add_done_callback(_unfinished.discard)
    return future


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run ``coroutine`` on the engine's loop and return its result. Ctrl-C cancels it; then this
    waits for what it does to clean up, a minute at most, and raises KeyboardInterrupt. Raises
    UsageError on the engine's thread; then nothing of ``coroutine`` has run."""
    try:
        check_may_wait()
    except UsageError:
        coroutine.close()
        raise
    ended = threading.Event()

    async def watched() -> T:
        try:
            return await coroutine
        finally:
            ended.set()

    future = start(watched())
    try:
        return future.result()
    except KeyboardInterrupt:
        future.cancel()
        ended.wait(CLEAN_UP_S)
        raise
    finally:
        # It holds the error, whose frames hold this one: what else they hold would wait for the
        # garbage collector.
        del future


def close_later(close: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """For finalizers: run ``close()`` on the engine's loop, and wait for nothing. Takes no lock,
    and starts no engine, since the garbage collector calls finalizers at any moment of any thread.
    What fails is logged."""
    loop = _loop
    if loop is not None:
        loop.call_soon_threadsafe(_begin_to_close, loop, close)


def _begin_to_close(
    loop: asyncio.AbstractEventLoop, close: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    async def closed() -> None:
        try:
            await close()
        except HoldfastError as error:
            _log.warning("closing what was left open failed: %s", error)

    task = loop.create_task(closed())
    _closing.add(task)
    task.add_done_callback(_closing.discard)


def _finish_all() -> None:
    """An asynchronous save still under way when the program ends is finished: its own deadlines
    bound it."""
    wait(list(_unfinished), timeout=EXIT_S)


async def offload(function: Callable[..., T], *args: Any) -> T:
    """Run ``function`` in a worker thread of the current loop; if cancelled, wait for it all the
    same.

    The thread goes on using the caller's buffers until it ends: to return earlier would let them be
    reused under it.
    """
    work = asyncio.get_running_loop().run_in_executor(None, function, *args)
    return await to_the_end(work)


def _running_loop() -> asyncio.AbstractEventLoop:
    global _loop  # noqa: PLW0603
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            _loop.set_default_executor(
                ThreadPoolExecutor(CPU_THREADS, thread_name_prefix="holdfast-cpu")
            )
            # Before the executors shut down, which is before atexit: concurrent.futures registers
            # itself the same way.
            threading._register_atexit(_finish_all)  # type: ignore[attr-defined]
            threading.Thread(
                target=_serve, args=(_loop,), name="holdfast-engine", daemon=True
            ).start()
        return _loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop for ever. A task that raises SystemExit or KeyboardInterrupt ends
    ``run_forever``: its future has the error, and everything else that runs here goes on."""
    while True:
        try:
            loop.run_forever()
            return
        except BaseException as error:
            _log.error("%r was raised on the engine's thread, which goes on", error)


def _forget_parent() -> None:
    """A forked child has no threads of its parent: it starts anew. It keeps the parent's loop, and
    never closes it: that would take descriptors out of the parent's epoll instance, which both
    processes share."""
    global _loop  # noqa: PLW0603
    if _loop is not None:
        _of_parents.append(_loop)
        _loop = None
    _unfinished.clear()
    _closing.clear()


in_child(_forget_parent)
