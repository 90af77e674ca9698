"""Pictures of how something is spread: durations over a histogram, figures over the ranks.

Scope: pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from ...core.histogram import BUCKET_MIN_S
from .charts import WIDTH, bars
from .elements import Element

__all__ = ["by_rank", "histogram_bars", "in_groups_of_ranks", "seconds_text"]

_BARS = 128


def histogram_bars(
    counts: Sequence[int], noun: str, *, width: float = WIDTH, colour: str
) -> Element | None:
    """How many of what ``noun`` names took up to how long; None where nothing was counted."""
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
    """A bar for each rank; of many, one for several, as high as the largest of them. ``said``: what
    the bar of a rank says when pointed at."""
    drawn = []
    for group in in_groups_of_ranks(list(values), _BARS):
        largest = max(group, key=values.__getitem__)
        drawn.append((str(group[0]), values[largest], f"rank {largest}: {said(largest)}"))
    return bars(drawn, unit, width=width, colour=colour)


def in_groups_of_ranks(ranks: Sequence[int], most: int) -> list[Sequence[int]]:
    """Neighbours together, in ``most`` groups or fewer."""
    size = math.ceil(len(ranks) / most) or 1
    return [ranks[first : first + size] for first in range(0, len(ranks), size)]


def seconds_text(seconds: float) -> str:
    """A short time, in the unit that suits it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
