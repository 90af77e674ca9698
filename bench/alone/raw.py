"""Measures a driver alone over a grid of part size × concurrency: sequential and random writes and
reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...core.units import ceil_div
from ...drivers.contract import Traits
from ...drivers.uri import Uri
from ..contest import Contestant, contest
from ..machine import drop_caches, read_from_device_nbytes
from ..measured.plan import local_folder
from ..traits import traits_of
from .course import Say, measured_at
from .grid import Point
from .plan import RawPlan, memory_nbytes
from .result import OPERATIONS, RAW, DriverMeasurement, PointResult, latency_of
from .transfer import Memory, Transfer

__all__ = ["measured_raw"]

_WRITTEN = "written"
_STORED = "stored"
"""Objects below the place: one that each write replaces, and one to read."""


def measured_raw(
    plan: RawPlan, points: Sequence[Point], say: Say = lambda line: None
) -> DriverMeasurement:
    """Measure ``points``, which :func:`.plan.check_raw` returned for ``plan``, and call ``say`` for
    each round.

    Each point takes its turn in every round, in reverse order in every other round, so that
    disturbances affect all points alike. Raises the driver's errors.
    """
    config = {
        "nbytes": plan.object_nbytes,
        "runs": plan.runs,
        "settle_s": plan.settle_s,
        "points": [point.name for point in points],
    }

    def work(place: Uri) -> tuple[Mapping[str, PointResult], Mapping[str, float]]:
        run = _Run(place, plan, points, say)
        found = run.all()
        return found, run.cold_shares

    found = measured_at(plan, RAW, config, work)
    return replace(found, invalid=_with_too_few_parts(found))


def _with_too_few_parts(found: DriverMeasurement) -> dict[str, tuple[str, ...]]:
    """Return the reasons why figures are invalid, including points with fewer parts than their
    concurrency."""
    invalid = dict(found.invalid)
    for name, point in found.points.items():
        count = ceil_div(point.amount, point.part_nbytes)
        if count < point.concurrency:
            reason = f"the object has only {count} parts; give a larger --size"
            invalid[name] = (*invalid.get(name, ()), reason)
    return invalid


@dataclass(frozen=True)
class _Entry:
    """One operation at one point."""

    operation: str
    point: Point
    transfer: Transfer

    @property
    def name(self) -> str:
        return f"{self.operation} {self.point.name}"


class _Run:
    """Measurement of all points. ``cold_shares`` maps reading points to the smallest share of bytes
    that came from the device in any round, where that is known."""

    def __init__(self, place: Uri, plan: RawPlan, points: Sequence[Point], say: Say) -> None:
        self.cold_shares: dict[str, float] = {}
        self._place = place
        self._plan = plan
        self._points = points
        self._say = say
        self._memory = Memory(memory_nbytes(plan, points))
        self._folder = local_folder(place)
        self._traits = traits_of(place)

    def all(self) -> dict[str, PointResult]:
        """Measure everything, and return the results by point name."""
        writing = list(self._entries(OPERATIONS[:2], _WRITTEN))
        reading = list(self._entries(OPERATIONS[2:], _STORED))
        # Touch the memory first, so that no point pays for page faults.
        Transfer(self._place, _STORED, self._plan.object_nbytes, memory=self._memory).write()
        found = self._contest(writing, [Contestant(e.name, e.transfer.write) for e in writing])
        return found | self._contest(reading, [self._cold(entry) for entry in reading])

    def _entries(self, operations: Sequence[str], key: str) -> Iterator[_Entry]:
        for operation in operations:
            if not _possible(operation, self._traits):
                continue
            for point in self._points:
                transfer = Transfer(
                    self._place,
                    key,
                    self._plan.object_nbytes,
                    shape=point.shape(random=operation.startswith("random")),
                    options=point.options,
                    memory=self._memory,
                )
                yield _Entry(operation, point, transfer)

    def _cold(self, entry: _Entry) -> Contestant:
        """Return a contestant that reads from the device, if this host can drop its caches, and
        records the share that did."""
        folder = self._folder
        if folder is None:
            return Contestant(entry.name, entry.transfer.read)
        before_nbytes = 0

        def before() -> None:
            nonlocal before_nbytes
            drop_caches(Path(folder))
            before_nbytes = read_from_device_nbytes()

        def after() -> None:
            share = (read_from_device_nbytes() - before_nbytes) / self._plan.object_nbytes
            self.cold_shares[entry.name] = min(share, self.cold_shares.get(entry.name, share))

        return Contestant(entry.name, entry.transfer.read, before, after)

    def _contest(
        self, entries: Sequence[_Entry], contestants: Sequence[Contestant]
    ) -> dict[str, PointResult]:
        series = contest(contestants, self._plan.runs, self._plan.settle_s, self._say)
        return {
            entry.name: PointResult(
                operation=entry.operation,
                part_nbytes=entry.point.part_nbytes,
                concurrency=entry.point.concurrency,
                amount=self._plan.object_nbytes,
                seconds=tuple(timed.seconds),
                latency=latency_of(entry.transfer.latencies_s),
            )
            for entry, timed in zip(entries, series, strict=True)
        }


def _possible(operation: str, traits: Traits) -> bool:
    """Return whether a driver supports an operation. Most uploads take their parts in order
    only."""
    return operation != "random write" or traits.part_order == "any"
