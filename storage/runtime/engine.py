"""The engine's event loop: one daemon thread per process, started at first use.

Saves and loads are coroutines. They run here instead of in the caller's thread, so that an
asynchronous save proceeds while the trainer trains, and a caller may run its own event loop.

While the interpreter shuts down, the engine has no thread, and waiting callers run the loop
themselves. So a save in an ``atexit`` handler works, or in a thread that outlives the main thread.

Nothing on the engine's thread may wait for the engine: a log handler that saves, for example, would
wait for itself. That is a UsageError.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar, TypeVarTuple

from ...core.aio import to_the_end
from ...core.forks.renewal import in_child, new_lock, new_rlock
from ...core.pool import Pool, is_exiting
from ...errors import HoldfastError, UsageError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

CPU_THREADS = max(2, min(8, os.cpu_count() or 2))
"""Threads that copy and hash. Memory bandwidth limits them, not the number of cores."""

_log = logging.getLogger(__name__)

EXIT_S = 3600.0
"""Longest time that the exiting interpreter waits for unfinished work."""
CLEAN_UP_S = 60.0
"""Longest time that an interrupted call waits for its coroutine to clean up."""
END_S = 5.0
"""Longest time that the exiting interpreter waits for the engine's thread itself."""
WAIT_S = 1.0
"""Longest single wait for a lock. Python handles a signal that arrives just before such a wait only
after it: Ctrl-C would go unnoticed until the end of the operation."""
_TURN_S = 0.05
"""Time between two attempts of a waiting caller to run the loop."""

_unfinished: set[EngineFuture[Any]] = set()
_closing: set[asyncio.Task[None]] = set()
_lock = new_lock()
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None
"""None although there is a loop: the interpreter is shutting down, and callers run the loop."""
_driving = new_lock()
"""Held by the caller that runs the loop."""
_parents_loops: list[asyncio.AbstractEventLoop] = []


def on_engine() -> bool:
    """Return whether the calling thread is the engine's."""
    return _loop is not None and asyncio._get_running_loop() is _loop


def check_may_wait() -> None:
    """Raise UsageError on the engine's thread, and after the interpreter has ended."""
    if sys.meta_path is None:
        raise UsageError(
            "the interpreter has shut down, and can no longer import anything",
            advice="Save and load in an atexit handler at the latest, not in a __del__.",
        )
    if on_engine():
        raise UsageError(
            "a blocking call was made on the engine's own thread, and would wait for itself",
            advice=(
                "Code that Holdfast calls (a log handler, a driver) calls Holdfast; make that call "
                "from another thread."
            ),
        )


class EngineFuture(Future[T]):
    """A future that the engine completes. Waiting for it is a UsageError on the engine's thread,
    and in a forked child for work of the parent's engine."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = threading.Condition(new_rlock())  # the engine may hold it at a fork
        self._pid = os.getpid()

    def done(self) -> bool:
        """Raise UsageError in a forked child if it could never become true."""
        done = super().done()
        if not done and self._pid != os.getpid():
            raise UsageError(
                "this operation is running in the parent process, and a forked child does not "
                "learn when it ends",
                advice="Wait for it in the process that started it.",
            )
        return done

    def result(self, timeout: float | None = None) -> T:
        """See :meth:`Future.result`. Raises UsageError if it would never return."""
        self._wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See :meth:`Future.exception`. Raises UsageError if it would never return."""
        self._wait(timeout)
        return super().exception(0)

    def _wait(self, timeout: float | None) -> None:
        """Wait until this is done; run the loop meanwhile if the engine has no thread."""
        if self.done():
            return
        check_may_wait()
        if _is_driven():
            _drive(self, timeout)
            return
        until_s = math.inf if timeout is None else time.monotonic() + timeout
        while not self.done() and (left_s := until_s - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError, CancelledError):
                super().exception(min(WAIT_S, left_s))


class _Started(EngineFuture[T]):
    """The outcome of a coroutine on ``loop``. Done when the coroutine has ended, even if cancelled:
    until then it may still clean up, and notify other ranks."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[object, None, T]
    ) -> None:
        super().__init__()
        self._loop = loop
        self._task: asyncio.Task[T] | None = None
        _unfinished.add(self)
        self.add_done_callback(_unfinished.discard)
        loop.call_soon_threadsafe(self._begin, coroutine)

    def cancel(self) -> bool:
        """Cancel the coroutine, which may take a while to clean up; False if it has ended."""
        if self.done():
            return False
        self._loop.call_soon_threadsafe(self._cancel)
        return True

    def _begin(self, coroutine: Coroutine[object, None, T]) -> None:
        self._task = self._loop.create_task(coroutine)
        self._task.add_done_callback(self._task_ended)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _task_ended(self, task: asyncio.Task[T]) -> None:
        self._task = None
        if task.cancelled():
            super().cancel()
            return
        error = task.exception()
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result(task.result())


def start(coroutine: Coroutine[object, None, T]) -> Future[T]:
    """Start ``coroutine`` on the engine's loop and return its future. The interpreter does not exit
    before the coroutine ends. Waiting for the future on the engine's thread is a UsageError."""
    return _Started(_running_loop(), coroutine)


def run(coroutine: Coroutine[object, None, T]) -> T:
    """Run ``coroutine`` on the engine's loop and return its result. Ctrl-C cancels it; this then
    waits up to a minute for its cleanup, and raises KeyboardInterrupt. Raises UsageError on the
    engine's thread, before any of ``coroutine`` runs."""
    try:
        check_may_wait()
    except UsageError:
        coroutine.close()
        raise
    future = start(coroutine)
    try:
        return future.result()
    except KeyboardInterrupt:
        interrupt(future)
        raise
    finally:
        # The future holds the error, whose frames include this one. Without this, everything that
        # those frames hold would stay alive until the garbage collector runs.
        del future
        finish_before_exit()


def interrupt(future: Future[Any]) -> None:
    """Cancel work begun by :func:`start`, and wait up to a minute for its cleanup. Never raises."""
    future.cancel()
    with contextlib.suppress(CancelledError, TimeoutError):
        future.exception(CLEAN_UP_S)


def finish_before_exit() -> None:
    """Finish started work if the interpreter ends and no later caller would run the loop."""
    if _is_driven() and not on_engine():
        _finish_all()


def close_later(close: Callable[[], Coroutine[object, None, None]]) -> None:
    """Run ``close()`` on the engine's loop without waiting for it. For finalizers. Takes no lock
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
            _log.warning("closing a driver that was left open failed: %s", error)

    task = loop.create_task(closed())
    _closing.add(task)
    task.add_done_callback(_closing.discard)


def _finish_all() -> None:
    """Wait for saves in flight when the program ends, up to their own deadlines."""
    until_s = time.monotonic() + EXIT_S
    for future in list(_unfinished):
        with contextlib.suppress(CancelledError, TimeoutError):
            future.exception(max(0.0, until_s - time.monotonic()))


def _is_driven() -> bool:
    """Return whether callers run the loop, because the engine has no thread."""
    return _loop is not None and _thread is None


def _drive(future: Future[Any], timeout: float | None) -> None:
    """Run the loop in the calling thread until ``future`` is done; one caller at a time."""
    loop = _loop
    assert loop is not None
    until_s = EXIT_S if timeout is None else timeout
    until_s += time.monotonic()
    while not future.done() and (left_s := until_s - time.monotonic()) > 0:
        if not _driving.acquire(timeout=min(_TURN_S, left_s)):
            continue
        callers_loop = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        try:
            loop.run_until_complete(_until_done(future, left_s))
        finally:
            asyncio._set_running_loop(callers_loop)
            _driving.release()


async def _until_done(future: Future[Any], limit_s: float) -> None:
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    future.add_done_callback(lambda _: loop.call_soon_threadsafe(done.set))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await done.wait()


async def offload(function: Callable[[*Ts], T], *args: *Ts) -> T:
    """Run ``function`` in a worker thread of the current loop; even if cancelled, wait for its end.
    The thread uses the caller's buffers until it ends, so they must not be reused earlier."""
    work = asyncio.get_running_loop().run_in_executor(None, function, *args)
    return await to_the_end(work)


def _end() -> None:
    """End the engine's thread, after everything that may need it. Later calls run the loop
    themselves.

    While the interpreter shuts down, it unwinds threads that wait for its lock. For a thread within
    torch, C++ prevents that, and the process, whose work is done, dies of SIGABRT. So no thread of
    ours may be left.
    """
    global _loop, _thread  # noqa: PLW0603
    _finish_all()
    with _lock:
        thread = _thread
        if _loop is None or thread is None:
            return
        _loop.call_soon_threadsafe(_loop.stop)
        thread.join(END_S)
        _thread = None
        if thread.is_alive():
            _loop = None  # the thread is stuck: later calls get a new loop


def _running_loop() -> asyncio.AbstractEventLoop:
    global _loop, _thread  # noqa: PLW0603
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            _loop.set_default_executor(Pool(CPU_THREADS, "holdfast-cpu"))
            atexit.register(_end)
            if not is_exiting():
                # Runs before the executors shut down, which is before atexit. concurrent.futures
                # registers itself the same way.
                threading._register_atexit(_finish_all)  # type: ignore[attr-defined]
                _thread = threading.Thread(
                    target=_serve, args=(_loop,), name="holdfast-engine", daemon=True
                )
                _thread.start()
        return _loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop forever. A task that raises SystemExit or KeyboardInterrupt ends
    ``run_forever``. Its future holds the error, and all other tasks must continue."""
    while True:
        try:
            loop.run_forever()
            return
        except BaseException as error:
            _log.error("%r was raised on the engine's thread, which continues", error)


def _forget_parent() -> None:
    """Detach a forked child from its parent's engine; it has none of the parent's threads. The
    child keeps the parent's loop without closing it: closing would remove descriptors from the
    parent's epoll instance, which both processes share."""
    global _loop, _thread  # noqa: PLW0603
    if _loop is not None:
        _parents_loops.append(_loop)
        _loop = None
        _thread = None
    _unfinished.clear()
    _closing.clear()


in_child(_forget_parent)
