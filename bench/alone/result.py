"""Results for a driver alone, and their JSON (``docs/reference/bench.md``).

Scope: pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import numpy as np

from ...core.histogram import BUCKETS, bucket_of
from ...errors import UsageError
from ..measured.result import Measurement, Phase

__all__ = [
    "META",
    "OPERATIONS",
    "RAW",
    "WORKLOADS",
    "DriverMeasurement",
    "Latency",
    "PointResult",
    "decoded",
    "encoded",
    "latency_of",
    "workload_of",
]

VERSION = 1
RAW = "raw"
META = "meta"
WORKLOADS = (RAW, META)
OPERATIONS = ("write", "random write", "read", "random read")
"""Operations at each point of ``raw``, in this order."""


@dataclass(frozen=True)
class Latency:
    """Latency of single operations over all rounds: percentiles, the maximum, and a histogram in
    the buckets of :mod:`holdfast.core.histogram`."""

    p50_s: float
    p90_s: float
    p99_s: float
    max_s: float
    histogram: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of operations."""
        return sum(self.histogram)


def latency_of(seconds: Sequence[float]) -> Latency:
    """Return the latency of at least one operation. Percentiles are nearest-rank: each is the
    latency of some operation."""
    p50_s, p90_s, p99_s = np.quantile(seconds, (0.5, 0.9, 0.99), method="inverted_cdf").tolist()
    histogram = [0] * BUCKETS
    for each_s in seconds:
        histogram[bucket_of(each_s)] += 1
    return Latency(p50_s, p90_s, p99_s, max(seconds), tuple(histogram))


@dataclass(frozen=True)
class PointResult:
    """Result of one operation at one point.

    ``amount`` is the bytes per round (``raw``) or operations per round (``meta``). ``part_nbytes``
    is the size of a part or of an object. ``seconds`` holds the time of each round, in order.
    """

    operation: str
    part_nbytes: int
    concurrency: int
    amount: int
    seconds: tuple[float, ...]
    latency: Latency

    @property
    def median_s(self) -> float:
        """Median of the rounds."""
        return median(self.seconds)

    @property
    def rate(self) -> float:
        """Bytes or operations per second over all rounds."""
        return self.amount * len(self.seconds) / sum(self.seconds)


@dataclass(frozen=True)
class DriverMeasurement:
    """Result of a measurement. ``uri`` has no secrets.

    ``config`` holds the settings and ``machine`` describes the host. ``invalid`` gives the reasons
    why figures are invalid, by point name, or under ``""`` for all.
    """

    workload: str
    uri: str
    created_s: float
    config: Mapping[str, Any]
    machine: Mapping[str, str]
    points: Mapping[str, PointResult]
    invalid: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def config_hash(self) -> str:
        """Hash of the workload, URI and settings. Results are comparable if it is equal."""
        text = json.dumps([self.workload, self.uri, self.config], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def phases(self) -> list[Phase]:
        """A phase for each point, so that the checks and comparisons of checkpoint phases apply."""
        return [Phase(name, point.amount, point.seconds) for name, point in self.points.items()]

    def as_measurement(self) -> Measurement:
        """Return the result as a measurement of checkpoints, for comparisons."""
        return Measurement(
            self.uri,
            self.created_s,
            {"workload": self.workload, **self.config},
            self.machine,
            tuple(self.phases),
            invalid=self.invalid,
        )


def encoded(found: DriverMeasurement) -> str:
    """Return a result as JSON."""
    fields = asdict(found)
    for name, point in found.points.items():
        fields["points"][name]["rate"] = point.rate
        fields["points"][name]["median_s"] = point.median_s
    return json.dumps({"version": VERSION, "config_hash": found.config_hash, **fields}, indent=1)


def workload_of(text: str) -> str | None:
    """Return the workload named in a document. None if the text is no such document; those of
    checkpoints name none."""
    try:
        fields = json.loads(text)
    except ValueError:
        return None
    if not isinstance(fields, dict):
        return None
    named = fields.get("workload")
    if isinstance(named, str):
        return named
    return None


def decoded(text: str, name: str) -> DriverMeasurement:
    """Decode the JSON of :func:`encoded`. Raises UsageError, which names ``name``, for anything
    else."""
    try:
        fields = json.loads(text)
        if fields["version"] != VERSION:
            raise ValueError(f"its version is {fields['version']!r}")
        if fields["workload"] not in WORKLOADS:
            raise ValueError(f"its workload is {fields['workload']!r}")
        return DriverMeasurement(
            workload=fields["workload"],
            uri=str(fields["uri"]),
            created_s=float(fields["created_s"]),
            config=dict(fields["config"]),
            machine={key: str(value) for key, value in dict(fields["machine"]).items()},
            points={str(key): _point(point) for key, point in dict(fields["points"]).items()},
            invalid={key: tuple(map(str, why)) for key, why in dict(fields["invalid"]).items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{name} is not a result of `holdfast bench` that this release can read: {error!r}"
        ) from error


def _point(fields: Mapping[str, Any]) -> PointResult:
    seconds = tuple(map(float, fields["seconds"]))
    if not seconds or min(seconds) <= 0:
        raise ValueError("a point without a time")
    latency = fields["latency"]
    return PointResult(
        operation=str(fields["operation"]),
        part_nbytes=int(fields["part_nbytes"]),
        concurrency=int(fields["concurrency"]),
        amount=int(fields["amount"]),
        seconds=seconds,
        latency=Latency(
            p50_s=float(latency["p50_s"]),
            p90_s=float(latency["p90_s"]),
            p99_s=float(latency["p99_s"]),
            max_s=float(latency["max_s"]),
            histogram=tuple(map(int, latency["histogram"])),
        ),
    )
