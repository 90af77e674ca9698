"""An HTML page for a measurement of a driver alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...bench.alone.result import RAW, DriverMeasurement, PointResult
from ...core.histogram import BUCKET_MIN_S
from ...core.units import exact_size_text, size_text
from ..page.charts import Cell, bars, heat_map
from ..page.elements import Element, element, page, table
from ..text import time_text
from .driver_tables import (
    LATENCY_TITLES,
    by_operation,
    concurrencies_of,
    driver_invalid_lines,
    grid_rows,
    latency_rows,
    rate_text,
    seconds_text,
)

__all__ = ["driver_page"]

_CHART_WIDTH = 560


def driver_page(found: DriverMeasurement) -> str:
    """Return the page as HTML."""
    return page(
        f"The driver alone on {found.uri}",
        element("h1", found.uri),
        element("p", "Measured with the driver alone, without checkpoints.", class_="soft"),
        *_facts(found),
        *_invalid(found),
        *_rates(found),
        element("h2", "Latency of operations"),
        table(LATENCY_TITLES, list(latency_rows(found)), ("point",)),
        *_histograms(found),
    )


def _facts(found: DriverMeasurement) -> Iterator[Element]:
    facts = {
        "measured": time_text(found.created_s),
        "size": size_text(found.config["nbytes"]),
        "rounds": str(found.config["runs"]),
        **found.machine,
    }
    pairs = [element("div", element("dt", n), element("dd", fact)) for n, fact in facts.items()]
    yield element("dl", *pairs)


def _invalid(found: DriverMeasurement) -> Iterator[Element]:
    lines = [element("li", line, class_="alarm") for line in driver_invalid_lines(found)]
    if lines:
        yield element("ul", *lines)


def _rates(found: DriverMeasurement) -> Iterator[Element]:
    if found.workload != RAW:
        return
    for operation, points in by_operation(found).items():
        yield element("h2", f"{operation.capitalize()}: GB/s by part size and concurrency")
        yield element("p", "Darker is faster. Columns: concurrency.", class_="soft")
        yield _heat(found, points)


def _heat(found: DriverMeasurement, points: Sequence[PointResult]) -> Element:
    fastest = max(point.rate for point in points)
    rows = [
        (name, [_cell(found, point, point.rate / fastest) for point in row])
        for name, row in grid_rows(points)
    ]
    columns = list(map(str, concurrencies_of(points)))
    return heat_map(columns, rows, names_nchars=max(map(len, columns)))


def _cell(found: DriverMeasurement, point: PointResult, heat: float) -> Cell:
    tip = (
        f"{point.operation}, parts of {exact_size_text(point.part_nbytes)}, {point.concurrency} "
        f"at a time: {rate_text(found, point)}; a part took {seconds_text(point.latency.p50_s)} "
        f"(p50), {seconds_text(point.latency.p99_s)} (p99)"
    )
    return Cell(heat, f"{point.rate / 1e9:.3g}", tip)


def _histograms(found: DriverMeasurement) -> Iterator[Element]:
    yield element("h2", "Latency histograms")
    yield element("p", "Operations by the upper bound of their latency.", class_="soft")
    by_name = {id(point): name for name, point in found.points.items()}
    for number, (operation, points) in enumerate(by_operation(found).items()):
        figures = [
            element("figure", element("figcaption", by_name[id(point)]), _histogram(point))
            for point in points
        ]
        details = element(
            "details", element("summary", operation), element("div", *figures, class_="charts")
        )
        if number == 0:
            details.set("open", "open")
        yield details


def _histogram(point: PointResult) -> Element:
    counts = point.latency.histogram
    counted = [number for number, count in enumerate(counts) if count]
    values = []
    for number in range(counted[0], counted[-1] + 1):
        upper = seconds_text(BUCKET_MIN_S * 2.0**number)
        values.append((upper, float(counts[number]), f"{counts[number]:,} took up to {upper}"))
    return bars(values, "", width=_CHART_WIDTH, colour="storage")
