"""A result of ``holdfast bench`` as a page for a browser."""

from __future__ import annotations

from collections.abc import Iterator

from ...bench.measured.result import LIMITS, Measurement
from ...core.units import size_text
from ..page.charts import bars, curve
from ..page.elements import Element, element, page, table
from ..text import time_text
from .tables import PHASE_TITLES, invalid_lines, phase_rows

__all__ = ["measurement_page"]


def measurement_page(found: Measurement) -> str:
    """The page."""
    return page(
        f"What {found.uri} gives checkpoints",
        element("h1", found.uri),
        element("p", "What this storage gives checkpoints, measured.", class_="soft"),
        *_facts(found),
        *_invalid(found),
        *_rates(found),
        element("h2", "Phases"),
        table(PHASE_TITLES, list(phase_rows(found)), ("phase",)),
        *_rounds(found),
    )


def _facts(found: Measurement) -> Iterator[Element]:
    facts = {
        "measured": time_text(found.created_s),
        "saved": str(found.config.get("workload", "unknown")),
        "size": size_text(found.config["nbytes"]),
        "rounds": str(found.config["runs"]),
        **found.machine,
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
        "Bytes of all rounds by the time of all rounds. Alone: the driver, without checkpoints.",
        class_="soft",
    )
    values = []
    for phase in found.phases:
        if phase.name == "delete":
            continue
        share = found.share(phase.name)
        tip = f"{phase.name}: {phase.rate / 1e9:.3f} GB/s"
        if share is not None:
            tip += f", {share:.0%} of {LIMITS[phase.name]}"
        values.append((phase.name, phase.rate / 1e9, tip))
    yield bars(values, "GB/s", colour="storage")


def _rounds(found: Measurement) -> Iterator[Element]:
    figures = [
        element(
            "figure",
            element("figcaption", f"{phase.name}: seconds, round by round"),
            curve([(n, s, f"round {n}: {s:.3f} s") for n, s in enumerate(phase.seconds, 1)], "s"),
        )
        for phase in found.phases
        if len(phase.seconds) > 1
    ]
    if figures:
        yield element("h2", "Rounds")
        yield element("div", *figures, class_="charts")
