"""Computes how often to save at each level of storage, from the costs of saves and failure rates.

Young (CACM 17(9), 1974) balances the time that saves take against the work lost to failures: saves
that cost C seconds, with failures at a rate of λ per second, are best T = √(2·C/λ) apart. Daly
(FGCS 22(3), 2006) adds terms of higher order for saves that are not short compared with the time
between failures. With several levels, each has its own period (Di et al., IPDPS 2014): its cost is
the training time that one save takes, and its rate is that of the failures for which it is the
fastest surviving level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Level:
    """A level of storage.

    ``cost_s``: training time that one save takes. ``rate_per_s``: rate of the failures for which
    this is the fastest surviving level.
    """

    name: str
    cost_s: float
    rate_per_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.cost_s) and self.cost_s >= 0):
            raise ValueError(f"{self.name}: a cost of {self.cost_s} seconds makes no sense")
        if not (math.isfinite(self.rate_per_s) and self.rate_per_s > 0):
            raise ValueError(f"{self.name}: a rate of {self.rate_per_s} per second makes no sense")


@dataclass(frozen=True, slots=True)
class Period:
    """The result for ``level``.

    ``best_s``: best time between two saves. ``every_steps`` and ``every_s``: the nearest whole
    number of steps, and its time. ``lost_part``: fraction of the training time then lost to saves
    and undone work.
    """

    level: Level
    best_s: float
    every_steps: int
    every_s: float
    lost_part: float


def period_s(cost_s: float, rate_per_s: float) -> float:
    """Return the seconds between two saves that minimize the time lost to saves and failures.

    Young's √(2·C/λ) holds while C is short compared with 1/λ; Daly's series corrects it below C =
    2/λ. Beyond, a save takes longer than the time between two failures, and the result is 1/λ.
    """
    part = cost_s * rate_per_s / 2
    if part >= 1:
        return 1 / rate_per_s
    root = math.sqrt(part)
    return math.sqrt(2 * cost_s / rate_per_s) * (1 + root / 3 + part / 9) - cost_s


def periods(levels: Sequence[Level], step_s: float) -> list[Period]:
    """Return the period of each level, in whole steps of ``step_s`` seconds, at least one.

    ``levels`` come from the fastest to the slowest. Each save to a slower level is made from one of
    a faster level, so a period is the best multiple of the preceding period. Raises ValueError for
    a step that takes no time, and for two levels with the same name.
    """
    if not (math.isfinite(step_s) and step_s > 0):
        raise ValueError(f"a step of {step_s} seconds makes no sense")
    if len({level.name for level in levels}) != len(levels):
        raise ValueError("two levels have the same name")
    found = list[Period]()
    unit = 1
    for level in levels:
        best_s = period_s(level.cost_s, level.rate_per_s)
        unit = _nearest_steps(level, best_s, unit, step_s)
        every_s = unit * step_s
        found.append(Period(level, best_s, unit, every_s, _lost_part(level, every_s)))
    return found


def _nearest_steps(level: Level, best_s: float, unit: int, step_s: float) -> int:
    """Return the multiple of ``unit`` steps next to ``best_s`` that loses the least."""
    below = max(1, math.floor(best_s / (unit * step_s))) * unit
    return min(below, below + unit, key=lambda steps: _lost_part(level, steps * step_s))


def _lost_part(level: Level, every_s: float) -> float:
    """Return the fraction of a job's time that is lost, with failures as a Poisson process.

    Each interval of ``every_s`` and its save is repeated until it ends without a failure (Daly,
    equation 20, without the time of a restart, which does not depend on the period).
    """
    exponent = level.rate_per_s * (every_s + level.cost_s)
    if exponent > 700:  # exp would overflow: the job never ends
        return 1.0
    return 1 - level.rate_per_s * every_s / math.expm1(exponent)


class Steps:
    """A schedule: due whenever a multiple of ``every`` is reached or passed, in strides too; None:
    never."""

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._last: int | None = None

    def due(self, step: int, *_: object) -> bool:
        """Return whether a save is due at ``step``. Steps ascend. Further arguments are ignored."""
        last = self._last
        self._last = step
        if self._every is None:
            return False
        if last is None:
            return step % self._every == 0
        return step // self._every > last // self._every

    def begin_at(self, step: int | None) -> None:
        """Set the step of the checkpoint that training resumed from; None: nothing is known."""
        self._last = step
