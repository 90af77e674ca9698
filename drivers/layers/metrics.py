"""What was asked of a storage, and how it answered: operations, bytes, errors by kind,
latencies."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

from ...core.forks.renewal import in_child
from ...core.histogram import BUCKETS, bucket_of, quantile_s
from ..contract import Driver
from .layer import Layer, Operation

__all__ = ["Meter", "MetricsLayer", "OperationMetrics", "Snapshot", "meter_of", "snapshots"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OperationMetrics:
    """One kind of operation. ``histogram[i]`` counts those that took up to ``2**i`` microseconds
    (of 2⁻²⁰ s each)."""

    count: int
    nbytes: int
    """Of those that succeeded."""
    seconds: float
    """Of all of them together."""
    errors: Mapping[str, int]
    """By the name of the error, ``CancelledError`` included."""
    histogram: tuple[int, ...]

    def quantile_s(self, part: float) -> float:
        """So long took ``part`` (0 to 1) of them, or less: the end of its bucket, so at most twice
        too much; 0 if none."""
        return quantile_s(self.histogram, part)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was counted up to now, by the name of the operation."""

    operations: Mapping[str, OperationMetrics]

    @property
    def count(self) -> int:
        """Operations of all kinds."""
        return sum(seen.count for seen in self.operations.values())

    @property
    def errors(self) -> Mapping[str, int]:
        """Of all operations, by the name of the error."""
        return sum((Counter(seen.errors) for seen in self.operations.values()), Counter())


@dataclass(slots=True)
class _Counts:
    count: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)
    histogram: list[int] = field(default_factory=lambda: [0] * BUCKETS)


class Meter:
    """Counts. Used from one thread; a snapshot may be taken from any."""

    def __init__(self) -> None:
        self._counts: dict[str, _Counts] = {}

    def count(self, name: str, nbytes: int, seconds: float, error: str | None) -> None:
        """One operation has ended, well (``error`` is None) or not."""
        counts = self._counts.get(name) or self._counts.setdefault(name, _Counts())
        counts.count += 1
        counts.seconds += seconds
        counts.histogram[bucket_of(seconds)] += 1
        if error is None:
            counts.nbytes += nbytes
        else:
            counts.errors[error] += 1

    def snapshot(self) -> Snapshot:
        """What was counted, now."""
        return Snapshot(
            MappingProxyType(
                {
                    name: OperationMetrics(
                        c.count,
                        c.nbytes,
                        c.seconds,
                        MappingProxyType(dict(c.errors)),
                        tuple(c.histogram),
                    )
                    for name, c in tuple(self._counts.items())
                }
            )
        )


class MetricsLayer(Layer):
    """Counts every operation that reaches the driver below, into ``meter``. A listing counts once
    per batch of entries."""

    def __init__(self, inner: Driver, meter: Meter) -> None:
        super().__init__(inner)
        self.meter = meter

    async def around(self, operation: Operation, call: Callable[[], Awaitable[T]]) -> T:
        """See :meth:`Layer.around`."""
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
    """The meter of this process for a store, such as ``s3://bucket``. It outlives the drivers: each
    save opens its own."""
    return _meters.setdefault(store, Meter())


def snapshots() -> dict[str, Snapshot]:
    """By store, what this process has counted where the option ``metrics`` was on."""
    return {store: meter.snapshot() for store, meter in tuple(_meters.items())}


in_child(_meters.clear)
