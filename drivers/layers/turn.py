"""The deadline of an operation, and waits that do not count against it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

__all__ = ["deadline", "waiting_for_a_turn"]

_running: ContextVar[asyncio.Timeout | None] = ContextVar("holdfast-deadline", default=None)


class deadline:
    """Async context manager that cancels its body after ``timeout_s`` seconds (None: never), not
    counting time in :func:`waiting_for_a_turn`. It then raises TimeoutError, and the timeout's
    ``expired()`` is true."""

    __slots__ = ("_timeout", "_token")

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout = asyncio.timeout(timeout_s)

    async def __aenter__(self) -> asyncio.Timeout:
        timeout = await self._timeout.__aenter__()
        self._token = _running.set(timeout)
        return timeout

    async def __aexit__(self, *raised: Any) -> None:
        _running.reset(self._token)
        await self._timeout.__aexit__(*raised)


@contextmanager
def waiting_for_a_turn() -> Iterator[None]:
    """Pause the deadline of this task, if it has one, during the body."""
    timeout = _running.get()
    if timeout is not None:
        when_s = timeout.when()
    else:
        when_s = None
    if timeout is None or when_s is None or timeout.expired():
        yield
        return
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    timeout.reschedule(None)
    try:
        yield
    finally:
        timeout.reschedule(when_s + loop.time() - began_s)
