"""Measures a driver with many small objects: create, create exclusively, stat, list, get,
delete."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...core.aio import at_most
from ...drivers.contract import Driver
from ...drivers.registry import open_driver
from ...drivers.uri import Uri
from ..traits import traits_of
from .course import Say, measured_at
from .plan import MetaPlan
from .result import META, DriverMeasurement, PointResult, latency_of

__all__ = ["META_OPERATIONS", "measured_meta"]

META_OPERATIONS = ("create", "create exclusively", "stat", "list", "get", "delete")
_EXCLUSIVE = "exclusive"
_LEAST_S = 0.001
"""Shortest valid round. These operations run without any setup, so even short rounds are
meaningful."""

Call = Callable[[], Coroutine[Any, Any, object]]


def measured_meta(plan: MetaPlan, say: Say = lambda line: None) -> DriverMeasurement:
    """Measure ``plan.objects`` objects of ``plan.nbytes`` each, one at a time and with the driver's
    preferred concurrency. Call ``say`` with a line for each round. Raises the driver's errors."""
    widths = sorted({1, traits_of(plan.parsed).concurrency})
    config = {
        "nbytes": plan.nbytes,
        "objects": plan.objects,
        "runs": plan.runs,
        "concurrencies": widths,
    }

    def work(place: Uri) -> tuple[Mapping[str, PointResult], Mapping[str, float]]:
        return asyncio.run(_all(place, plan, widths, say)), {}

    return measured_at(plan, META, config, work, least_s=_LEAST_S)


class _Timed:
    """Timings of one operation at one concurrency, over all rounds.

    ``seconds``: per round, the duration of all its calls together. ``latencies_s``: the duration of
    every call.
    """

    def __init__(self, operation: str, concurrency: int) -> None:
        self.operation = operation
        self.concurrency = concurrency
        self.seconds: list[float] = []
        self.latencies_s: list[float] = []

    async def run(self, calls: Sequence[Call]) -> None:
        """Execute one round of calls, at most ``concurrency`` at a time, and record the timings."""

        async def timed(call: Call) -> None:
            began_s = time.perf_counter()
            await call()
            self.latencies_s.append(time.perf_counter() - began_s)

        began_s = time.perf_counter()
        await at_most(self.concurrency, map(timed, calls))
        self.seconds.append(time.perf_counter() - began_s)

    def result(self, plan: MetaPlan) -> PointResult:
        """Return the timings of all rounds as the result of one point."""
        return PointResult(
            operation=self.operation,
            part_nbytes=plan.nbytes,
            concurrency=self.concurrency,
            amount=plan.objects,
            seconds=tuple(self.seconds),
            latency=latency_of(self.latencies_s),
        )


async def _all(
    place: Uri, plan: MetaPlan, widths: Sequence[int], say: Say
) -> dict[str, PointResult]:
    driver = open_driver(place)
    try:
        found = {
            width: {operation: _Timed(operation, width) for operation in META_OPERATIONS}
            for width in widths
        }
        for number in range(plan.runs):
            for width in widths[:: -1 if number % 2 else 1]:
                await _round(driver, f"round-{number}-{width}", plan, found[width])
                took_s = sum(timed.seconds[-1] for timed in found[width].values())
                say(f"round {number + 1}: {width} at a time: {took_s:.3f} s")
    finally:
        await driver.close()
    return {
        f"{operation} × {width}": timed.result(plan)
        for width, by_operation in found.items()
        for operation, timed in by_operation.items()
    }


async def _round(driver: Driver, folder: str, plan: MetaPlan, timed: Mapping[str, _Timed]) -> None:
    """Run every operation once per object, in new folders, because caches may know names from
    earlier rounds."""
    data = np.random.default_rng(0).bytes(plan.nbytes)
    keys = [f"{folder}/{number:08d}" for number in range(plan.objects)]
    exclusive = [f"{_EXCLUSIVE}/{key}" for key in keys]

    async def listed() -> None:
        count = 0
        async for _ in driver.list(folder):
            count += 1
        if count != plan.objects:
            raise AssertionError(f"{count} objects were listed, of {plan.objects}")

    calls: dict[str, list[Call]] = {
        "create": [partial(driver.put, key, data) for key in keys],
        "create exclusively": [partial(driver.put, key, data, exclusive=True) for key in exclusive],
        "stat": [partial(driver.stat, key) for key in keys],
        "list": [listed],
        "get": [partial(driver.get, key) for key in keys],
        "delete": [partial(driver.delete, key) for key in keys],
    }
    for operation in META_OPERATIONS:
        await timed[operation].run(calls[operation])
    await driver.delete_all(f"{_EXCLUSIVE}/{folder}")
