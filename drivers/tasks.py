"""Calls of an asynchronous client: each runs to its end, and none is left behind when the driver is
closed.

``Threads`` does the same for clients that block. A request that was sent cannot be taken back, and
while it is under way the client may read or fill the caller's buffer. So a cancelled task does not
return before its call has ended.
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
"""How long a call may go on after its caller was cancelled. Then the call itself is cancelled."""


class Tasks:
    """Makes the calls of one driver. ``uri`` is for messages.

    ``errors(doing, uri, key)`` is a context manager that turns what the client raises in its body
    into the :class:`StorageError` of its kind. It lets Holdfast's own errors and CancelledError
    pass.
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
        """Return what ``call`` returns. ``doing`` is a verb for messages: "read", say.

        ``key`` is None for a call about the whole root. Raises UriError for an unsafe key,
        StorageError once this is closed, and otherwise what ``errors`` makes of a failure.
        Cancelled, it ends as :func:`to_the_end` does.
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
        """Take no more calls, and wait for those that run. Safe to call twice.

        Raises StorageDownError where some still run after ``timeout_s`` seconds; these are
        cancelled first.
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
