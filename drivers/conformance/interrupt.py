"""Cancellation at every await: cancels a call at its n-th suspension, for every n until it
completes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

__all__ = ["Interrupt", "at_every_await"]

DELAYS_S = (0.0, 0.004)
"""Delays between suspension and cancellation: immediate, and while threads and servers are
working."""

SUSPENSIONS_MAX = 100
"""Maximum number of suspensions tried. No operation of the contract suspends more often with small
objects."""


class Interrupt:
    """Cancels an awaited call when it suspends for the ``at``-th time, after ``delay_s``."""

    def __init__(self, at: int, delay_s: float) -> None:
        self.at = at
        self.delay_s = delay_s
        self.reached = False
        """True if any call suspended that often."""

    async def __call__(self, work: Coroutine[Any, Any, Any]) -> bool:
        """Await ``work`` and return whether it was cancelled rather than completed. Other errors
        propagate.

        Fails if the call swallowed an immediate cancellation.
        """
        suspended = _Suspended(self, work)
        task = asyncio.create_task(_awaited(suspended))
        await asyncio.wait([task])
        if suspended.timer is not None:
            suspended.timer.cancel()
        if task.cancelled():
            return True
        task.result()
        assert not (suspended.struck and not self.delay_s), "the cancellation was swallowed"
        return False


class _Suspended(Awaitable[Any]):
    def __init__(self, interrupt: Interrupt, work: Coroutine[Any, Any, Any]) -> None:
        self.interrupt = interrupt
        self.work = work
        self.timer: asyncio.TimerHandle | None = None
        self.struck = False

    def __await__(self) -> Generator[Any, Any, Any]:
        inner = self.work.__await__()
        error = None
        for n in itertools.count(1):
            try:
                if error is not None:
                    waited_for = inner.throw(error)
                else:
                    waited_for = inner.send(None)
            except StopIteration as stop:
                return stop.value
            if n == self.interrupt.at:
                self._strike()
            try:
                yield waited_for
                error = None
            except BaseException as raised:  # forwarded to the call, including cancellation
                error = raised

    def _strike(self) -> None:
        self.struck = self.interrupt.reached = True
        task = asyncio.current_task()
        assert task is not None
        if self.interrupt.delay_s:
            self.timer = asyncio.get_running_loop().call_later(self.interrupt.delay_s, task.cancel)
        else:
            task.cancel()


async def _awaited(work: Awaitable[Any]) -> Any:
    return await work


async def at_every_await(attempt: Callable[[Interrupt, str], Awaitable[None]]) -> None:
    """Run ``attempt`` with an interrupt at its first suspension, its second, and so on, until it
    completes.

    ``attempt`` receives a unique name for its objects. It sets up, awaits one call through the
    interrupt, and checks the result.
    """
    for delay_s in DELAYS_S:
        for at in range(1, SUSPENSIONS_MAX):
            interrupt = Interrupt(at, delay_s)
            await attempt(interrupt, f"d/{delay_s}-{at}")
            if not interrupt.reached:
                break
