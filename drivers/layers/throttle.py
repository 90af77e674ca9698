"""At most so many bytes a second, so that a checkpoint leaves the network and the disks to
training."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ...core.forks.renewal import in_child, new_lock
from ...core.spans import count_throttled
from ..contract import Driver
from .layer import Layer, Operation
from .turn import waiting_for_a_turn

__all__ = ["BURST_S", "ThrottleLayer", "TokenBucket", "shared_bucket"]

BURST_S = 0.1
"""How much of a second's bytes may pass at once after a rest. An operation is never divided: a
larger one passes whole, and those after it wait for it."""

T = TypeVar("T")


class TokenBucket:
    """First come, first served; an operation begins when all bytes before it have had their time.

    In any T seconds at most ``bytes_per_s * (T + BURST_S)`` bytes begin, and one operation more.
    Arithmetic alone: the caller has the clock, and sleeps. Threads may share it.
    """

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = float("-inf")
        """When all that was let in will have had its time."""
        self._lock = new_lock()

    def take(self, nbytes: int, now_s: float) -> float:
        """Let ``nbytes`` in; return how many seconds from now they may begin."""
        with self._lock:
            free_s = max(self._free_s, now_s - BURST_S)
            self._free_s = free_s + nbytes / self._bytes_per_s
            return max(0.0, free_s - now_s)

    def give_back(self, nbytes: int) -> None:
        """Bytes that were let in do not come after all."""
        with self._lock:
            self._free_s -= nbytes / self._bytes_per_s


class ThrottleLayer(Layer):
    """Lets operations that carry bytes, in either direction, begin at the rate of ``bucket``.

    The bytes of ``get`` are known, and counted, when they are there: the next operation waits for
    them.
    """

    def __init__(self, inner: Driver, bucket: TokenBucket) -> None:
        super().__init__(inner)
        self.bucket = bucket

    async def around(self, operation: Operation, call: Callable[[], Awaitable[T]]) -> T:
        """See :meth:`Layer.around`."""
        if operation.nbytes or operation.name == "get":
            await self._turn(operation.nbytes)
        result = await call()
        if isinstance(result, bytes):
            self.bucket.take(len(result), asyncio.get_running_loop().time())
        return result

    async def _turn(self, nbytes: int) -> None:
        wait_s = self.bucket.take(nbytes, asyncio.get_running_loop().time())
        if wait_s == 0:
            return
        count_throttled(wait_s)
        try:
            with waiting_for_a_turn():
                await asyncio.sleep(wait_s)
        except BaseException:
            self.bucket.give_back(nbytes)
            raise


_buckets: dict[int, TokenBucket] = {}


def shared_bucket(bytes_per_s: int) -> TokenBucket:
    """The one bucket of this process for this rate: saves in flight share it, whatever they write
    to."""
    return _buckets.setdefault(bytes_per_s, TokenBucket(bytes_per_s))


in_child(_buckets.clear)
