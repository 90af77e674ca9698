"""The course of a measurement: contestants take turns, round after round, on all ranks at the same
time.

The ranks' observations are joined into phases.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..contest import Contestant, contest
from ..report import Series
from .observed import Counts, count_now, operations_of, since
from .plan import Plan
from .ranks import Ranks
from .result import Phase

__all__ = ["Course", "Noted"]

Say = Callable[[str], None]


@dataclass
class Noted:
    """Observations of a phase on this rank, over all rounds. ``stall_s`` holds the stall of
    training by round."""

    retries: int = 0
    stall_s: list[float] = field(default_factory=list)
    counts: list[Counts] = field(default_factory=list)


class Course:
    """Runs contestants according to the plan. ``noted`` holds this rank's observations by phase."""

    def __init__(self, plan: Plan, ranks: Ranks, say: Say) -> None:
        self.noted: dict[str, Noted] = {}
        self._plan = plan
        self._ranks = ranks
        self._say = say
        self._began_s = time.monotonic()

    def note(self, name: str) -> Noted:
        """Return the observations of a phase."""
        return self.noted.setdefault(name, Noted())

    def run(
        self, contestants: Sequence[Contestant], nbytes_of: Callable[[str], int]
    ) -> list[Phase]:
        """Run the contestants and return their phases. ``nbytes_of`` maps a phase's name to the
        bytes that all ranks together move."""
        if self._plan.warm_ups:
            self._contest(contestants, self._plan.warm_ups)
            for name in (each.name for each in contestants):
                self.noted[name] = Noted()
        found = self._contest([self._counted(each) for each in contestants], self._plan.runs)
        return [self._phase(series, nbytes_of(series.name)) for series in found]

    def once(self, name: str, nbytes: int, run: Callable[[], None]) -> Phase:
        """Measure a phase that can only run once, on rank 0."""
        if self._ranks.rank:
            contestants = [Contestant(name, lambda: None)]
        else:
            contestants = [Contestant(name, run)]
        found = contest(contestants, 1, 0.0, self._say_of_rank_0, self._ranks.meet)
        return self._phase(found[0], nbytes)

    def _contest(self, contestants: Sequence[Contestant], rounds: int) -> list[Series]:
        return contest(
            contestants,
            rounds,
            self._plan.settle_s,
            self._say_of_rank_0,
            self._ranks.meet,
            self._may_go_on,
        )

    def _say_of_rank_0(self, line: str) -> None:
        if self._ranks.rank == 0:
            self._say(line)

    def _may_go_on(self) -> bool:
        limit_s = self._plan.limit_s
        if limit_s is None:
            return True
        return bool(self._ranks.agree(time.monotonic() - self._began_s < limit_s))

    def _counted(self, contestant: Contestant) -> Contestant:
        """Return the contestant with its storage operations counted."""

        def run() -> float | None:
            before = count_now()
            measured_s = contestant.run()
            self.note(contestant.name).counts.append(since(before, count_now()))
            return measured_s

        return replace(contestant, run=run)

    def _phase(self, series: Series, nbytes: int) -> Phase:
        noted = self.note(series.name)
        told = self._ranks.gather(
            {
                "seconds": series.seconds,
                "cpu_s": series.own_processor_s,
                "peak_nbytes": series.peak_nbytes,
                "retries": noted.retries,
                "stall_s": noted.stall_s,
                "counts": noted.counts,
            }
        )
        return _joined(series.name, nbytes, told)


def _joined(name: str, nbytes: int, told: Sequence[Mapping[str, Any]]) -> Phase:
    """Join the ranks' observations. A round ends when the last rank is done."""
    by_round = list(zip(*(rank["seconds"] for rank in told), strict=True))
    return Phase(
        name=name,
        nbytes=nbytes,
        seconds=tuple(max(seconds) for seconds in by_round),
        cpu_s=_each_round(sum, told, "cpu_s"),
        peak_nbytes=_each_round(max, told, "peak_nbytes"),
        retries=sum(rank["retries"] for rank in told),
        ranks_s=tuple(by_round),
        stall_s=_each_round(max, told, "stall_s"),
        operations=operations_of(counts for rank in told for counts in rank["counts"]),
    )


def _each_round(
    join: Callable[[Sequence[Any]], Any], told: Sequence[Mapping[str, Any]], field_name: str
) -> tuple[Any, ...]:
    return tuple(map(join, zip(*(rank[field_name] for rank in told), strict=True)))
