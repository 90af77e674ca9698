"""Measures a storage: phases take turns with their limits, round after round, on all ranks at
once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import holdfast

from ...drivers.uri import Uri
from ..clearing import clear
from ..machine import busy_part, describe
from ..workloads.materialised import materialise
from .beside import Beside
from .comparability import mlperf_notes
from .course import Course
from .layouts import local_nbytes
from .phases import Phases
from .plan import Plan, local_folder
from .ranks import Ranks
from .result import Measurement, Phase
from .validity import joined, reasons_against

__all__ = ["measured"]

Say = Callable[[str], None]


def measured(
    plan: Plan, say: Say = lambda line: None, ranks: Ranks | None = None, place: Uri | None = None
) -> Measurement:
    """Measure according to a plan that :func:`.plan.check` has accepted. Every rank calls this;
    rank 0 calls ``say`` for each round.

    Everything is written to ``place``, by default a new folder below the URI, which is deleted
    afterwards, also on interruption. Raises the errors of saves and loads.
    """
    if ranks is None:
        ranks = Ranks()
    if place is None:
        place = plan.new_place()
    place = _counting(place)
    began_s = time.time()
    try:
        busy_before = max(ranks.gather(busy_part()))
        specs = plan.saved.specs(ranks.rank, ranks.world)
        state = materialise(specs, ranks.rank, ranks.world, content=plan.content)
        nbytes = local_nbytes(state)
        course = Course(plan, ranks, say)
        beside = Beside(plan, place, state, nbytes, ranks, say)
        own = Phases(place, state, nbytes, plan, ranks, course)
        phases = _run(own, beside, course, ranks)
    finally:
        ranks.leave()
        if ranks.rank == 0:
            clear(place)
        holdfast.release_memory()
    return Measurement(
        uri=plan.parsed.redacted,
        created_s=began_s,
        config=_config(plan, ranks, phases),
        machine=describe(Path(local_folder(plan.parsed) or ".")),
        phases=tuple(phases),
        limits=beside.limits,
        invalid=joined(
            reasons_against(phases, busy_before=busy_before, cold_shares=own.cold_shares),
            beside.invalid,
        ),
        notes=mlperf_notes(plan, ranks.host_ranks),
    )


def _run(own: Phases, beside: Beside, course: Course, ranks: Ranks) -> list[Phase]:
    nbytes_of = _nbytes_of_phases(ranks, own, beside)
    own.prepare()
    written = course.run(beside.writing(list(own.writing())), nbytes_of)
    reading = [own.cold(each) for each in beside.reading(list(own.reading()))]
    read = course.run(reading, nbytes_of)
    own.save_another()
    pruned = course.once("prune", nbytes_of("prune"), own.prune)
    deleted = course.once("delete", nbytes_of("delete"), own.delete)
    return [*written, *read, pruned, deleted]


def _nbytes_of_phases(ranks: Ranks, own: Phases, beside: Beside) -> Callable[[str], int]:
    """Return a function that maps a phase's name to the bytes that all ranks together move."""
    told = ranks.gather([own.nbytes, dict(beside.nbytes)])
    state_nbytes = sum(nbytes for nbytes, _ in told)

    def nbytes_of(name: str) -> int:
        return sum(nbytes[name] for _, nbytes in told if name in nbytes) or state_nbytes

    return nbytes_of


def _counting(place: Uri) -> Uri:
    """Return the place with the layer that counts storage operations."""
    return replace(place, options={**place.options, "metrics": "true"})


def _config(plan: Plan, ranks: Ranks, phases: list[Phase]) -> Mapping[str, Any]:
    nbytes = next(phase.nbytes for phase in phases if phase.name == "save")
    return {
        "workload": plan.saved.name,
        "content": plan.content.name,
        "nbytes": nbytes,
        "runs": plan.runs,
        "settle_s": plan.settle_s,
        "ranks": ranks.world,
        "hosts": len(ranks.host_ranks),
        "compression": plan.compression,
        "peers": plan.peers,
        "driver_alone": plan.driver_alone,
        "prices": None if plan.prices is None else asdict(plan.prices),
    }
