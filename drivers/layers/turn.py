"""The deadline of one operation, and waiting that does not count against it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["deadline", "waiting_for_a_turn"]

_running: ContextVar[asyncio.Timeout | None] = ContextVar("holdfast-deadline", default=None)


@asynccontextmanager
async def deadline(timeout_s: float | None) -> AsyncIterator[asyncio.Timeout]:
    """Cancel the body after ``timeout_s`` seconds, those in :func:`waiting_for_a_turn` not counted; then raise
    TimeoutError, and the timeout's ``expired()`` is true. None: never."""
    async with asyncio.timeout(timeout_s) as timeout:
        token = _running.set(timeout)
        try:
            yield timeout
        finally:
            _running.reset(token)


@contextmanager
def waiting_for_a_turn() -> Iterator[None]:
    """The clock of the deadline that this task runs under, if any, stands still in the body."""
    timeout = _running.get()
    when_s = timeout.when() if timeout is not None else None
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
