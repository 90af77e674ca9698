"""Measures a driver alone: writes and reads an object, sequentially and at random, over a grid of
part size × concurrency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from ...core.units import ceil_div
from ...drivers.uri import Uri
from ..contest import Contestant
from ..measured.course import Course, Found, Say, measured_by
from ..measured.result import Measurement, Phase, timed_operations
from ..place import traits_of
from .plan import Point, RawPlan, memory_nbytes
from .transfer import Memory, Transfer

_WRITTEN = "written"
_STORED = "stored"
"""Objects: one that each write replaces, and one to read."""


def measured_raw(
    plan: RawPlan, points: Sequence[Point], say: Say = lambda line: None
) -> Measurement:
    """Measure ``points``, which :func:`.plan.check_raw` returned for ``plan``, and call ``say`` for
    each round. The points take turns, so that disturbances affect all alike. Raises the driver's
    errors."""
    return measured_by(partial(_raw, plan, points), plan, say, place=plan.new_place())


def _raw(plan: RawPlan, points: Sequence[Point], course: Course, place: Uri) -> Found:
    nbytes = plan.object_nbytes
    memory = Memory(memory_nbytes(plan, points))
    # Touch the memory first, so that no point pays for page faults.
    Transfer(place, _STORED, nbytes, memory=memory).write()
    entries: dict[str, Any] = {}
    invalid: dict[str, tuple[str, ...]] = {}
    phases: list[Phase] = []
    for verb in ("write", "read"):
        transfers: dict[str, Transfer] = {}
        for operation in _possible(verb, place):
            for point in points:
                name = f"{operation} {point.name}"
                shape = replace(point.shape, random=operation != verb)
                key = _WRITTEN if verb == "write" else _STORED
                transfers[name] = Transfer(
                    place, key, nbytes, shape=shape, options=point.options, memory=memory
                )
                entries[name] = {"operation": operation, **asdict(point.shape)}
                parts = ceil_div(nbytes, shape.part_nbytes)
                if parts < shape.concurrency:
                    invalid[name] = (f"the object has only {parts} parts; give a larger --size",)
        for phase in course.run(
            [
                Contestant(name, transfer.write)
                if verb == "write"
                else course.cold(Contestant(name, transfer.read), place, nbytes)
                for name, transfer in transfers.items()
            ],
            lambda name: nbytes,
        ):
            moved_nbytes = nbytes * len(phase.seconds)
            operations = timed_operations(transfers[phase.name].latencies_s, moved_nbytes)
            phases.append(replace(phase, operations={verb: operations}))
    config = {"nbytes": nbytes, "runs": plan.runs, "settle_s": plan.settle_s, "points": entries}
    return Found({"workload": "raw", **config}, phases, invalid=invalid)


def _possible(verb: str, place: Uri) -> list[str]:
    """Return the operations that write, or read. Most uploads take their parts in order only."""
    if verb == "write" and traits_of(place).part_order != "any":
        return [verb]
    return [verb, f"random {verb}"]
