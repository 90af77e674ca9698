"""Metrics per storage: operations, bytes, latencies, and errors by type."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ...core.forks.renewal import in_child
from ...core.histogram import BUCKETS, bucket_of, quantile_s
from ..contract import Driver
from .layer import Layer, Operation

__all__ = [
    "Meter",
    "MetricsLayer",
    "OperationMetrics",
    "Snapshot",
    "meter_of",
    "snapshots",
    "take_snapshots",
]

T = TypeVar("T")


@dataclass(slots=True)
class OperationMetrics:
    """Metrics of one kind of operation. ``histogram[i]`` counts operations that took up to ``2**i``
    microseconds (each 2⁻²⁰ s)."""

    count: int = 0
    nbytes: int = 0
    """Bytes moved by successful operations."""
    seconds: float = 0.0
    """Total duration."""
    errors: Counter[str] = field(default_factory=Counter)
    """Number of errors by class name, including ``CancelledError``."""
    histogram: list[int] = field(default_factory=lambda: [0] * BUCKETS)

    def quantile_s(self, part: float) -> float:
        """Return the latency quantile ``part`` (0 to 1), rounded up to its bucket's end: at most
        twice too high; 0 if there were no operations."""
        return quantile_s(self.histogram, part)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Metrics at one moment, by operation name."""

    operations: Mapping[str, OperationMetrics]


class Meter:
    """Counters. Updated from one thread; snapshots may be taken from any thread."""

    def __init__(self) -> None:
        self._counts: dict[str, OperationMetrics] = {}

    def count(self, name: str, nbytes: int, seconds: float, error: str | None) -> None:
        """Record the end of an operation. ``error`` is None on success."""
        counts = self._counts.get(name) or self._counts.setdefault(name, OperationMetrics())
        counts.count += 1
        counts.seconds += seconds
        counts.histogram[bucket_of(seconds)] += 1
        if error is None:
            counts.nbytes += nbytes
        else:
            counts.errors[error] += 1

    def add(self, snapshot: Snapshot) -> None:
        """Add the counts of another process."""
        for name, more in snapshot.operations.items():
            counts = self._counts.setdefault(name, OperationMetrics())
            counts.count += more.count
            counts.nbytes += more.nbytes
            counts.seconds += more.seconds
            counts.errors.update(more.errors)
            counts.histogram = [
                a + b for a, b in zip(counts.histogram, more.histogram, strict=True)
            ]

    def take(self) -> Snapshot:
        """Return the counts, and begin at zero again."""
        taken, self._counts = self._counts, {}
        return Snapshot(taken)

    def snapshot(self) -> Snapshot:
        """Return a copy of the current counts."""
        return Snapshot(
            {
                name: replace(now, errors=Counter(now.errors), histogram=[*now.histogram])
                for name, now in tuple(self._counts.items())
            }
        )


class MetricsLayer(Layer):
    """Counts every operation that reaches the driver below in ``meter``. A listing counts once per
    batch of entries."""

    def __init__(self, inner: Driver, meter: Meter) -> None:
        super().__init__(inner)
        self.meter = meter

    async def around(self, operation: Operation, call: Callable[[], Awaitable[T]]) -> T:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            result = await call()
        except BaseException as error:
            self.meter.count(operation.name, 0, loop.time() - began_s, type(error).__name__)
            raise
        if isinstance(result, bytes):
            nbytes = len(result)
        else:
            nbytes = operation.nbytes
        self.meter.count(operation.name, nbytes, loop.time() - began_s, None)
        return result


_meters: dict[str, Meter] = {}


def meter_of(store: str) -> Meter:
    """Return this process's meter for a store such as ``s3://bucket``. It outlives drivers, because
    each save opens a new one."""
    return _meters.setdefault(store, Meter())


def snapshots() -> dict[str, Snapshot]:
    """Return the metrics of this process by store, for stores with the option ``metrics`` on."""
    return {store: meter.snapshot() for store, meter in tuple(_meters.items())}


def take_snapshots() -> dict[str, Snapshot]:
    """Return the metrics of this process like :func:`snapshots`, and begin at zero again."""
    return {store: meter.take() for store, meter in _meters.items()}


in_child(_meters.clear)
