"""Judges whether figures are valid.

Scope: pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from .result import DELETING, Phase

__all__ = ["LEAST_S", "joined", "reasons_against"]

LEAST_S = 0.1
"""Shortest valid round. Shorter ones measure overhead, not the storage."""
SPREAD = 1.5
"""Greatest valid ratio of the longest round to the shortest."""
DRIFT = 1.25
"""Greatest valid ratio between the two halves of the rounds."""
BUSY = 0.2
"""Greatest valid share of busy processors before the measurement."""
COLD = 0.9
"""Smallest valid share of a load's bytes that come from the device."""


def reasons_against(
    phases: Sequence[Phase],
    *,
    busy_before: float,
    cold_shares: Mapping[str, float],
    least_s: float = LEAST_S,
) -> dict[str, tuple[str, ...]]:
    """Return the reasons why figures are invalid, by phase, or under ``""`` for all.

    ``busy_before`` is the share of processors that were busy before the measurement.
    ``cold_shares`` maps reading phases to the smallest share that came from the device in a round,
    where that is known. Rounds shorter than ``least_s`` are too short.
    """
    found = {
        phase.name: tuple(_of_phase(phase, least_s))
        for phase in phases
        if phase.name not in DELETING
    }
    for name, share in cold_shares.items():
        if share < COLD:
            found[name] = (*found[name], f"{1 - share:.0%} of it came from a cache")
    if busy_before > BUSY:
        found[""] = (f"{busy_before:.0%} of the processors were busy before it began",)
    return {name: reasons for name, reasons in found.items() if reasons}


def joined(*found: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Join the reasons of several checks, by phase."""
    names = dict.fromkeys(name for each in found for name in each)
    return {name: tuple(why for each in found for why in each.get(name, ())) for name in names}


def _of_phase(phase: Phase, least_s: float) -> Iterator[str]:
    seconds = phase.seconds
    if phase.median_s < least_s:
        yield f"too short: {phase.median_s:.3f} s; give a larger --size"
    if len(seconds) < 3:
        yield f"only {len(seconds)} rounds"
        return
    if max(seconds) > SPREAD * min(seconds):
        yield f"rounds took from {min(seconds):.2f} to {max(seconds):.2f} s"
    half = len(seconds) // 2
    first, last = median(seconds[:half]), median(seconds[-half:])
    if max(first, last) > DRIFT * min(first, last) and len(seconds) >= 4:
        yield f"times drift: {first:.2f} s in the first half, {last:.2f} s in the second"
