"""Histograms of durations, with buckets that double in width."""

from __future__ import annotations

from collections.abc import Sequence

BUCKET_MIN_S = 2.0**-20
"""Upper end of a histogram's first bucket, about a microsecond; each further end is twice the
previous."""
BUCKETS = 32
"""Number of buckets. The last one is open."""


def bucket_of(seconds: float) -> int:
    """Return the bucket that counts a duration."""
    return min(BUCKETS - 1, int(seconds / BUCKET_MIN_S).bit_length())


def quantile_s(histogram: Sequence[int], part: float) -> float:
    """Return the duration that ``part`` (0 to 1) of the counted operations did not exceed.

    The result is the end of a bucket, so up to twice the true value; 0 if nothing was counted.
    """
    wanted = part * sum(histogram)
    seen = 0
    for bucket, count in enumerate(histogram):
        seen += count
        if count and seen >= wanted:
            return BUCKET_MIN_S * 2.0**bucket
    return 0.0
