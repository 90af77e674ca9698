"""A thread pool that accepts work until the interpreter has ended.

Once the main thread has returned, ``concurrent.futures`` accepts no more work, and Python 3.12
starts no more threads. Handlers of ``atexit``, finalizers and threads that outlive the main thread
still save, so their jobs run in the submitting thread.

Scope: a job must not wait for the thread that submitted it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def is_exiting() -> bool:
    """Return whether the main thread has returned, so that threads may no longer be started."""
    return bool(getattr(threading, "_SHUTTING_DOWN", False))


class Pool(ThreadPoolExecutor):
    """Up to ``count`` threads, started on demand; see the module."""

    def __init__(self, count: int, name: str) -> None:
        super().__init__(count, thread_name_prefix=name)
        self._closed = False

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See :meth:`Executor.submit`."""
        future = Future[T]()
        pending: list[Callable[[], T]] = [partial(function, *args, **kwargs)]
        job = partial(_run, future, pending)
        try:
            super().submit(job)
        except RuntimeError:
            if self._closed:
                raise
            job()  # a thread of the pool may pick it up later, and finds nothing pending
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See :meth:`Executor.shutdown`. Jobs that have not begun are not cancelled."""
        self._closed = True
        super().shutdown(wait)


def _run(future: Future[T], pending: list[Callable[[], T]]) -> None:
    """Run the pending job, if there still is one, and complete ``future``."""
    try:
        job = pending.pop()
    except IndexError:
        return
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = job()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
