"""Measures a driver alone. ``raw`` writes and reads an object, sequentially and at random, over a
grid of part size × concurrency. ``meta`` creates, creates exclusively, stats, lists, gets and
deletes many small objects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from ...core.aio import at_most
from ...core.units import ceil_div
from ...drivers.contract import Driver
from ...drivers.registry import open_driver
from ...drivers.uri import Uri
from ..contest import Contestant
from ..measured.course import Course, Found, Say, measured_by
from ..measured.result import Measurement, Phase, timed_operations
from ..place import traits_of
from .plan import MetaPlan, Point, RawPlan, memory_nbytes
from .transfer import Memory, Transfer

META_OPERATIONS = ("create", "create exclusively", "stat", "list", "get", "delete")
_WRITTEN = "written"
_STORED = "stored"
"""Objects of ``raw``: one that each write replaces, and one to read."""
_EXCLUSIVE = "exclusive"
_META_LEAST_S = 0.001
"""Shortest valid round of ``meta``. Its operations run without any setup, so even short rounds are
meaningful."""

Call = Callable[[], Coroutine[Any, Any, object]]


def measured_raw(
    plan: RawPlan, points: Sequence[Point], say: Say = lambda line: None
) -> Measurement:
    """Measure ``points``, which :func:`.plan.check_raw` returned for ``plan``, and call ``say`` for
    each round. The points take turns, so that disturbances affect all alike. Raises the driver's
    errors."""
    return measured_by(partial(_raw, plan, points), plan, say)


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


def measured_meta(plan: MetaPlan, say: Say = lambda line: None) -> Measurement:
    """Measure ``plan.objects`` objects of ``plan.nbytes`` each, one at a time and with the driver's
    preferred concurrency. Call ``say`` with a line for each round. Raises the driver's errors."""
    return measured_by(partial(_meta, plan), plan, say, least_s=_META_LEAST_S)


def _meta(plan: MetaPlan, course: Course, place: Uri) -> Found:
    widths = sorted({1, traits_of(place).concurrency})
    moved_nbytes = plan.objects * plan.nbytes
    phases = []
    with asyncio.Runner() as runner:
        driver = runner.run(_opened(place))
        try:
            rounds = {width: _Rounds(plan, driver, width) for width in widths}

            def contestant(width: int) -> Contestant:
                return Contestant(
                    f"{width} at a time", lambda: runner.run(rounds[width].run_next())
                )

            course.run(list(map(contestant, widths)), lambda name: moved_nbytes)
        finally:
            runner.run(driver.close())
    for width, found in rounds.items():
        for operation, timed in found.timed.items():
            operations = timed_operations(timed.latencies_s, moved_nbytes * len(timed.seconds))
            seconds = tuple(timed.seconds)
            name = f"{operation} × {width}"
            phases.append(Phase(name, moved_nbytes, seconds, operations={operation: operations}))
    config = {
        "nbytes": plan.nbytes,
        "objects": plan.objects,
        "runs": plan.runs,
        "concurrencies": widths,
    }
    return Found({"workload": "meta", **config}, phases)


async def _opened(place: Uri) -> Driver:
    return open_driver(place)


@dataclass
class _Timed:
    """Durations of one operation. ``seconds``: per round, of all its calls together.
    ``latencies_s``: of every call."""

    seconds: list[float] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)


class _Rounds:
    """Runs every operation once per object, ``width`` at a time."""

    def __init__(self, plan: MetaPlan, driver: Driver, width: int) -> None:
        self.timed = {operation: _Timed() for operation in META_OPERATIONS}
        self._plan = plan
        self._driver = driver
        self._width = width
        self._number = 0

    async def run_next(self) -> None:
        """Run the next round in a new folder, because caches may know names from earlier ones."""
        folder = f"round-{self._number}-{self._width}"
        self._number += 1
        for operation, calls in self._calls(folder).items():
            await self._run(self.timed[operation], calls)
        await self._driver.delete_all(f"{_EXCLUSIVE}/{folder}")

    def _calls(self, folder: str) -> Mapping[str, Sequence[Call]]:
        driver = self._driver
        objects = self._plan.objects
        data = np.random.default_rng(0).bytes(self._plan.nbytes)
        keys = [f"{folder}/{number:08d}" for number in range(objects)]
        exclusive = [f"{_EXCLUSIVE}/{key}" for key in keys]

        async def listed() -> None:
            count = len([info async for info in driver.list(folder)])
            if count != objects:
                raise AssertionError(f"{count} objects were listed, of {objects}")

        calls: tuple[Sequence[Call], ...] = (
            [partial(driver.put, key, data) for key in keys],
            [partial(driver.put, key, data, exclusive=True) for key in exclusive],
            [partial(driver.stat, key) for key in keys],
            [listed],
            [partial(driver.get, key) for key in keys],
            [partial(driver.delete, key) for key in keys],
        )
        return dict(zip(META_OPERATIONS, calls, strict=True))

    async def _run(self, timed: _Timed, calls: Sequence[Call]) -> None:
        async def one(call: Call) -> None:
            began_s = time.perf_counter()
            await call()
            timed.latencies_s.append(time.perf_counter() - began_s)

        began_s = time.perf_counter()
        await at_most(self._width, map(one, calls))
        timed.seconds.append(time.perf_counter() - began_s)
