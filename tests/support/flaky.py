"""A driver whose operations fail, or take their time, as a script says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeVar

from holdfast.drivers.contract import ObjectInfo
from holdfast.drivers.layers.layer import Layer, Operation
from holdfast.drivers.memory import MemoryDriver

Step = BaseException | float | tuple[float, BaseException] | None
"""The behaviour of one operation: raise, delay, delay and raise, or nothing special."""

T = TypeVar("T")


class Flaky(Layer):
    """Memory storage whose operations take the steps of ``script`` in turn: an error or a delay."""

    def __init__(
        self, script: Iterable[Step] = (), *, after: bool = False, remote: bool = True
    ) -> None:
        super().__init__(MemoryDriver())
        self.remote = remote  # type: ignore[misc]
        self.script = iter(script)
        self.after = after
        self.tried: list[tuple[str, float]] = []
        self.cancelled = 0

    async def around(self, operation: Operation, call: Callable[[], Awaitable[T]]) -> T:
        self.tried.append((operation.name, asyncio.get_running_loop().time()))
        step = next(self.script, None)
        delay_s, error = (
            step
            if isinstance(step, tuple)
            else (0.0, step)
            if isinstance(step, BaseException)
            else (step, None)
        )
        if delay_s:
            try:
                await asyncio.sleep(delay_s)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if error is not None and not self.after:
            raise error
        result = await call()
        if error is not None:
            raise error
        return result

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """Yield one entry at a time, so that a listing can fail in between."""
        async for info in self.inner.list(prefix):
            yield await self.around(Operation("list", prefix), lambda info=info: _returned(info))  # type: ignore[misc]


async def _returned(info: ObjectInfo) -> ObjectInfo:
    return info
