"""The sentences and figures of a report, for terminals and pages, also beside a result of
``holdfast bench``.

Scope: pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...bench.measured.result import WRITE_LIMIT, Measurement
from ...core.units import size_text
from ...storage.format.save_telemetry import SaveTelemetry
from ...storage.operations.reporting.findings import Cause, Straggler, retries_of
from ..tables import NONE
from ..text import one_of, ranks_text, time_text

SAVE = "save"
_RECURRING_SHOWN = 3


@dataclass(frozen=True)
class Against:
    """A baseline. ``measured`` has a phase "save"; results without one are refused on reading."""

    measured: Measurement

    def share(self, save: SaveTelemetry, name: str = SAVE) -> float | None:
        """Return the rate of ``save`` as a share of the rate of a measured phase; None if the phase
        was not measured."""
        phase = self.measured.by_name.get(name)
        if phase is None or save.seconds <= 0:
            return None
        return nbytes_of(save) / save.seconds / phase.rate

    def words(self, save: SaveTelemetry) -> str:
        """Return both shares in words, with anything that limits the comparison."""
        said = [
            f"{share:.0%} of the {self.measured.by_name[name].rate / 1e9:.2f} GB/s of {name}"
            for name in (SAVE, WRITE_LIMIT)
            if (share := self.share(save, name)) is not None
        ]
        ranks = self.measured.config.get("ranks", 1)
        if ranks != save.world:
            said.append(f"measured with {one_of(ranks, 'rank')}")
        if self.measured.invalid:
            said.append("the measurement is marked as INVALID")
        return "; ".join(said)


def words(slow: Straggler) -> str:
    """Describe a straggler in one sentence."""
    if slow.cause is Cause.LATE:
        return f"rank {slow.rank}: {slow.cause}: {slow.detail}"
    if slow.factor is None:
        times = f"{slow.excess_s:.2f} s longer than is typical"
    else:
        times = f"{slow.factor:.1f} times the typical {slow.typical_s:.2f} s"
    text = f"rank {slow.rank}: {slow.cause}: {slow.stage} took {slow.seconds:.2f} s, {times}"
    if slow.also:
        text += f"; also {', '.join(slow.also)}"
    if slow.detail:
        text += f"; {slow.detail}"
    return text


def recurring(found: Sequence[Sequence[Straggler]], saves: int) -> list[str]:
    """Return which ranks cost the run the most time, and why: at most three lines, worst first.
    ``found`` holds the stragglers of each save."""
    lost_s: dict[str, list[float]] = {}
    for slow in (slow for each in found for slow in each):
        lost_s.setdefault(f"rank {slow.rank}: {slow.cause}", []).append(slow.excess_s)
    worst = sorted(lost_s.items(), key=lambda item: -sum(item[1]))[:_RECURRING_SHOWN]
    return [
        f"{name}, {sum(each):.2f} s lost in {len(each)} of {one_of(saves, 'save')}"
        for name, each in worst
    ]


def all_facts(save: SaveTelemetry, against: Against | None) -> dict[str, str]:
    """Return the main facts about a save, by name, with its comparison to the baseline if there is
    one."""
    nbytes = nbytes_of(save)
    ranks = f"{save.world}"
    if len(save.ranks) != save.world:
        ranks += f", of which {len(save.ranks)} recorded"
    said = {
        "step": NONE if save.step is None else str(save.step),
        "saved": time_text(save.created_s),
        "ranks": ranks,
        "took": f"{save.seconds:.2f} s, {size_text(nbytes)}, {rate_text(nbytes, save.seconds)}",
        "retries": str(sum(map(retries_of, save.ranks.values()))),
    }
    if borrowed := borrowed_words(save):
        said["borrowed"] = borrowed
    if against is not None:
        said["bench"] = against.words(save)
    return said


def nbytes_of(save: SaveTelemetry) -> int:
    """Return the bytes of all images."""
    return sum(record.nbytes for record in save.ranks.values())


def borrowed_words(save: SaveTelemetry) -> str:
    """Return how much an incremental save has borrowed, and why some ranks wrote everything; "" for
    any other save."""
    records = save.ranks.values()
    borrowed = sum(record.borrowed_nbytes for record in records)
    reasons: dict[str, list[int]] = {}
    for record in records:
        if record.why_whole:
            reasons.setdefault(record.why_whole, []).append(record.rank)
    said = [
        why if len(ranks) == len(records) else f"{ranks_text(ranks)}: {why}"
        for why, ranks in reasons.items()
    ]
    if borrowed or said:
        said.insert(0, size_text(borrowed))
    return "; ".join(said)


def rate_text(nbytes: float, seconds: float) -> str:
    """Return a rate as text. If seconds are summed over ranks, it is the rate of one rank."""
    if not nbytes or seconds <= 0:
        return NONE
    return f"{size_text(int(nbytes / seconds))}/s"
