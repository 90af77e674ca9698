"""Results of ``holdfast bench`` as tables and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from ...bench.measured.result import (
    DELETING,
    LIMITS,
    NOTHING,
    QUANTILES,
    Compared,
    Measurement,
    Phase,
)
from ...core.units import exact_size_text, size_text
from ..commands import print_json
from ..page.charts import seconds_text
from ..tables import NONE, Table
from ..text import paint, printable

_LINES = 12
"""Number of reasons for invalid figures to print at most."""


def print_measurement(found: Measurement) -> None:
    """Print the machine, the phases, their costs, and why figures are invalid."""
    print(f"{printable(found.uri)}: {_what(found)} in each phase")
    print(paint(f"saved: {printable(str(found.config.get('workload', 'unknown')))}", "dim"))
    print(paint(", ".join(f"{name}: {what}" for name, what in found.machine.items()), "dim"))
    for name, client in found.limits.items():
        print(paint(f"{name}: {client}", "dim"))
    print()
    for operation, (columns, rows) in grids(found).items():
        title = f"{operation}, GB/s by part size and concurrency"
        figures = [[name, *(f"{phase.rate / 1e9:.3g}" for phase in row)] for name, row in rows]
        Table(title, ("part", *columns), figures, ("part",)).print()
    phases_table(found).print()
    costs_table(found).print()
    for line in invalid_lines(found):
        print(paint(printable(line), "red"))
    for note in found.notes:
        print(f"NOTE: {printable(note)}")


def _what(found: Measurement) -> str:
    size = size_text(found.config["nbytes"])
    ranks = found.config.get("ranks", 1)
    return size if ranks == 1 else f"{size} of {ranks} ranks"


_Grid = tuple[Sequence[str], Sequence[tuple[str, Sequence[Phase]]]]
"""Columns, and rows with their names."""


def grids(found: Measurement) -> dict[str, _Grid]:
    """Return, for each operation of a driver alone, its phases by part size and concurrency."""
    points: Mapping[str, Mapping[str, int | str]] = found.config.get("points", {})
    operations: dict[str, _Grid] = {}
    for operation in dict.fromkeys(point["operation"] for point in points.values()):
        cells = {
            (int(point["part_nbytes"]), int(point["concurrency"])): found.by_name[name]
            for name, point in points.items()
            if point["operation"] == operation
        }
        widths = sorted({width for _, width in cells})
        rows = [
            (exact_size_text(nbytes), [cells[nbytes, width] for width in widths])
            for nbytes in sorted({nbytes for nbytes, _ in cells})
        ]
        operations[str(operation)] = (list(map(str, widths)), rows)
    return operations


def phases_table(found: Measurement) -> Table:
    """Return a row for each phase: its times, and its rate beside the limit."""
    titles = ("phase", "median", "from", "to", "first rank", "rate", "of the limit")
    return Table("phases", titles, list(_phase_rows(found)), ("phase",))


def _phase_rows(found: Measurement) -> Iterator[tuple[str, ...]]:
    for phase in found.phases:
        share = found.share(phase.name)
        yield (
            phase.name,
            f"{phase.median_s:.3f} s",
            f"{min(phase.seconds):.3f} s",
            f"{max(phase.seconds):.3f} s",
            f"{phase.first_s:.3f} s",
            NONE if phase.name in DELETING else rate_text(phase),
            NONE if share is None else f"{share:.0%}",
        )


def rate_text(phase: Phase) -> str:
    """Return the rate of a phase as text."""
    return f"{phase.rate / 1e9:.3f} GB/s"


def costs_table(found: Measurement) -> Table:
    """Return a row for each phase: its use of the machine and of the storage. The quantiles are
    latencies of written parts or read ranges."""
    titles = ("phase", "stall", "CPU/GiB", "memory", "requests", "retries", *QUANTILES)
    return Table("costs", titles, [_cost_row(found, phase) for phase in found.phases], ("phase",))


def _cost_row(found: Measurement, phase: Phase) -> tuple[str, ...]:
    cpu_s = phase.cpu_s_per_gib
    requests = sum(operations.count for operations in phase.operations.values())
    data = phase.data_operations
    latencies_s = (data or NOTHING).quantiles_s.values()
    return (
        phase.name,
        f"{median(phase.stall_s):.3f} s" if phase.stall_s else NONE,
        NONE if cpu_s is None else f"{cpu_s:.2f} s",
        size_text(max(phase.peak_nbytes)) if phase.peak_nbytes else NONE,
        f"{requests / len(phase.seconds):.0f}" if phase.operations else NONE,
        str(phase.retries) if phase.name in LIMITS else NONE,
        *(NONE if data is None else seconds_text(latency_s) for latency_s in latencies_s),
    )


def invalid_lines(found: Measurement) -> list[str]:
    """Return a line for each reason why figures are invalid. Several phases may share a reason."""
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
    return f"{names[0]} and {len(names) - 1} others"


def print_comparison(found: Sequence[Compared], part: float, *, json_output: bool) -> None:
    """Print each phase that both results have, as a table or as one JSON document."""
    slower = [each.name for each in found if each.is_slower(part)]
    if json_output:
        phases = [
            {
                "name": each.name,
                "a_median_s": each.a.median_s,
                "b_median_s": each.b.median_s,
                "ratio": each.ratio,
                "low": each.low,
                "high": each.high,
                "verdict": each.verdict,
            }
            for each in found
        ]
        print_json({"slower": slower, "phases": phases})
        return
    rows = [
        (
            each.name,
            f"{each.a.median_s:.3f} s",
            f"{each.b.median_s:.3f} s",
            f"{each.ratio:.3f} ×",
            f"{each.low:.3f}",
            f"{each.high:.3f}",
            each.verdict,
        )
        for each in found
    ]
    titles = ("phase", "A", "B", "B is", "from", "to", "verdict")
    title = "Speed of B relative to A, with 95 % confidence"
    Table(title, titles, rows, ("phase", "verdict")).print()
    for name in slower:
        print(paint(f"{name}: B is slower by more than {part:.0%}", "red"))
