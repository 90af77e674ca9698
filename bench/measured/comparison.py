"""Compares two results of ``holdfast bench``.

Scope: pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ratios import of_medians
from .result import Measurement, Phase

__all__ = ["Compared", "compare"]


@dataclass(frozen=True)
class Compared:
    """One phase of two results.

    ``ratio`` is how many times as fast B is as A, by medians. ``low`` and ``high`` bound its 95 %
    confidence interval, by the percentile bootstrap (Efron 1979).
    """

    name: str
    a: Phase
    b: Phase
    ratio: float
    low: float
    high: float

    def is_slower(self, part: float) -> bool:
        """Return whether B is slower by more than ``part``, with confidence."""
        return self.high < 1 - part

    @property
    def verdict(self) -> str:
        """The verdict in a few words."""
        if self.low > 1:
            return "faster"
        if self.high < 1:
            return "slower"
        return "no difference shown"


def compare(a: Measurement, b: Measurement) -> list[Compared]:
    """Compare the phases that both results have, in the order of ``a``. Resampling is seeded, so
    the same files give the same figures."""
    return [
        _compared(phase, b.by_name[phase.name]) for phase in a.phases if phase.name in b.by_name
    ]


def _compared(a: Phase, b: Phase) -> Compared:
    found = of_medians(a.seconds, b.seconds)
    larger = b.nbytes / a.nbytes
    return Compared(a.name, a, b, found.ratio * larger, found.low * larger, found.high * larger)
