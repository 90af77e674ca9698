"""Departures of a measurement from the rules of MLPerf Storage."""

from __future__ import annotations

from ..machine import memory_nbytes
from ..workloads.mlperf import Mlperf
from ..workloads.mlperf_rules import Conduct, deviations
from .plan import Plan

__all__ = ["mlperf_notes"]


def mlperf_notes(plan: Plan, host_processes: tuple[int, ...] = (1,)) -> tuple[str, ...]:
    """Return the departures in words; none for other workloads.

    Three rules always hold: saves are durable on return, all writes precede the first read, and
    reads of a local file system follow a drop of its cached pages.
    """
    if not isinstance(plan.saved, Mlperf):
        return ()
    hosts = len(host_processes)
    conduct = Conduct(
        host_processes=host_processes,
        writes=plan.runs,
        reads=plan.runs,
        writes_come_first=True,
        rest_s=plan.settle_s,
        is_synced=True,
        written_nbytes=[plan.nbytes * plan.runs // hosts] * hosts,
        memory_nbytes=[memory_nbytes()] * hosts,
        cache_is_cleared=True,
        results_are_apart=None,
    )
    return tuple(f"MLPerf Storage: {sentence}" for sentence in deviations(plan.saved, conduct))
