"""The engine's event loop: one daemon thread per process, started at first use.

Saves and loads are coroutines. They run here and not in the caller's thread, so that an
asynchronous save goes on while the trainer trains, and a caller may run an event loop of its own.

Nothing that waits for the engine may run on its thread: a log handler that saves, for example,
would wait for itself. That is a UsageError.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar, TypeVarTuple

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
Ts = TypeVarTuple("Ts")

CPU_THREADS = max(2, min(8, os.cpu_count() or 2))
"""Threads that copy and hash. Their limit is memory bandwidth, not the number of cores."""

_log = logging.getLogger(__name__)

EXIT_S = 3600.0
"""How long the exiting interpreter waits for work that is under way."""
CLEAN_UP_S = 60.0
"""How long an interrupted call waits for its coroutine to clean up."""
END_S = 5.0
"""How long the exiting interpreter waits for the engine's thread itself."""

_unfinished: set[Future[Any]] = set()
_closing: set[asyncio.Task[None]] = set()
_lock = new_lock()
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None
_ended = False
_parents_loops: list[asyncio.AbstractEventLoop] = []


def on_engine() -> bool:
    """Whether the calling thread is the engine's."""
    return _loop is not None and asyncio._get_running_loop() is _loop


def check_may_wait() -> None:
    """Raise UsageError on the engine's thread, which must not wait for its own work."""
    if on_engine():
        raise UsageError(
            "a call that waits was made on the engine's own thread, and would wait for itself",
            advice=(
                "Something that Holdfast calls (a log handler, a driver) calls Holdfast; make that "
                "call from another thread."
            ),
        )


class EngineFuture(Future[T]):
    """A future that the engine completes. Waiting for it on the engine's thread is a UsageError,
    and so is waiting in a forked child for what the parent's engine does."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = threading.Condition(new_rlock())  # the engine may hold it at a fork
        self._pid = os.getpid()

    def done(self) -> bool:
        """See :meth:`Future.done`. Raises UsageError in a forked child, where it would never become
        true."""
        done = super().done()
        if not done and self._pid != os.getpid():
            raise UsageError(
                "this operation is under way in the parent process, and a forked child does not "
                "learn of its end",
                advice="Wait for it in the process that started it.",
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
        work.add_done_callback(self._work_ended)

    def cancel(self) -> bool:
        """Cancel the coroutine; False where it has ended."""
        work = self._work
        return work is not None and work.cancel()

    def _work_ended(self, work: Future[T]) -> None:
        self._work = None
        if work.cancelled():
            super().cancel()
            return
        error = work.exception()
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result(work.result())


def start(coroutine: Coroutine[object, None, T]) -> Future[T]:
    """Start ``coroutine`` on the engine's loop and return its future. The interpreter does not exit
    before it ends.

    Waiting for the future on the engine's thread is a UsageError. Raises UsageError when the
    interpreter is about to end, before anything of ``coroutine`` has run."""
    try:
        loop = _running_loop()
    except UsageError:
        coroutine.close()
        raise
    future = _Started(asyncio.run_coroutine_threadsafe(coroutine, loop))
    _unfinished.add(future)
    future.add_done_callback(_unfinished.discard)
    return future


def run(coroutine: Coroutine[object, None, T]) -> T:
    """Run ``coroutine`` on the engine's loop and return its result. Ctrl-C cancels it; this then
    waits until it has cleaned up, for a minute at most, and raises KeyboardInterrupt. Raises
    UsageError on the engine's thread, and as :func:`start`, before anything of ``coroutine`` has
    run."""
    ended = threading.Event()

    async def watched() -> T:
        try:
            return await coroutine
        finally:
            ended.set()

    try:
        check_may_wait()
        future = start(watched())
    except UsageError:
        coroutine.close()
        raise
    try:
        return future.result()
    except KeyboardInterrupt:
        future.cancel()
        ended.wait(CLEAN_UP_S)
        raise
    finally:
        # The future holds the error, whose frames hold this one. Without this, everything that the
        # frames hold would stay until the garbage collector runs.
        del future


def close_later(close: Callable[[], Coroutine[object, None, None]]) -> None:
    """For finalizers: run ``close()`` on the engine's loop, without waiting for it. Takes no lock
    and starts no engine, because the garbage collector may call a finalizer at any moment on any
    thread. Failures are logged."""
    loop = _loop
    if loop is not None:
        loop.call_soon_threadsafe(_begin_to_close, loop, close)


def _begin_to_close(
    loop: asyncio.AbstractEventLoop, close: Callable[[], Coroutine[object, None, None]]
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
    """Wait for asynchronous saves that are still under way when the program ends. Their own
    deadlines bound this."""
    wait(list(_unfinished), timeout=EXIT_S)


async def offload(function: Callable[[*Ts], T], *args: *Ts) -> T:
    """Run ``function`` in a worker thread of the current loop; if cancelled, wait for its end all
    the same.

    The thread uses the caller's buffers until it ends, so they must not be reused earlier.
    """
    work = asyncio.get_running_loop().run_in_executor(None, function, *args)
    return await to_the_end(work)


def _end() -> None:
    """End the engine's thread, after all else that may need it.

    A thread that waits for the interpreter's lock while the interpreter ends is made to unwind.
    Where it is within torch, C++ does not let it, and the process, whose work is done, dies of
    SIGABRT. So no thread of ours may be left.
    """
    global _ended  # noqa: PLW0603
    with _lock:
        _ended = True
    if _loop is not None and _thread is not None:
        _loop.call_soon_threadsafe(_loop.stop)
        _thread.join(END_S)


def _running_loop() -> asyncio.AbstractEventLoop:
    global _loop, _thread  # noqa: PLW0603
    with _lock:
        if _ended:
            raise UsageError(
                "the interpreter is about to end, and so has Holdfast's engine",
                advice="Save and load before the program ends, not in a handler of atexit.",
            )
        if _loop is None:
            _loop = asyncio.new_event_loop()
            _loop.set_default_executor(
                ThreadPoolExecutor(CPU_THREADS, thread_name_prefix="holdfast-cpu")
            )
            # Runs before the executors shut down, which is before atexit. concurrent.futures
            # registers itself the same way.
            threading._register_atexit(_finish_all)  # type: ignore[attr-defined]
            atexit.register(_end)
            _thread = threading.Thread(
                target=_serve, args=(_loop,), name="holdfast-engine", daemon=True
            )
            _thread.start()
        return _loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop for ever. A task that raises SystemExit or KeyboardInterrupt ends
    ``run_forever``; its future has the error, and everything else that runs here must go on."""
    while True:
        try:
            loop.run_forever()
            return
        except BaseException as error:
            _log.error("%r was raised on the engine's thread, which goes on", error)


def _forget_parent() -> None:
    """A forked child has none of its parent's threads, so it starts a new engine. It keeps the
    parent's loop and never closes it: closing would remove descriptors from the parent's epoll
    instance, which both processes share."""
    global _loop, _thread  # noqa: PLW0603
    if _loop is not None:
        _parents_loops.append(_loop)
        _loop = None
        _thread = None
    _unfinished.clear()
    _closing.clear()


in_child(_forget_parent)
