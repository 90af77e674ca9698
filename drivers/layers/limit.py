"""A limit on concurrent operations."""

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
    """Runs at most ``concurrency`` operations of this driver at a time; the others wait in FIFO
    order.

    The traits report the limit, so a scheduler does not start more. Aborts never wait, because they
    release resources that others may be waiting for.
    """

    def __init__(self, inner: Driver, concurrency: int) -> None:
        super().__init__(inner)
        self._slots = asyncio.Semaphore(concurrency)
        self._concurrency = concurrency

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Traits of the driver below, with ``concurrency`` capped."""
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
