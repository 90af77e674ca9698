"""The course of a measurement: contestants take turns, round after round, on all ranks at the same
time. The ranks' observations are joined into phases."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import holdfast

from ...drivers.layers.metrics import snapshots
from ...drivers.uri import Uri
from ..contest import Contestant, contest
from ..machine import busy_part, describe, drop_caches, read_from_device_nbytes
from ..place import clear
from ..report import Series
from .plan import Plan, local_folder
from .ranks import Ranks
from .result import NOTHING, Measurement, Operations, Phase, joined, operations_of, reasons_against

Say = Callable[[str], None]


@dataclass
class Noted:
    """Observations of a phase on this rank, over all rounds. ``stall_s`` holds the stall of
    training by round."""

    retries: int = 0
    stall_s: list[float] = field(default_factory=list)
    counts: list[Mapping[str, Operations]] = field(default_factory=list)


class Course:
    """Runs contestants according to the plan.

    ``noted`` holds this rank's observations by phase. ``cold_shares`` maps phases that read from a
    local file system to the smallest share that came from the device in any round.
    """

    def __init__(self, plan: Plan, ranks: Ranks, say: Say) -> None:
        self.noted: dict[str, Noted] = {}
        self.cold_shares: dict[str, float] = {}
        self.ranks = ranks
        self._plan = plan
        self._say = say
        self._began_s = time.monotonic()

    def say(self, line: str) -> None:
        """Report progress. Rank 0 speaks for all."""
        if self.ranks.rank == 0:
            self._say(line)

    def note(self, name: str) -> Noted:
        """Return the observations of a phase."""
        return self.noted.setdefault(name, Noted())

    def run(
        self, contestants: Sequence[Contestant], nbytes_of: Callable[[str], int]
    ) -> list[Phase]:
        """Run the contestants and return their phases. ``nbytes_of`` maps a phase's name to the
        bytes that all ranks together move."""
        found = contest(
            [self._counted(each) for each in contestants],
            self._plan.runs,
            self._plan.settle_s,
            self.say,
            self.ranks.meet,
            self._may_go_on,
        )
        return [self._phase(series, nbytes_of(series.name)) for series in found]

    def once(self, name: str, nbytes: int, run: Callable[[], None]) -> Phase:
        """Measure a phase that can only run once, on rank 0."""
        contestant = Contestant(name, (lambda: None) if self.ranks.rank else run)
        (series,) = contest([contestant], 1, 0.0, self.say, self.ranks.meet)
        return self._phase(series, nbytes)

    def cold(self, contestant: Contestant, place: Uri, nbytes: int) -> Contestant:
        """Return a contestant that reads this rank's ``nbytes`` from the device, if this host can
        drop the caches of ``place``, and records the share that did."""
        folder = local_folder(place)
        if folder is None:
            return contestant
        before_nbytes = 0

        def before() -> None:
            nonlocal before_nbytes
            contestant.before()
            drop_caches(Path(folder))
            before_nbytes = read_from_device_nbytes()

        def after() -> None:
            told = self.ranks.gather([read_from_device_nbytes() - before_nbytes, nbytes])
            share = sum(read for read, _ in told) / sum(wanted for _, wanted in told)
            name = contestant.name
            self.cold_shares[name] = min(share, self.cold_shares.get(name, share))
            contestant.after()

        return replace(contestant, before=before, after=after)

    def _may_go_on(self) -> bool:
        limit_s = self._plan.limit_s
        if limit_s is None:
            return True
        return bool(self.ranks.agree(time.monotonic() - self._began_s < limit_s))

    def _counted(self, contestant: Contestant) -> Contestant:
        """Return the contestant with its storage operations counted."""

        def run() -> None:
            before = counted()
            contestant.run()
            grown = {
                name: operations.plus(before.get(name, NOTHING), -1)
                for name, operations in counted().items()
            }
            counts = {name: operations for name, operations in grown.items() if operations.count}
            self.note(contestant.name).counts.append(counts)

        return replace(contestant, run=run)

    def _phase(self, series: Series, nbytes: int) -> Phase:
        """Join the ranks' observations. A round ends when the last rank is done."""
        noted = self.note(series.name)
        operations = _together(noted.counts)
        told = self.ranks.gather(
            {
                "seconds": series.seconds,
                "cpu_s": series.own_processor_s,
                "peak_nbytes": series.peak_nbytes,
                "retries": noted.retries,
                "stall_s": noted.stall_s,
                "operations": {name: asdict(each) for name, each in operations.items()},
            }
        )

        def each_round(join: Callable[[Sequence[Any]], Any], name: str) -> tuple[Any, ...]:
            return tuple(map(join, zip(*(rank[name] for rank in told), strict=True)))

        return Phase(
            name=series.name,
            nbytes=nbytes,
            seconds=each_round(max, "seconds"),
            cpu_s=each_round(sum, "cpu_s"),
            peak_nbytes=each_round(max, "peak_nbytes"),
            retries=sum(rank["retries"] for rank in told),
            ranks_s=each_round(tuple, "seconds"),
            stall_s=each_round(max, "stall_s"),
            operations=_together(operations_of(rank["operations"]) for rank in told),
        )


def counted() -> dict[str, Operations]:
    """Return the operations of this process so far, over all storages with the option
    ``metrics``."""
    return _together(
        {
            name: Operations(seen.count, seen.nbytes, tuple(seen.histogram))
            for name, seen in snapshot.operations.items()
        }
        for snapshot in snapshots().values()
    )


def _together(counts: Iterable[Mapping[str, Operations]]) -> dict[str, Operations]:
    """Add up operations by name."""
    found: dict[str, Operations] = {}
    for each in counts:
        for name, operations in each.items():
            found[name] = found.get(name, NOTHING).plus(operations)
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class Found:
    """The parts of a :class:`.result.Measurement` that differ from work to work."""

    config: Mapping[str, Any]
    phases: Sequence[Phase]
    limits: Mapping[str, str] = field(default_factory=dict)
    invalid: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def measured_by(
    work: Callable[[Course, Uri], Found],
    plan: Plan,
    say: Say,
    *,
    place: Uri,
    ranks: Ranks | None = None,
) -> Measurement:
    """Run ``work`` with a course and a place, and return its findings as a measurement. The place
    is deleted afterwards, also on interruption. Raises the errors of ``work``."""
    ranks = ranks or Ranks()
    course = Course(plan, ranks, say)
    began_s = time.time()
    try:
        busy_before = max(ranks.gather(busy_part()))
        found = work(course, place)
    finally:
        ranks.leave()
        if ranks.rank == 0:
            clear(place)
        holdfast.release_memory()
    against = reasons_against(found.phases, busy_before=busy_before, cold_shares=course.cold_shares)
    return Measurement(
        uri=plan.parsed.redacted,
        created_s=began_s,
        config=found.config,
        machine=describe(Path(local_folder(plan.parsed) or ".")),
        phases=tuple(found.phases),
        limits=found.limits,
        invalid=joined(against, found.invalid),
        notes=found.notes,
    )
