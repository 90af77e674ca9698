"""The speed-up of one candidate over another, with its confidence.

Scope: pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["PAIRS_MIN", "Gain", "gain_of"]

CONFIDENCE = 0.95
PAIRS_MIN = 6
"""Fewer pairs cannot show anything with a confidence of 95 %, whatever their values."""


@dataclass(frozen=True)
class Gain:
    """A speed-up ``ratio``. ``low`` and ``high`` bound its confidence interval, from 0 to infinity
    if there are too few pairs."""

    ratio: float
    low: float
    high: float
    pairs: int

    @property
    def is_shown(self) -> bool:
        """Return whether it is faster, with confidence."""
        return self.low > 1


def gain_of(pairs: Sequence[tuple[float, float]]) -> Gain:
    """Return the speed-up from at least one pair of (seconds before, seconds after), one for each
    round.

    It is the estimate of Hodges and Lehmann (1963) for the logarithms of the ratios, with the
    interval of Wilcoxon's signed-rank test (1945). The interval is exact for few pairs and assumes
    only a symmetric distribution, which alternating the order ensures. One pair that was disturbed
    by other load counts like any other, however extreme it is.
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
    """Return the number of Walsh averages below the interval, or None if there is none.

    It is the largest k such that the sum of the positive ranks is at most k with a probability of
    at most 2.5 %.
    """
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
