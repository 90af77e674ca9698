"""Results of ``holdfast bench`` as tables, CSV and JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from statistics import median

from ...bench.measured.comparison import Compared
from ...bench.measured.result import DELETING, LIMITS, PERCENTS, Measurement, Phase
from ...core.units import size_text
from ..commands import print_json
from ..page.spread import seconds_text
from ..tables import print_table
from ..text import paint, printable

__all__ = [
    "COST_TITLES",
    "PHASE_TITLES",
    "cost_rows",
    "csv_text",
    "invalid_lines",
    "phase_rows",
    "print_comparison",
    "print_comparison_json",
    "print_measurement",
]

_NONE = "-"
PHASE_TITLES = ("phase", "median", "from", "to", "first rank", "rate", "of the limit")
COST_TITLES = (
    "phase",
    "stall",
    "CPU/GiB",
    "memory",
    "requests",
    "retries",
    *(f"p{percent}" for percent in PERCENTS),
    "USD",
)


def print_measurement(found: Measurement) -> None:
    """Print the machine, the phases, their costs, and why figures are invalid."""
    print(f"{printable(found.uri)}: {_what(found)} in each phase")
    print(paint(f"saved: {printable(str(found.config.get('workload', 'unknown')))}", "dim"))
    print(paint(", ".join(f"{name}: {what}" for name, what in found.machine.items()), "dim"))
    for name, client in found.limits.items():
        print(paint(f"{name}: {client}", "dim"))
    print()
    print_table("phases", PHASE_TITLES, list(phase_rows(found)), ("phase",))
    print_table("costs", COST_TITLES, list(cost_rows(found)), ("phase",))
    for line in invalid_lines(found):
        print(paint(line, "red"))
    for note in found.notes:
        print(f"NOTE: {printable(note)}")


def _what(found: Measurement) -> str:
    size = size_text(found.config["nbytes"])
    ranks = found.config["ranks"]
    if ranks == 1:
        return size
    return f"{size} of {ranks} ranks"


def phase_rows(found: Measurement) -> Iterator[tuple[str, ...]]:
    """Yield a row for each phase: its times and its rate."""
    for phase in found.phases:
        share = found.share(phase.name)
        yield (
            phase.name,
            f"{phase.median_s:.3f} s",
            f"{min(phase.seconds):.3f} s",
            f"{max(phase.seconds):.3f} s",
            f"{phase.first_s:.3f} s",
            _NONE if phase.name in DELETING else f"{phase.rate / 1e9:.3f} GB/s",
            _NONE if share is None else f"{share:.0%}",
        )


def cost_rows(found: Measurement) -> Iterator[tuple[str, ...]]:
    """Yield a row for each phase: its use of the machine and of the storage. The quantiles are
    latencies of written parts or read ranges."""
    for phase in found.phases:
        yield (
            phase.name,
            f"{median(phase.stall_s):.3f} s" if phase.stall_s else _NONE,
            _cpu(phase),
            size_text(max(phase.peak_nbytes)) if phase.peak_nbytes else _NONE,
            _requests(phase),
            str(phase.retries) if phase.name in LIMITS else _NONE,
            *_latencies(phase),
            _cost(found.cost_usd(phase)),
        )


def _cost(usd: float | None) -> str:
    return _NONE if usd is None else f"{usd:.2g}"


def _requests(phase: Phase) -> str:
    """Return the requests per round as text."""
    if not phase.operations:
        return _NONE
    count = sum(operations.count for operations in phase.operations.values())
    return f"{count / len(phase.seconds):.0f}"


def _latencies(phase: Phase) -> tuple[str, ...]:
    operations = phase.data_operations
    if operations is None:
        return (_NONE,) * len(PERCENTS)
    return tuple(seconds_text(operations.quantile_s(percent / 100)) for percent in PERCENTS)


def _cpu(phase: Phase) -> str:
    seconds = phase.cpu_s_per_gib
    if seconds is None:
        return _NONE
    return f"{seconds:.2f} s"


def invalid_lines(found: Measurement) -> list[str]:
    """Return a line for each phase with invalid figures, with the reasons."""
    return [
        f"INVALID: {name or 'all of it'}: {'; '.join(reasons)}"
        for name, reasons in found.invalid.items()
    ]


def csv_text(found: Measurement) -> str:
    """Return a CSV line for each round of each phase, below a line of titles."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(("phase", "round", "nbytes", "seconds", "cpu_s", "peak_nbytes"))
    for phase in found.phases:
        for number, seconds in enumerate(phase.seconds):
            cpu_s = phase.cpu_s[number] if phase.cpu_s else ""
            peak = phase.peak_nbytes[number] if phase.peak_nbytes else ""
            lines.writerow((phase.name, number + 1, phase.nbytes, seconds, cpu_s, peak))
    return text.getvalue()


def print_comparison(found: Sequence[Compared], part: float) -> None:
    """Print a row for each phase that both results have."""
    titles = ("phase", "A", "B", "B is", "from", "to", "verdict")
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
    print_table(
        "Speed of B relative to A, with 95 % confidence", titles, rows, ("phase", "verdict")
    )
    for each in found:
        if each.is_slower(part):
            print(paint(f"{each.name}: B is slower by more than {part:.0%}", "red"))


def print_comparison_json(found: Sequence[Compared], part: float) -> None:
    """Print the comparison as one JSON document."""
    print_json(
        {
            "slower": [each.name for each in found if each.is_slower(part)],
            "phases": [
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
            ],
        }
    )
