"""Tables, lines and CSV for a measurement of a driver alone."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence

from ...bench.alone.result import RAW, DriverMeasurement, PointResult
from ...core.units import exact_size_text, size_text
from ..tables import print_table
from ..text import paint, printable
from .heat import print_heat

__all__ = [
    "LATENCY_TITLES",
    "by_operation",
    "concurrencies_of",
    "driver_csv",
    "driver_invalid_lines",
    "grid_rows",
    "latency_rows",
    "print_driver",
    "rate_text",
    "seconds_text",
]

LATENCY_TITLES = ("point", "median", "rate", "p50", "p90", "p99", "longest")
_RATE_UNIT = 1e9
_LINES = 12
"""Number of reasons for invalid figures to print at most."""


def print_driver(found: DriverMeasurement) -> None:
    """Print the machine, the rates over the grid, the latencies, and why figures are invalid."""
    print(f"{printable(found.uri)}: {_what(found)}")
    print(paint(", ".join(f"{name}: {what}" for name, what in found.machine.items()), "dim"))
    print()
    if found.workload == RAW:
        for operation, points in by_operation(found).items():
            columns = concurrencies_of(points)
            print_heat(
                f"{operation}, GB/s by part size and concurrency",
                "part",
                list(map(str, columns)),
                [
                    (name, [point.rate / _RATE_UNIT for point in row])
                    for name, row in grid_rows(points)
                ],
            )
    print_table("latency of operations", LATENCY_TITLES, list(latency_rows(found)), ("point",))
    for line in driver_invalid_lines(found):
        print(paint(printable(line), "red"))


def _what(found: DriverMeasurement) -> str:
    if found.workload == RAW:
        return f"the driver alone, {size_text(found.config['nbytes'])} at each point"
    objects = found.config["objects"]
    return f"the driver alone, {objects:,} objects of {size_text(found.config['nbytes'])}"


def by_operation(found: DriverMeasurement) -> dict[str, list[PointResult]]:
    """Return the points of each operation, in order."""
    operations: dict[str, list[PointResult]] = {}
    for point in found.points.values():
        operations.setdefault(point.operation, []).append(point)
    return operations


def concurrencies_of(points: Sequence[PointResult]) -> list[int]:
    """Return the columns of a grid."""
    return sorted({point.concurrency for point in points})


def grid_rows(points: Sequence[PointResult]) -> Iterator[tuple[str, list[PointResult]]]:
    """Yield the rows of a grid: a part size as text, and its points ordered by concurrency."""
    for part_nbytes in sorted({point.part_nbytes for point in points}):
        row = [point for point in points if point.part_nbytes == part_nbytes]
        yield exact_size_text(part_nbytes), sorted(row, key=lambda point: point.concurrency)


def latency_rows(found: DriverMeasurement) -> Iterator[tuple[str, ...]]:
    """Yield a table row for each point."""
    for name, point in found.points.items():
        latency = point.latency
        yield (
            name,
            f"{point.median_s:.3f} s",
            rate_text(found, point),
            seconds_text(latency.p50_s),
            seconds_text(latency.p90_s),
            seconds_text(latency.p99_s),
            seconds_text(latency.max_s),
        )


def rate_text(found: DriverMeasurement, point: PointResult) -> str:
    """Return a rate as text: bytes, keys or operations per second."""
    if found.workload == RAW:
        return f"{point.rate / _RATE_UNIT:.3f} GB/s"
    if point.operation == "list":
        return f"{point.rate:,.0f} keys/s"
    return f"{point.rate:,.0f} /s"


def seconds_text(seconds: float) -> str:
    """Return a duration in the unit that shows three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def driver_invalid_lines(found: DriverMeasurement) -> list[str]:
    """Return a line for each reason why figures are invalid. Several points may share a reason."""
    names: dict[str, list[str]] = {}
    for name, reasons in found.invalid.items():
        for reason in reasons:
            names.setdefault(reason, []).append(name or "all of it")
    lines = [f"INVALID: {_some(shared)}: {reason}" for reason, shared in names.items()]
    if len(lines) > _LINES:
        left_out = len(lines) - _LINES
        lines[_LINES:] = [f"INVALID: {left_out} more reasons, which --json lists"]
    return lines


def _some(names: Sequence[str]) -> str:
    if len(names) < 4:
        return ", ".join(names)
    return f"{names[0]} and {len(names) - 1} other points"


def driver_csv(found: DriverMeasurement) -> str:
    """Return a CSV line for each round of each point, below a line of titles."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(
        (
            "operation",
            "part_nbytes",
            "concurrency",
            "round",
            "amount",
            "seconds",
            "p50_s",
            "p90_s",
            "p99_s",
            "max_s",
        )
    )
    for point in found.points.values():
        latency = point.latency
        for number, seconds in enumerate(point.seconds, 1):
            lines.writerow(
                (
                    point.operation,
                    point.part_nbytes,
                    point.concurrency,
                    number,
                    point.amount,
                    seconds,
                    latency.p50_s,
                    latency.p90_s,
                    latency.p99_s,
                    latency.max_s,
                )
            )
    return text.getvalue()
