"""An optional time limit for a whole save. Layers already bound each single operation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ...errors import DeadlineError, UsageError

__all__ = ["Deadline"]


@dataclass(frozen=True, slots=True)
class Deadline:
    """A time limit. ``until_s`` is on the clock of event loops, ``time.monotonic()``; None: no
    limit."""

    timeout_s: float | None = None
    until_s: float | None = None

    @classmethod
    def of(cls, timeout_s: float | None) -> Deadline:
        """Return a deadline ``timeout_s`` from now. Raises UsageError unless it is a positive
        time."""
        if timeout_s is None:
            return cls()
        if not timeout_s > 0:
            raise UsageError(
                f"timeout_s is {timeout_s!r}",
                advice="Give a positive number of seconds, or None for no limit.",
            )
        return cls(timeout_s, time.monotonic() + timeout_s)

    @asynccontextmanager
    async def holds(self, uri: str, rank: int) -> AsyncIterator[None]:
        """Cancel the body when the time is up; raise DeadlineError once it has ended."""
        try:
            async with asyncio.timeout_at(self.until_s) as timeout:
                yield
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise DeadlineError(
                f"the save was not committed within {self.timeout_s:g} s",
                uri=uri,
                rank=rank,
                advice="Check the storage and the network, or allow more time: timeout_s.",
            ) from error
