"""Histograms of durations, in buckets each of which is twice as wide as the one before."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["BUCKETS", "BUCKET_MIN_S", "bucket_of", "quantile_s"]

BUCKET_MIN_S = 2.0**-20
"""The upper end of the first bucket of a histogram, about a microsecond; each ends at twice the one
before."""
BUCKETS = 32
"""The last one is open."""


def bucket_of(seconds: float) -> int:
    """The bucket in which a duration counts."""
    return min(BUCKETS - 1, int(seconds / BUCKET_MIN_S).bit_length())


def quantile_s(histogram: Sequence[int], part: float) -> float:
    """So long took ``part`` (0 to 1) of what is counted, or less: the end of its bucket, so at most
    twice too much; 0 if nothing is."""
    wanted = part * sum(histogram)
    seen = 0
    for bucket, count in enumerate(histogram):
        seen += count
        if count and seen >= wanted:
            return BUCKET_MIN_S * 2.0**bucket
    return 0.0
