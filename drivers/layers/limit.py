"""At most so many operations at a time, whatever the callers do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from ..contract import Driver, Traits
from .layer import Layer, Operation
from .turn import waiting_for_a_turn

__all__ = ["LimitLayer"]

T = TypeVar("T")


class LimitLayer(Layer):
    """Of all operations of this driver, ``concurrency`` run; the others wait, first come, first
    served.

    Its traits say so too: a scheduler that reads them does not even begin more. Aborting an upload
    never waits: it frees what others may be waiting for.
    """

    def __init__(self, inner: Driver, concurrency: int) -> None:
        super().__init__(inner)
        self._slots = asyncio.Semaphore(concurrency)
        self._concurrency = concurrency

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Those of the driver below, with no more concurrency than is allowed."""
        traits = self.inner.traits
        return replace(traits, concurrency=min(traits.concurrency, self._concurrency))

    async def around(self, operation: Operation, call: Callable[[], Awaitable[T]]) -> T:
        """See :meth:`Layer.around`."""
        if operation.name == "abort":
            return await call()
        with waiting_for_a_turn():
            await self._slots.acquire()
        try:
            return await call()
        finally:
            self._slots.release()
