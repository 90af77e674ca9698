"""Limits on bytes per second, so that checkpoints leave bandwidth to training, and on concurrent
operations."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from ...core.forks.renewal import in_child, new_lock
from ...core.spans import count_throttled
from ..contract import Driver, Traits
from .layer import Layer, Operation, waiting_for_a_turn

BURST_S = 0.1
"""Seconds' worth of bytes that may pass at once after idle time. Operations are never split: a
larger one passes as a whole, and later ones wait for it."""

T = TypeVar("T")


class TokenBucket:
    """Token bucket in FIFO order: an operation starts when the time of all earlier bytes has
    passed.

    In any T seconds, at most ``bytes_per_s * (T + BURST_S)`` bytes and one more operation start.
    Does arithmetic only: the caller reads the clock and sleeps. Thread-safe.
    """

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = float("-inf")
        """Time at which all admitted bytes will have passed."""
        self._lock = new_lock()

    def take(self, nbytes: int, now_s: float) -> float:
        """Admit ``nbytes`` and return the delay in seconds until they may start."""
        with self._lock:
            free_s = max(self._free_s, now_s - BURST_S)
            self._free_s = free_s + nbytes / self._bytes_per_s
            return max(0.0, free_s - now_s)

    def give_back(self, nbytes: int) -> None:
        """Return admitted bytes that will not be sent."""
        with self._lock:
            self._free_s -= nbytes / self._bytes_per_s


class ThrottleLayer(Layer):
    """Starts operations that carry bytes, in either direction, at the rate of ``bucket``.

    The size of a ``get`` is known only at its end, so the next operation waits for its bytes.
    """

    def __init__(self, inner: Driver, bucket: TokenBucket) -> None:
        super().__init__(inner)
        self.bucket = bucket

    async def around(self, operation: Operation, call: Callable[[], Awaitable[T]]) -> T:
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
    """Return this process's bucket for this rate. All saves in flight share it, whatever their
    destination."""
    return _buckets.setdefault(bytes_per_s, TokenBucket(bytes_per_s))


in_child(_buckets.clear)


class LimitLayer(Layer):
    """Runs at most ``concurrency`` operations of this driver at a time; the others wait in FIFO
    order.

    The traits report the limit, so a scheduler does not start more. Aborts never wait, because they
    release resources that others may be waiting for. Nor do watches, which are mostly idle.
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
        if operation.name in ("abort", "watch"):
            return await call()
        with waiting_for_a_turn():
            await self._slots.acquire()
        try:
            return await call()
        finally:
            self._slots.release()
