"""Charts of distributions: a histogram of durations, and figures per rank.

Scope: pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from ...core.histogram import BUCKET_MIN_S
from .charts import WIDTH, bars
from .elements import Element

_BARS = 128


def histogram_bars(
    counts: Sequence[int], noun: str, *, width: float = WIDTH, colour: str
) -> Element | None:
    """Return a histogram of durations, labelled with ``noun``; None if all counts are 0."""
    counted = [number for number, count in enumerate(counts) if count]
    if not counted:
        return None
    values = []
    for number in range(counted[0], counted[-1] + 1):
        upper = seconds_text(BUCKET_MIN_S * 2.0**number)
        values.append((upper, float(counts[number]), f"{counts[number]:,} {noun} up to {upper}"))
    return bars(values, "", width=width, colour=colour)


def by_rank(
    values: Mapping[int, float],
    unit: str,
    said: Callable[[int], str],
    *,
    width: float = WIDTH,
    colour: str,
) -> Element:
    """Return a bar for each rank. With many ranks, a bar stands for a group and shows its largest
    value. ``said`` gives the tooltip of a rank."""
    drawn = []
    for group in in_groups_of_ranks(list(values), _BARS):
        largest = max(group, key=values.__getitem__)
        drawn.append((str(group[0]), values[largest], f"rank {largest}: {said(largest)}"))
    return bars(drawn, unit, width=width, colour=colour)


def in_groups_of_ranks(ranks: Sequence[int], most: int) -> list[Sequence[int]]:
    """Divide ranks into at most ``most`` groups of neighbours."""
    size = math.ceil(len(ranks) / most) or 1
    return [ranks[first : first + size] for first in range(0, len(ranks), size)]


def seconds_text(seconds: float) -> str:
    """Return a short duration in a suitable unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
