"""The engine's event loop: one daemon thread per process, started at first use.

Saves and loads are coroutines. They run here, not in the caller's thread, so that an asynchronous save goes on while the
trainer trains, and so that a caller who is inside an event loop of its own is not disturbed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

__all__ = ["CPU_THREADS", "offload", "run", "start"]

T = TypeVar("T")

CPU_THREADS = max(2, min(8, os.cpu_count() or 2))
"""Threads that copy and hash. Memory bandwidth, not the number of cores, is what they use up."""

EXIT_S = 3600.0
CLEAN_UP_S = 60.0

_unfinished: set[Future[Any]] = set()
_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def start(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Run ``coroutine`` on the engine's loop; return its future at once. The interpreter does not exit before it ends."""
    future = asyncio.run_coroutine_threadsafe(coroutine, _running_loop())
    _unfinished.add(future)
    future.add_done_callback(_unfinished.discard)
    return future


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run ``coroutine`` on the engine's loop and return its result. Ctrl-C cancels it; then this waits for what it does
    to clean up, a minute at most, and raises KeyboardInterrupt."""
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
        # It holds the error, whose frames hold this one: what else they hold would wait for the garbage collector.
        del future


def _finish_all() -> None:
    """An asynchronous save still under way when the program ends is finished: its own deadlines bound it."""
    wait(list(_unfinished), timeout=EXIT_S)


async def offload(function: Callable[..., T], *args: Any) -> T:
    """Run ``function`` in a worker thread of the current loop; if cancelled, wait for it all the same.

    The thread goes on using the caller's buffers until it ends: to return earlier would let them be reused under it.
    """
    work = asyncio.get_running_loop().run_in_executor(None, function, *args)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):  # also when cancelled again
                await asyncio.wait([work])
        raise


def _running_loop() -> asyncio.AbstractEventLoop:
    global _loop  # noqa: PLW0603
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            _loop.set_default_executor(ThreadPoolExecutor(CPU_THREADS, thread_name_prefix="holdfast-cpu"))
            # Before the executors shut down, which is before atexit: concurrent.futures registers itself the same way.
            threading._register_atexit(_finish_all)  # type: ignore[attr-defined]
            threading.Thread(target=_loop.run_forever, name="holdfast-engine", daemon=True).start()
        return _loop


def _forget_parent() -> None:
    """A forked child has no threads of its parent: it starts anew."""
    global _loop, _lock
    _loop, _lock = None, threading.Lock()
    _unfinished.clear()


os.register_at_fork(after_in_child=_forget_parent)
