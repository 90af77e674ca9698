"""Storage operations of a phase, as counted by the metrics layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...core.histogram import BUCKETS, quantile_s
from ...drivers.layers.metrics import snapshots

__all__ = ["Counts", "Operations", "count_now", "operations_of", "since"]

Counts = dict[str, tuple[int, int, list[int]]]
"""Count, bytes and latency histogram of each driver operation, by name."""


@dataclass(frozen=True)
class Operations:
    """Operations of one kind over all ranks and rounds, such as writes of parts.

    ``histogram[i]`` counts those that took up to ``2**i`` units of 2⁻²⁰ s, about a microsecond.
    """

    count: int
    nbytes: int
    histogram: tuple[int, ...]

    def quantile_s(self, part: float) -> float:
        """Return a latency quantile, ``part`` from 0 to 1. It is the end of a bucket, so it may be
        too high by up to a factor of 2."""
        return quantile_s(self.histogram, part)


def count_now() -> Counts:
    """Return the counts of this process so far, over all storages with the option ``metrics``."""
    found: Counts = {}
    for snapshot in snapshots().values():
        for name, seen in snapshot.operations.items():
            found[name] = _sum(found.get(name), (seen.count, seen.nbytes, list(seen.histogram)))
    return found


def _sum(
    a: tuple[int, int, list[int]] | None, b: tuple[int, int, list[int]]
) -> tuple[int, int, list[int]]:
    if a is None:
        return b
    return a[0] + b[0], a[1] + b[1], [x + y for x, y in zip(a[2], b[2], strict=True)]


def since(before: Counts, now: Counts) -> Counts:
    """Return the counts between two snapshots."""
    nothing = (0, 0, [0] * BUCKETS)
    found: Counts = {}
    for name, (count, nbytes, histogram) in now.items():
        counted, moved, buckets = before.get(name, nothing)
        if count > counted:
            grown = [x - y for x, y in zip(histogram, buckets, strict=True)]
            found[name] = (count - counted, nbytes - moved, grown)
    return found


def operations_of(counts: Iterable[Counts]) -> Mapping[str, Operations]:
    """Add up counts, by operation."""
    together: Counts = {}
    for each in counts:
        for name, (count, nbytes, histogram) in each.items():
            together[name] = _sum(together.get(name), (count, nbytes, list(histogram)))
    return {
        name: Operations(count, nbytes, tuple(histogram))
        for name, (count, nbytes, histogram) in sorted(together.items())
    }
