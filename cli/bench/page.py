"""An HTML page for a result of ``holdfast bench``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

from ...bench.measured.result import BY_ONE_RANK, DELETING, Measurement, Phase, limit_of_phase
from ...core.units import size_text
from ..page.charts import Cell, bars, by_rank, curve, heat_map, histogram_bars, seconds_text
from ..page.elements import Element, element, facts, listed, page, section, shown_table
from ..text import time_text
from .tables import costs_table, grids, invalid_lines, phases_table, rate_text


def measurement_page(found: Measurement) -> str:
    """Return the page as HTML."""
    known = {
        "measured": time_text(found.created_s),
        "saved": str(found.config.get("workload", "unknown")),
        "size": size_text(found.config["nbytes"]),
        "rounds": str(found.config["runs"]),
        **found.machine,
        **found.limits,
    }
    return page(
        f"Checkpoints on {found.uri}",
        element("h1", found.uri),
        element("p", "Measured on this storage.", class_="soft"),
        facts(known),
        *listed(invalid_lines(found), found.notes),
        *_grids(found),
        *_rates(found),
        *shown_table(phases_table(found)),
        *shown_table(costs_table(found)),
        *_charts(found, "Rounds", "GB/s of all ranks together, by round.", _rates_over_time),
        *_charts(
            found,
            "Latency of operations",
            "Writes of parts and reads of ranges over all ranks and rounds, by the upper bound of "
            "their latency.",
            _histogram,
        ),
        *_charts(found, "Ranks", "Time until each rank was done, median of the rounds.", _by_rank),
    )


def _grids(found: Measurement) -> Iterator[Element]:
    for operation, (columns, rows) in grids(found).items():
        fastest = max(phase.rate for _, row in rows for phase in row)
        cells = [
            (name, [_cell(phase, phase.rate / fastest) for phase in row]) for name, row in rows
        ]
        yield from section(
            f"{operation.capitalize()}: GB/s by part size and concurrency",
            heat_map(columns, cells),
            note="Darker is faster. Columns: concurrency.",
        )


def _cell(phase: Phase, heat: float) -> Cell:
    tip = f"{phase.name}: {phase.rate / 1e9:.3f} GB/s"
    if phase.data_operations is not None:
        latency = phase.data_operations.quantiles_s
        tip += f"; a part took {seconds_text(latency['p50'])} (p50), "
        tip += f"{seconds_text(latency['p99'])} (p99)"
    return Cell(heat, f"{phase.rate / 1e9:.3g}", tip)


def _rates(found: Measurement) -> Iterator[Element]:
    if found.config.get("points"):
        return
    values = []
    for phase in found.phases:
        if phase.name in DELETING:
            continue
        share = found.share(phase.name)
        tip = f"{phase.name}: {rate_text(phase)}"
        if share is not None:
            tip += f", {share:.0%} of the {limit_of_phase(phase.name)}"
        values.append((phase.name, phase.rate / 1e9, tip))
    yield from section(
        "Rates",
        bars(values, "GB/s", colour="storage"),
        note="Bytes per second over all rounds. The limit is measured with a bare client; alone is "
        "our driver without checkpoints.",
    )


def _rates_over_time(phase: Phase) -> Element | None:
    if len(phase.seconds) == 1:
        return None
    rates = [phase.nbytes / seconds / 1e9 for seconds in phase.seconds]
    points = [(n, rate, f"round {n}: {rate:.3f} GB/s") for n, rate in enumerate(rates, 1)]
    return curve(points, "GB/s")


def _histogram(phase: Phase) -> Element | None:
    operations = phase.data_operations
    if operations is None:
        return None
    return histogram_bars(operations.histogram, "operations", width=560, colour="storage")


def _by_rank(phase: Phase) -> Element | None:
    if phase.name in BY_ONE_RANK or not phase.ranks_s or len(phase.ranks_s[0]) == 1:
        return None
    seconds = {rank: median(of) for rank, of in enumerate(zip(*phase.ranks_s, strict=True))}
    return by_rank(seconds, "s", lambda rank: f"{seconds[rank]:.3f} s", width=560, colour="ranks")


def _charts(
    found: Measurement, title: str, note: str, drawn: Callable[[Phase], Element | None]
) -> Iterator[Element]:
    charts = {phase.name: drawn(phase) for phase in found.phases}
    figures = [
        element("figure", element("figcaption", name), chart)
        for name, chart in charts.items()
        if chart is not None
    ]
    if figures:
        yield from section(title, element("div", *figures, class_="charts"), note=note)
