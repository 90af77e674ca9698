"""What was asked of the storage in a phase, as the layer of metrics has counted it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...core.histogram import BUCKETS, quantile_s
from ...drivers.layers.metrics import snapshots

__all__ = ["Counts", "Operations", "count_now", "operations_of", "since"]

Counts = dict[str, tuple[int, int, list[int]]]
"""By operation of a driver: how many, their bytes, and a histogram of how long they took."""


@dataclass(frozen=True)
class Operations:
    """Operations of one kind, of all ranks and rounds: such as parts that were written.
    ``histogram[i]`` counts those that took up to ``2**i`` microseconds (of 2⁻²⁰ s each)."""

    count: int
    nbytes: int
    histogram: tuple[int, ...]

    def quantile_s(self, part: float) -> float:
        """So long took ``part`` (0 to 1) of them, or less: the end of its bucket, so at most twice
        too much."""
        return quantile_s(self.histogram, part)


def count_now() -> Counts:
    """What this process has counted so far, of all storages whose option ``metrics`` is on."""
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
    """What was counted in between."""
    nothing = (0, 0, [0] * BUCKETS)
    found: Counts = {}
    for name, (count, nbytes, histogram) in now.items():
        counted, moved, buckets = before.get(name, nothing)
        if count > counted:
            grown = [x - y for x, y in zip(histogram, buckets, strict=True)]
            found[name] = (count - counted, nbytes - moved, grown)
    return found


def operations_of(counts: Iterable[Counts]) -> Mapping[str, Operations]:
    """All of them together, by operation."""
    together: Counts = {}
    for each in counts:
        for name, (count, nbytes, histogram) in each.items():
            together[name] = _sum(together.get(name), (count, nbytes, list(histogram)))
    return {
        name: Operations(count, nbytes, tuple(histogram))
        for name, (count, nbytes, histogram) in sorted(together.items())
    }
