"""The steps shared by both workloads of a driver alone: a temporary folder and a description of the
machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...drivers.uri import Uri
from ..clearing import clear
from ..machine import busy_part, describe
from ..measured.plan import Plan, local_folder
from ..measured.validity import LEAST_S, reasons_against
from .result import DriverMeasurement, PointResult

__all__ = ["Say", "measured_at"]

Say = Callable[[str], None]


def measured_at(
    plan: Plan,
    workload: str,
    config: Mapping[str, Any],
    work: Callable[[Uri], tuple[Mapping[str, PointResult], Mapping[str, float]]],
    *,
    least_s: float = LEAST_S,
) -> DriverMeasurement:
    """Run ``work`` in a new folder below the URI, and delete that folder afterwards, also on
    interruption.

    ``work`` returns its results by point and, for points that read from a local file system, the
    smallest share of bytes that came from the device. Rounds shorter than ``least_s`` are marked
    invalid. Raises the driver's errors.
    """
    busy_before = busy_part()
    place = plan.new_place()
    began_s = time.time()
    try:
        points, cold_shares = work(place)
    finally:
        clear(place)
    found = DriverMeasurement(
        workload,
        plan.parsed.redacted,
        began_s,
        config,
        describe(Path(local_folder(plan.parsed) or ".")),
        points,
    )
    invalid = reasons_against(
        found.phases, busy_before=busy_before, cold_shares=cold_shares, least_s=least_s
    )
    return replace(found, invalid=invalid)
