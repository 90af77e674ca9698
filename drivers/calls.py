"""Blocking calls that may never return, for asyncio: each in a thread, which is left behind at the
deadline.

A thread inside the library cannot be interrupted. To let the caller reuse its memory all the same,
a call touches that memory only within ``with call:``, which raises once the caller has returned.

The end of the process waits for such a thread until it has made no progress for a few seconds: one
that takes the interpreter's lock while the interpreter ends is made to unwind, which the library's
code does not allow, and the process dies of SIGABRT.

Scope: a thread per call costs 0.1 ms; such calls move megabytes, or wait for a name node.
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

__all__ = ["Call", "CallerGone", "in_new_thread", "run"]

T = TypeVar("T")

END_S = 3.0
"""A call without progress for so long is stuck, and the end of the process leaves it behind."""


class CallerGone(Exception):
    """Ends a call whose caller has been cancelled, or has reached its deadline."""


class Call:
    """Shared by a call and its caller: the progress of the one, and whether the other still
    waits."""

    def __init__(self) -> None:
        self.progress_s = time.monotonic()
        self._gone = False
        self._lock = new_lock()

    def __enter__(self) -> None:
        """``with call:`` the caller's memory may be used. Also shows that the call gets on: its
        deadline begins anew.

        Entered for every 64 KiB that is read, so not by way of a generator, which takes four times
        as long.
        """
        self._lock.acquire()
        if self._gone:
            self._lock.release()
            raise CallerGone

    def __exit__(self, *error: object) -> None:
        self._lock.release()
        self.progress_s = time.monotonic()

    def leave(self) -> None:
        """The caller stops waiting; returns once the call no longer uses the caller's memory."""
        with self._lock:
            self._gone = True


_calls = dict[threading.Thread, Call]()
"""The threads that have begun, and have not ended."""


def in_new_thread(body: Callable[[], None], call: Call) -> None:
    """Run ``body``, which makes ``call``, in a thread of its own. The end of the process waits for
    it until the call has made no progress for ``END_S``."""

    def run_body() -> None:
        try:
            body()
        finally:
            _calls.pop(thread, None)

    thread = threading.Thread(target=run_body, name="holdfast-call", daemon=True)
    _calls[thread] = call
    try:
        thread.start()
    except RuntimeError:  # the interpreter is ending, and starts no more threads
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
    """Return what ``function`` returns, or raise what it raises, from a thread. Raises TimeoutError
    after ``timeout_s`` without progress.

    Then, and when cancelled, it returns at once: the thread goes on alone, and its result is
    dropped. ``start`` has a thread run what it is given; None: a new thread.
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
        with contextlib.suppress(RuntimeError):  # the loop is closed, so there is no caller
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
            future.exception()  # it has been seen, also where a cancellation came first


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
