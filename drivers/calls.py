"""Blocking calls for asyncio that may never return. Each runs in its own thread, which is abandoned
at the deadline.

A thread inside a library cannot be interrupted. So that the caller can reuse its memory anyway, the
call touches that memory only inside ``with call:``, which raises once the caller has left.

Process exit waits for such a thread until it has made no progress for a few seconds. Without the
wait, a thread that takes the GIL during interpreter shutdown is forcibly unwound. The library's
code does not allow that, and the process dies of SIGABRT.

Scope: one thread per call costs 0.1 ms, which is fine for calls that move megabytes or wait for a
name node.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ..core.forks.renewal import new_lock

T = TypeVar("T")

END_S = 3.0
"""Seconds without progress after which process exit abandons a call."""


class CallerGone(Exception):
    """Ends a call whose caller was cancelled or reached its deadline."""


class Call:
    """State shared by a call and its caller: the time of the last progress, and whether the caller
    is still waiting."""

    def __init__(self) -> None:
        self.progress_s = time.monotonic()
        self._gone = False
        self._lock = new_lock()

    def __enter__(self) -> None:
        """Allow access to the caller's memory inside ``with call:``. Counts as progress, so it
        restarts the deadline.

        A plain class, not a generator-based context manager: it is entered for every 64 KiB read,
        and a generator takes four times as long.
        """
        self._lock.acquire()
        if self._gone:
            self._lock.release()
            raise CallerGone

    def __exit__(self, *error: object) -> None:
        self._lock.release()
        self.progress_s = time.monotonic()

    def leave(self) -> None:
        """Stop waiting. Returns once the call no longer touches the caller's memory."""
        with self._lock:
            self._gone = True


_calls = dict[threading.Thread, Call]()
"""Threads that have started and not finished."""


def in_new_thread(body: Callable[[], None], call: Call) -> None:
    """Run ``body``, which performs ``call``, in a new thread. Process exit waits for the thread
    until the call has made no progress for ``END_S``."""

    def run_body() -> None:
        try:
            body()
        finally:
            _calls.pop(thread, None)

    thread = threading.Thread(target=run_body, name="holdfast-call", daemon=True)
    _calls[thread] = call
    try:
        thread.start()
    except RuntimeError:  # interpreter shutdown: no new threads can be started
        run_body()


def _wait_for_threads() -> None:
    for thread, call in list(_calls.items()):
        thread.join(max(0.0, call.progress_s + END_S - time.monotonic()))


atexit.register(_wait_for_threads)


async def run(
    function: Callable[[Call], T],
    timeout_s: float,
    start: Callable[[Callable[[], None]], object] | None = None,
) -> T:
    """Run ``function`` in a thread and return its result or raise its error.

    Raises TimeoutError after ``timeout_s`` without progress. On timeout and on cancellation it
    returns at once; the thread continues on its own and its result is dropped. ``start`` runs the
    body it is given in a thread; the default is a new thread.
    """
    call = Call()
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def body() -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = function(call)
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is waiting
            loop.call_soon_threadsafe(_settle, future, result, error)

    if start is None:
        in_new_thread(body, call)
    else:
        start(body)
    try:
        while not future.done():
            left_s = call.progress_s + timeout_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            await asyncio.wait([future], timeout=left_s)
        return future.result()
    finally:
        if not future.done():
            call.leave()
            future.cancel()
        elif not future.cancelled():
            future.exception()  # mark it as retrieved, even if a cancellation came first


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def is_panic(error: BaseException) -> bool:
    """Return whether ``error`` is a Rust panic. Its class may be a BaseException that cannot be
    imported."""
    return type(error).__name__ in ("PanicException", "RustPanic")
