"""How often to save at each level of storage, from what a save costs and how often it is needed.

Young (CACM 17(9), 1974) balances the time that saves take against the work that a failure undoes:
saves that cost C seconds, against failures at a rate of λ per second, are best T = √(2·C/λ) apart.
Daly (FGCS 22(3), 2006) has terms of higher order for saves that are not short beside the time
between failures. With several levels each has its own period (Di et al., IPDPS 2014): its cost is
the training time that one save takes from the job, and its rate that of the failures which it is
the fastest level to survive.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Level", "Period", "period_s", "periods"]


@dataclass(frozen=True, slots=True)
class Level:
    """A level of storage. ``cost_s``: training time that one save to it takes; ``rate_per_s``: of
    the failures that it is the fastest level to survive."""

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
    """How often to save to ``level``: the best time between two saves, the steps that are nearest
    to it, and what part of the training time saves and undone work then take together."""

    level: Level
    best_s: float
    every_steps: int
    every_s: float
    lost_part: float


def period_s(cost_s: float, rate_per_s: float) -> float:
    """Seconds of training between two saves that lose the least time to saves and failures
    together.

    Young's √(2·C/λ) as far as C is short beside 1/λ; Daly's series corrects it below C = 2/λ.
    Beyond, a save takes longer than the time between two failures, and 1/λ is all there is.
    """
    part = cost_s * rate_per_s / 2
    if part >= 1:
        return 1 / rate_per_s
    root = math.sqrt(part)
    return math.sqrt(2 * cost_s / rate_per_s) * (1 + root / 3 + part / 9) - cost_s


def periods(levels: Sequence[Level], step_s: float) -> list[Period]:
    """The period of each level, in whole steps of ``step_s`` seconds, at least one.

    A level that survives more is never saved to more often than the one before it: ``levels`` come
    from the fastest to the slowest, and each save of a slower level is made from one of a faster
    one, so a period is a multiple of the period before it, the one that loses the least. Raises
    ValueError for a step that takes no time, and for two levels of one name.
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
    """The multiple of ``unit`` steps beside ``best_s`` that loses the least."""
    below = max(1, math.floor(best_s / (unit * step_s))) * unit
    return min(below, below + unit, key=lambda steps: _lost_part(level, steps * step_s))


def _lost_part(level: Level, every_s: float) -> float:
    """The part of a job's time that is no progress, when failures come as a Poisson process: each
    interval of ``every_s`` and its save is tried until it ends without one (Daly, equation 20,
    without the time of a restart, which does not depend on the period)."""
    exponent = level.rate_per_s * (every_s + level.cost_s)
    if exponent > 700:  # exp would overflow: it never ends
        return 1.0
    return 1 - level.rate_per_s * every_s / math.expm1(exponent)
