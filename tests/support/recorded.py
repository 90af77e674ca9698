"""Recorded telemetry with given figures: of stages, ranks and saves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from holdfast.core.histogram import BUCKETS, bucket_of
from holdfast.core.spans import SlowOperation, StageReport
from holdfast.storage.format.save_telemetry import RankTelemetry, SaveTelemetry
from holdfast.storage.operations.maintenance.listing import ListedCheckpoint

CHUNKS = 40
NBYTES = CHUNKS << 24


def stage(seconds: float, nbytes: int = 0, **fields: Any) -> StageReport:
    """Return a stage that was busy for this time, with operations that all took equally long."""
    count = CHUNKS if nbytes else 1
    histogram = [0] * BUCKETS
    histogram[bucket_of(seconds / count)] = count
    made = StageReport(
        count, nbytes, seconds, seconds, 1.0, 1.0 + seconds, histogram=tuple(histogram)
    )
    return replace(made, **fields)


def record(rank: int, **stages: StageReport) -> RankTelemetry:
    """Return a rank's telemetry with the usual stages, except these."""
    usual = {
        "flatten": stage(0.01),
        "round agree": stage(0.5, last_s=2.0),
        "capture": stage(1.0, NBYTES),
        "hash": stage(0.5, NBYTES),
        "open": stage(0.05),
        "write": stage(2.0, NBYTES),
        "upload_commit": stage(0.1),
    }
    return RankTelemetry(rank, NBYTES, NBYTES, 5.0, 0.0, 2.5, 1 << 24, {**usual, **stages})


def save_of(changed: Mapping[int, Mapping[str, StageReport]], world: int = 8) -> SaveTelemetry:
    """Return a save of many ranks, some of which have other stages."""
    ranks = {rank: record(rank, **changed.get(rank, {})) for rank in range(world)}
    return SaveTelemetry("20310203T040506-8e8a630f", 5, world, 1e9, 6.0, {}, ranks)


def slow_write(rank: int, key: str, seconds: float = 3.0) -> SlowOperation:
    """Return one of a rank's slowest operations."""
    return SlowOperation("write", key, 0, 1 << 24, rank, 1.0, seconds)


def listed(step: int | None) -> ListedCheckpoint:
    """Return the line of a listing for the save of a step."""
    return ListedCheckpoint(f"step-{step}", step, 8, 100, NBYTES, 1e9)
