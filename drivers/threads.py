"""Thread pool for blocking calls that never leaves a call behind.

A thread inside ``pwrite`` cannot be interrupted, and it reads the caller's buffer. So a cancelled
task waits for its thread, after which the caller may reuse the buffer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

from ..core.aio import to_the_end
from ..core.pool import Pool
from ..errors import StorageDownError, StorageError

__all__ = ["Threads"]

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """At most ``count`` threads, started on demand. ``uri`` appears in messages."""

    def __init__(self, count: int, *, uri: str) -> None:
        self._pool = Pool(count, "holdfast-io")
        self._uri = uri
        self._running: set[Future[Any]] = set()
        self._closed = False

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``call`` in a thread of the pool and return its result. Raises StorageError after
        close().

        On cancellation, a queued call is dropped. A running call is awaited without a time limit,
        because it uses the caller's memory until it ends; its error becomes the cause of the
        CancelledError.
        """
        self.check_open()
        work = self._pool.submit(call, *args, **kwargs)
        self._running.add(work)
        work.add_done_callback(self._running.discard)
        return await to_the_end(asyncio.wrap_future(work), on_cancel=work.cancel)

    def check_open(self) -> None:
        """Raise StorageError after close()."""
        if self._closed:
            raise StorageError("the driver is closed", uri=self._uri)

    async def close(self, timeout_s: float) -> None:
        """Reject new calls and wait for running ones. Safe to call twice.

        Raises StorageDownError if some are still running after ``timeout_s`` seconds, and leaves
        them running.
        """
        self._closed = True
        self._pool.shutdown(wait=False)
        # Iterate over a copy: threads remove their own calls concurrently.
        running = [asyncio.wrap_future(work) for work in tuple(self._running)]
        if not running:
            return
        _, stuck = await asyncio.wait(running, timeout=timeout_s)
        if stuck:
            raise StorageDownError(
                f"{len(stuck)} operations still run {timeout_s:g} s after close", uri=self._uri
            )
