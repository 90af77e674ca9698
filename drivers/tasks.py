"""Calls of an asynchronous client: each runs to completion, and none outlives the driver.

A request that was sent cannot be taken back, and while it is in flight the client may read from or
write to the caller's buffer. So a cancelled task does not return before its call has ended.
``Threads`` does the same for blocking clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

from ..core.aio import to_the_end
from ..errors import StorageDownError, StorageError
from .contract import check_key

__all__ = ["Tasks", "to_the_end"]

P = ParamSpec("P")
T = TypeVar("T")

GRACE_S = 10.0
"""Seconds that a call may continue after its caller was cancelled, before the call itself is
cancelled."""


class Tasks:
    """Runs the calls of one driver. ``uri`` appears in messages.

    ``errors(doing, uri, key)`` is a context manager that translates the client's errors into a
    :class:`StorageError`. It passes through Holdfast's own errors and CancelledError.
    """

    def __init__(
        self,
        *,
        uri: str,
        errors: Callable[[str, str, str], AbstractContextManager[Any]],
        grace_s: float = GRACE_S,
    ) -> None:
        self._uri = uri
        self._errors = errors
        self._grace_s = grace_s
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def run(
        self,
        doing: str,
        key: str | None,
        call: Callable[P, Coroutine[Any, Any, T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run ``call`` and return its result. ``doing`` is a verb for messages, such as "read".

        ``key`` is None for a call on the whole root. Raises UriError for an unsafe key,
        StorageError after close(), and otherwise the errors translated by ``errors``. On
        cancellation, behaves as :func:`to_the_end`.
        """
        if key is not None:
            check_key(key, uri=self._uri)
        if self._closed:
            raise StorageError("the driver is closed", uri=self._uri, key=key)
        with self._errors(doing, self._uri, key or ""):
            task = asyncio.create_task(call(*args, **kwargs))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            try:
                return await to_the_end(task, grace_s=self._grace_s)
            except asyncio.CancelledError as error:
                if _caller_is_cancelled() or not self._closed:
                    raise
                raise StorageDownError(
                    f"{doing} failed: the driver was closed", uri=self._uri, key=key
                ) from error

    async def close(self, timeout_s: float) -> None:
        """Reject new calls and wait for running ones. Safe to call twice.

        If some are still running after ``timeout_s`` seconds, cancels them and raises
        StorageDownError.
        """
        self._closed = True
        running = tuple(self._running)
        if not running:
            return
        _, stuck = await asyncio.wait(running, timeout=timeout_s)
        if not stuck:
            return
        for task in stuck:
            task.cancel()
        await asyncio.wait(stuck, timeout=self._grace_s)
        raise StorageDownError(
            f"{len(stuck)} operations still ran {timeout_s:g} s after close", uri=self._uri
        )


def _caller_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
