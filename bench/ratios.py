"""Ratios of times, with their confidence.

Scope: pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np

RESAMPLES = 10_000
CONFIDENCE = 0.95


def median_ratio(of: Sequence[float], to: Sequence[float]) -> float:
    """Return the time of ``of`` in units of ``to``: the median over rounds, which share their
    conditions. Rounds that only one of them has are ignored."""
    return median(a / b for a, b in zip(of, to, strict=False))


def of_medians(of: Sequence[float], to: Sequence[float]) -> tuple[float, float, float]:
    """Return the ratio of two medians, from independent rounds, and the bounds of its 95 %
    confidence interval, by the percentile bootstrap (Efron 1979). Resampling is seeded, so the same
    times give the same interval."""
    random = np.random.default_rng(0)
    drawn = _drawn_medians(np.asarray(of), random) / _drawn_medians(np.asarray(to), random)
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]).tolist()
    return median(of) / median(to), low, high


def _drawn_medians(values: np.ndarray, random: np.random.Generator) -> np.ndarray:
    drawn = random.choice(values, (RESAMPLES, len(values)))
    medians: np.ndarray = np.median(drawn, axis=1)
    return medians
