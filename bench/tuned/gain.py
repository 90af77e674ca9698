"""How much faster one choice is than another, and how sure that is.

Scope: pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["PAIRS_MIN", "Gain", "gain_of"]

CONFIDENCE = 0.95
PAIRS_MIN = 6
"""Fewer pairs cannot show anything with a confidence of 95 %, whatever they are."""


@dataclass(frozen=True)
class Gain:
    """``ratio``: so many times as fast; ``low`` and ``high``: its confidence interval, from 0 to
    infinity where there are too few pairs for one."""

    ratio: float
    low: float
    high: float
    pairs: int

    @property
    def is_shown(self) -> bool:
        """Whether it is faster, with confidence."""
        return self.low > 1


def gain_of(pairs: Sequence[tuple[float, float]]) -> Gain:
    """Of (seconds before, seconds after), one pair for each round; there is at least one.

    The estimate of Hodges and Lehmann (1963) for the logarithms of the ratios, with the interval
    that the signed-rank test of Wilcoxon (1945) gives. It is exact for few pairs, and assumes no
    distribution but a symmetric one, which alternating who comes first sees to. A pair in which
    the machine was busy elsewhere counts like any other, however extreme it is.
    """
    logs = [math.log(before / after) for before, after in pairs]
    walsh = sorted((a + b) / 2 for i, a in enumerate(logs) for b in logs[i:])
    ratio = math.exp(_middle(walsh))
    rank = _rank(len(logs))
    if rank is None:
        return Gain(ratio, 0.0, math.inf, len(logs))
    return Gain(ratio, math.exp(walsh[rank]), math.exp(walsh[-1 - rank]), len(logs))


def _middle(ordered: Sequence[float]) -> float:
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2


def _rank(count: int) -> int | None:
    """The number of Walsh averages below the interval: the largest k for which the sum of the
    positive ranks is at most k with a probability of at most 2.5 %; None where there is none."""
    ways = [1]
    for rank in range(1, count + 1):
        longer = ways + [0] * rank
        for total, number in enumerate(ways):
            longer[total + rank] += number
        ways = longer
    allowed = (1 - CONFIDENCE) / 2 * 2.0**count
    below = 0
    for total, number in enumerate(ways):
        below += number
        if below > allowed:
            return total - 1 if total else None
    return None
