"""Results of ``holdfast bench`` as tables, lines and JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence

from ...bench.measured.comparison import Compared
from ...bench.measured.result import LIMITS, Measurement, Phase
from ...core.units import size_text
from ..commands import print_json
from ..tables import print_table
from ..text import paint, printable

__all__ = [
    "PHASE_TITLES",
    "csv_text",
    "invalid_lines",
    "phase_rows",
    "print_comparison",
    "print_comparison_json",
    "print_measurement",
]

_NONE = "-"
PHASE_TITLES = (
    "phase",
    "median",
    "from",
    "to",
    "rate",
    "of the limit",
    "CPU per GiB",
    "memory",
    "again",
)


def print_measurement(found: Measurement) -> None:
    """On a terminal: what was measured on, the phases, and why they are not to be believed."""
    print(f"{printable(found.uri)}: {size_text(found.config['nbytes'])} in each phase")
    print(paint(f"saved: {printable(str(found.config.get('workload', 'unknown')))}", "dim"))
    print(paint(", ".join(f"{name}: {what}" for name, what in found.machine.items()), "dim"))
    print()
    print_table("phases", PHASE_TITLES, list(phase_rows(found)), ("phase",))
    for line in invalid_lines(found):
        print(paint(line, "red"))
    for note in found.notes:
        print(f"NOTE: {printable(note)}")


def phase_rows(found: Measurement) -> Iterator[tuple[str, ...]]:
    """A row for each phase."""
    for phase in found.phases:
        share = found.share(phase.name)
        yield (
            phase.name,
            f"{phase.median_s:.3f} s",
            f"{min(phase.seconds):.3f} s",
            f"{max(phase.seconds):.3f} s",
            _NONE if phase.name == "delete" else f"{phase.rate / 1e9:.3f} GB/s",
            _NONE if share is None else f"{share:.0%}",
            _cpu(phase),
            size_text(max(phase.peak_nbytes)) if phase.peak_nbytes else _NONE,
            str(phase.retries) if phase.name in LIMITS else _NONE,
        )


def _cpu(phase: Phase) -> str:
    seconds = phase.cpu_s_per_gib
    if seconds is None:
        return _NONE
    return f"{seconds:.2f} s"


def invalid_lines(found: Measurement) -> list[str]:
    """Why figures are not to be believed, in words."""
    return [
        f"INVALID: {name or 'all of it'}: {'; '.join(reasons)}"
        for name, reasons in found.invalid.items()
    ]


def csv_text(found: Measurement) -> str:
    """A line for each round of each phase, under a line of titles."""
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
    """A row for each phase that both results have."""
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
    print_table("B as fast as A, with a confidence of 95 %", titles, rows, ("phase", "verdict"))
    for each in found:
        if each.is_slower(part):
            print(paint(f"{each.name}: B is slower by more than {part:.0%}", "red"))


def print_comparison_json(found: Sequence[Compared], part: float) -> None:
    """The same as one document."""
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
