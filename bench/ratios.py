"""Ratios of times, and how sure they are.

Scope: pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

__all__ = ["Interval", "median_ratio", "of_medians", "of_pairs"]

RESAMPLES = 10_000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """``ratio``, and the interval of 95 % confidence around it, by the percentile bootstrap (Efron
    1979). Resampling is seeded: the same times give the same interval."""

    ratio: float
    low: float
    high: float


def median_ratio(of: Sequence[float], to: Sequence[float]) -> float:
    """How long ``of`` takes in units of ``to``: the median over rounds, each of which saw the same
    storage. Rounds that only one of them has are left out."""
    return median(a / b for a, b in zip(of, to, strict=False))


def of_pairs(of: Sequence[float], to: Sequence[float]) -> Interval:
    """The same with its confidence: rounds are drawn as pairs. Raises ValueError where the two have
    not the same number of rounds."""
    ratios = np.asarray([a / b for a, b in zip(of, to, strict=True)])
    low, high = _bounds(_drawn_medians(ratios, np.random.default_rng(0)))
    return Interval(float(np.median(ratios)), low, high)


def of_medians(of: Sequence[float], to: Sequence[float]) -> Interval:
    """The ratio of two medians whose rounds have nothing to do with each other."""
    random = np.random.default_rng(0)
    drawn = _drawn_medians(np.asarray(of), random) / _drawn_medians(np.asarray(to), random)
    low, high = _bounds(drawn)
    return Interval(median(of) / median(to), low, high)


def _drawn_medians(values: np.ndarray, random: np.random.Generator) -> np.ndarray:
    drawn = random.choice(values, (RESAMPLES, len(values)))
    medians: np.ndarray = np.median(drawn, axis=1)
    return medians


def _bounds(drawn: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)
