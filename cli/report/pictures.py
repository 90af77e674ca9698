"""The charts of a report: ranks over time, stages by rank, and bytes by rank.

Scope: pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...core.spans import StageReport
from ...core.units import size_text
from ...storage.format.save_telemetry import RankTelemetry, SaveTelemetry
from ...storage.operations.reporting.findings import CALL, Straggler
from ..page.charts import (
    Bar,
    Cell,
    Lane,
    by_rank,
    heat_map,
    histogram_bars,
    in_groups_of_ranks,
    timeline,
)
from ..page.elements import Element
from .rows import stage_names

COLOURS = (
    ("capture", "copies from devices and in memory"),
    ("processor", "checksums, compression, planning"),
    ("storage", "storage"),
    ("ranks", "communication between ranks"),
    ("prepare", "wait before the start"),
)
"""Classes of the page's style, and their meanings."""

_COLOUR_OF = {
    "capture": "capture",
    "device_copy": "capture",
    "flatten": "processor",
    "plan": "processor",
    "hash": "processor",
    "pack": "processor",
    "merge": "processor",
    "wait": "prepare",
}
_WAITING = 0.1
_WAITING_COLOURS = ("ranks", "prepare")
_LANES = 24
_HEAT_ROWS = 64
_LEAST_PART = 0.002
"""Share of a save. Stages below it on every rank get no column in the heat map."""


def ranks_over_time(save: SaveTelemetry, found: Sequence[Straggler]) -> tuple[Element, int]:
    """Draw a lane for each rank, and return the chart with the number of omitted ranks. If there
    are too many, show the outliers and an even sample of the rest."""
    shown = _chosen(list(save.ranks), {slow.rank for slow in found}, _LANES)
    marked = {slow.rank for slow in found}
    lanes = [
        Lane(f"rank {rank}", list(_bars(save, save.ranks[rank])), rank in marked) for rank in shown
    ]
    length_s = max((bar.stop for lane in lanes for bar in lane.bars), default=0.0)
    return timeline(lanes, length_s, "s"), len(save.ranks) - len(shown)


def _chosen(ranks: Sequence[int], first: set[int], most: int) -> list[int]:
    chosen = [rank for rank in ranks if rank in first][:most]
    others = [rank for rank in ranks if rank not in first]
    count = min(len(others), most - len(chosen))
    chosen += [others[number * len(others) // count] for number in range(count)]
    return sorted(chosen)


def _bars(save: SaveTelemetry, record: RankTelemetry) -> Iterator[Bar]:
    called_s = save.called_s[record.rank]
    for name, stage in record.stages.items():
        yield Bar(
            name,
            called_s + stage.first_s,
            called_s + stage.last_s,
            _colour(name),
            _strength(name, stage),
            _tip(f"rank {record.rank}, {name}", stage),
        )


def _strength(name: str, stage: StageReport) -> float:
    """Return the busy share of the time between a stage's first and last operation. Ranks mostly
    wait in a round, so rounds are pale."""
    length_s = stage.last_s - stage.first_s
    if _colour(name) == "ranks":
        return _WAITING
    if length_s <= 0:
        return 1.0
    return stage.busy_s / length_s


def _colour(stage: str) -> str:
    if stage.startswith("round "):
        return "ranks"
    return _COLOUR_OF.get(stage, "storage")


def _tip(what: str, stage: StageReport) -> str:
    text = f"{what}: busy for {stage.busy_s:.3f} s between {stage.first_s:.3f} and "
    text += f"{stage.last_s:.3f} s after its call; {stage.count:,} operations"
    if stage.nbytes:
        text += f", {size_text(stage.nbytes)}"
    if stage.retries or stage.hedges:
        text += f", {stage.retries + stage.hedges} requests retried"
    if stage.throttled_s:
        text += f", throttled for {stage.throttled_s:.2f} s"
    if stage.last_rank is not None:
        text += f"; rank {stage.last_rank} came last"
    return text


def heat(save: SaveTelemetry, found: Sequence[Straggler]) -> Element:
    """Draw a heat map of ranks by stages. With many ranks, several share a row, which shows the
    slowest of them. Waiting stages have figures, but no heat."""
    busy_s = {
        name: {r: rec.stages[name].busy_s for r, rec in save.ranks.items() if name in rec.stages}
        for name in stage_names(save)
    }
    least_s = _LEAST_PART * save.seconds
    names = [name for name, by_rank in busy_s.items() if max(by_rank.values()) >= least_s]
    working = [name for name in names if _colour(name) not in _WAITING_COLOURS]
    hottest_s = max((max(busy_s[name].values()) for name in working), default=0.0)
    marked = {(slow.rank, stage) for slow in found for stage in (slow.stage, *slow.also)}
    rows = []
    for group in in_groups_of_ranks(list(save.ranks), _HEAT_ROWS):
        cells = [_cell(name, busy_s[name], group, hottest_s, marked) for name in names]
        rows.append((_group_name(group, {r for r, stage in marked if stage == CALL}), cells))
    return heat_map(names, rows)


def _cell(
    name: str,
    busy_s: dict[int, float],
    group: Sequence[int],
    hottest_s: float,
    marked: set[tuple[int, str]],
) -> Cell:
    slowest = max(group, key=lambda rank: busy_s.get(rank, -1.0))
    if slowest not in busy_s:
        return Cell(0.0, "", f"rank {slowest}: no {name}")
    seconds = busy_s[slowest]
    return Cell(
        heat=seconds / hottest_s if hottest_s and _colour(name) not in _WAITING_COLOURS else 0.0,
        text=f"{seconds:.2f}",
        tip=f"rank {slowest}, {name}: {seconds:.3f} s",
        marked=any((rank, name) in marked for rank in group),
    )


def _group_name(group: Sequence[int], late: set[int]) -> str:
    name = f"rank {group[0]}"
    if len(group) > 1:
        name = f"ranks {group[0]}–{group[-1]}"
    if late.intersection(group):
        name += " (late)"
    return name


def bytes_by_rank(save: SaveTelemetry) -> Element:
    """Draw a bar for each rank. With many ranks, a bar stands for a group and shows its largest
    value."""
    images = {rank: record.nbytes for rank, record in save.ranks.items()}
    unit, divisor = _unit(max(images.values(), default=0))
    values = {rank: nbytes / divisor for rank, nbytes in images.items()}
    return by_rank(values, unit, lambda rank: size_text(images[rank]), colour="storage")


def _unit(nbytes: int) -> tuple[str, float]:
    for unit, divisor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= divisor:
            return unit, divisor
    return "bytes", 1.0


def write_latencies(save: SaveTelemetry) -> Element | None:
    """Draw the histogram of write latencies of all ranks; None if none were recorded."""
    stages = (record.stages.get("write") for record in save.ranks.values())
    histograms = [stage.histogram for stage in stages if stage is not None and stage.histogram]
    counts = [sum(column) for column in zip(*histograms, strict=True)]
    return histogram_bars(counts, "writes", width=720, colour="storage")
