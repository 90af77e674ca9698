"""Hedged reads: a read that is among the slowest few percent gets a second attempt, and the first
to finish wins."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ...core.aio import wait_out
from ...core.spans import count_hedge
from ..contract import Buffer, Driver, Traits
from .layer import Layer

SAMPLES = 256
SAMPLES_MIN = 32
CREDIT_MAX = 4.0
RENEW = 8
"""Number of reads after which the threshold is recomputed."""

T = TypeVar("T")


@dataclass(slots=True)
class _Size:
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    reads: int = 0
    threshold_s: float | None = None


class Slowness:
    """Decides which reads are slow: slower than all but ``percent`` of the recent reads of similar
    size.

    Also limits hedging to ``percent`` of all reads. If the storage as a whole slows down, every
    read exceeds the threshold, and hedging them all would double the load.
    """

    def __init__(self, percent: int) -> None:
        self._part = percent / 100
        self._credit = 0.0
        self._sizes: defaultdict[int, _Size] = defaultdict(_Size)

    def threshold_s(self, nbytes: int) -> float | None:
        """Return the time after which a read of this size is slow; None until enough reads were
        seen. Counts the read towards the hedging budget."""
        self._credit = min(CREDIT_MAX, self._credit + self._part)
        return self._sizes[nbytes.bit_length()].threshold_s

    def may_hedge(self) -> bool:
        """Return whether the budget allows another hedge, and charge it."""
        if self._credit < 1:
            return False
        self._credit -= 1
        return True

    def saw(self, nbytes: int, seconds: float) -> None:
        """Record the duration of a read."""
        size = self._sizes[nbytes.bit_length()]
        size.seconds.append(seconds)
        size.reads += 1
        if size.reads >= SAMPLES_MIN and size.reads % RENEW == 0:
            seen = sorted(size.seconds)
            size.threshold_s = seen[min(len(seen) - 1, int(len(seen) * (1 - self._part)))]


class HedgeLayer(Layer):
    """Hedges ``read`` and ``fetch``; the traits advise against reading in pieces.

    The second attempt has its own buffer, so the two never write to the same memory. If it wins,
    the first is cancelled and awaited until it no longer uses the caller's buffer.
    """

    def __init__(self, inner: Driver, percent: int) -> None:
        super().__init__(inner)
        self._slowness = Slowness(percent)

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Traits of the driver below, without ``piece_nbytes``."""
        return replace(self.inner.traits, piece_nbytes=0)

    async def read(self, key: str, start: int, into: Buffer) -> None:
        async def first() -> Buffer:
            await self.inner.read(key, start, into)
            return into

        data = await self._hedged(len(into), first, lambda: self.inner.fetch(key, start, len(into)))
        if data is not into:
            into[:] = data

    async def fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        def fetch() -> Awaitable[Buffer]:
            return self.inner.fetch(key, start, nbytes)

        return await self._hedged(nbytes, fetch, fetch)

    async def _hedged(
        self, nbytes: int, first: Callable[[], Awaitable[T]], second: Callable[[], Awaitable[T]]
    ) -> T:
        """Return the result of ``first``, or of ``second``, which starts only if the first is
        slow."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        threshold_s = self._slowness.threshold_s(nbytes)
        if threshold_s is None:
            data = await first()
        else:
            data = await self._either(first, second, threshold_s)
        self._slowness.saw(nbytes, loop.time() - began_s)
        return data

    async def _either(
        self, first: Callable[[], Awaitable[T]], second: Callable[[], Awaitable[T]], slow_s: float
    ) -> T:
        reads: list[asyncio.Future[T]] = [asyncio.ensure_future(first())]
        try:
            await asyncio.wait(reads, timeout=slow_s)
            if not reads[0].done() and self._slowness.may_hedge():
                count_hedge()
                reads.append(asyncio.ensure_future(second()))
            won = await _first_success(reads)
        finally:
            # Even if cancelled meanwhile: an unfinished read may still write to a buffer.
            running = [read for read in reads if not read.done()]
            for read in running:
                read.cancel()
            cancelled = await wait_out(running)
            if cancelled is not None:
                raise cancelled
        return won.result()


async def _first_success(reads: list[asyncio.Future[T]]) -> asyncio.Future[T]:
    """Return the first read to succeed. If none does, raise the error of the first attempt."""
    running: set[asyncio.Future[T]] = set(reads)
    while running:
        ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for read in reads:
            if read in ended and not read.cancelled() and read.exception() is None:
                return read
    reads[0].result()
    raise AssertionError("unreachable: a read that did not succeed raises")
