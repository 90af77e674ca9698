"""An HTML page for a result of ``holdfast bench``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import median

from ...bench.measured.result import BY_ONE_RANK, DELETING, Measurement, Phase, limit_of_phase
from ...core.units import size_text
from ..page.charts import bars, curve
from ..page.elements import Element, element, page, table
from ..page.spread import by_rank, histogram_bars
from ..text import time_text
from .tables import COST_TITLES, PHASE_TITLES, cost_rows, invalid_lines, phase_rows

__all__ = ["measurement_page"]


def measurement_page(found: Measurement) -> str:
    """Return the page as HTML."""
    return page(
        f"Checkpoints on {found.uri}",
        element("h1", found.uri),
        element("p", "Measured with checkpoints on this storage.", class_="soft"),
        *_facts(found),
        *_invalid(found),
        *_rates(found),
        element("h2", "Phases"),
        table(PHASE_TITLES, list(phase_rows(found)), ("phase",)),
        element("h2", "Costs"),
        table(COST_TITLES, list(cost_rows(found)), ("phase",)),
        *_rounds(found),
        *_latencies(found),
        *_ranks(found),
    )


def _facts(found: Measurement) -> Iterator[Element]:
    facts = {
        "measured": time_text(found.created_s),
        "saved": str(found.config.get("workload", "unknown")),
        "size": size_text(found.config["nbytes"]),
        "rounds": str(found.config["runs"]),
        **found.machine,
        **found.limits,
    }
    pairs = [element("div", element("dt", n), element("dd", fact)) for n, fact in facts.items()]
    yield element("dl", *pairs)


def _invalid(found: Measurement) -> Iterator[Element]:
    lines = [element("li", line, class_="alarm") for line in invalid_lines(found)]
    lines += [element("li", note) for note in found.notes]
    if lines:
        yield element("ul", *lines)


def _rates(found: Measurement) -> Iterator[Element]:
    yield element("h2", "Rates")
    yield element(
        "p",
        "Bytes per second over all rounds. The limit is measured with a bare client; alone is our "
        "driver without checkpoints.",
        class_="soft",
    )
    values = []
    for phase in found.phases:
        if phase.name in DELETING:
            continue
        share = found.share(phase.name)
        tip = f"{phase.name}: {phase.rate / 1e9:.3f} GB/s"
        if share is not None:
            tip += f", {share:.0%} of the {limit_of_phase(phase.name)}"
        values.append((phase.name, phase.rate / 1e9, tip))
    yield bars(values, "GB/s", colour="storage")


def _rounds(found: Measurement) -> Iterator[Element]:
    yield from _charts(
        "Rounds",
        "GB/s of all ranks together, by round.",
        [(phase.name, _rates_over_time(phase)) for phase in found.phases],
    )


def _rates_over_time(phase: Phase) -> Element | None:
    if len(phase.seconds) == 1:
        return None
    rates = [phase.nbytes / seconds / 1e9 for seconds in phase.seconds]
    points = [(n, rate, f"round {n}: {rate:.3f} GB/s") for n, rate in enumerate(rates, 1)]
    return curve(points, "GB/s")


def _latencies(found: Measurement) -> Iterator[Element]:
    yield from _charts(
        "Latency of parts and ranges",
        "Writes of parts and reads of ranges over all ranks and rounds, by the upper bound of "
        "their latency.",
        [(phase.name, _histogram(phase)) for phase in found.phases],
    )


def _histogram(phase: Phase) -> Element | None:
    operations = phase.data_operations
    if operations is None:
        return None
    return histogram_bars(operations.histogram, "operations", width=560, colour="storage")


def _ranks(found: Measurement) -> Iterator[Element]:
    yield from _charts(
        "Ranks",
        "Time until each rank was done, median of the rounds.",
        [(phase.name, _by_rank(phase)) for phase in found.phases],
    )


def _by_rank(phase: Phase) -> Element | None:
    if phase.name in BY_ONE_RANK or not phase.ranks_s or len(phase.ranks_s[0]) == 1:
        return None
    seconds = {rank: median(of) for rank, of in enumerate(zip(*phase.ranks_s, strict=True))}
    return by_rank(seconds, "s", lambda rank: f"{seconds[rank]:.3f} s", width=560, colour="ranks")


def _charts(
    title: str, note: str, drawn: Iterable[tuple[str, Element | None]]
) -> Iterator[Element]:
    figures = [
        element("figure", element("figcaption", name), chart)
        for name, chart in drawn
        if chart is not None
    ]
    if figures:
        yield element("h2", title)
        yield element("p", note, class_="soft")
        yield element("div", *figures, class_="charts")
