"""Runs every benchmark in turn, and writes the results as one Markdown page. Here --json and --svg
name folders, which get a file per program."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .options import Options, options, parser
from .report import Report, Series, draw_all, markdown, read_report

__all__: list[str] = []

PROGRAMS = (
    "limits",
    "save",
    "load",
    "stall",
    "lazy",
    "ranks",
    "replicas",
    "reshard",
    "small",
    "memory",
    "keeper",
    "parity",
    "rebuild",
)
OWN_SIZE = ("replicas", "reshard", "small", "memory", "parity", "rebuild")
"""Programs that choose their own size; --gib is for the others."""

_TITLES = {
    "save": "durable save",
    "load": "cold, verified load",
    "stall": "stall of an asynchronous save",
}


def _run(program: str, given: Options, folder: Path) -> Report:
    """Run one program in its own process and return its report. Raises CalledProcessError if it
    fails."""
    file = folder / f"{program}.json"
    if given.svg:
        drawing = ["--svg", str(given.svg / f"{program}.svg")]
    else:
        drawing = []
    print(f"== {program}", flush=True)
    command = [
        sys.executable,
        "-m",
        f"holdfast.bench.{program}",
        *_arguments(program, given),
        *drawing,
    ]
    subprocess.run([*command, "--json", str(file)], check=True)
    return read_report(file)


def _page(reports: Sequence[Report]) -> str:
    machine = ", ".join(f"{key}: {value}" for key, value in reports[0].machine.items())
    return "\n".join([f"Measured on: {machine}.", "", *map(markdown, reports)])


def main(argv: Sequence[str] | None = None) -> int:
    """Run all programs, or the named ones. Return 1 if a target was missed."""
    arguments = parser("", __doc__)
    arguments.prog = "python -m holdfast.bench"
    arguments.add_argument(
        "programs", nargs="*", metavar="PROGRAM", help=f"of: {' '.join(PROGRAMS)} (default: all)"
    )
    arguments.add_argument(
        "--markdown", type=Path, help="write the page to this file instead of printing it"
    )
    arguments.add_argument(
        "--chart", type=Path, help="also draw all programs beside each other (needs matplotlib)"
    )
    parsed = arguments.parse_args(argv)
    if unknown := set(parsed.programs) - set(PROGRAMS):
        arguments.error(f"no such program: {', '.join(sorted(unknown))}")
    given = options(parsed)
    for folder in filter(None, (given.json, given.svg)):
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        programs = parsed.programs or PROGRAMS
        reports = [_run(program, given, given.json or Path(temporary)) for program in programs]
    if parsed.chart:
        draw_all([_for_chart(report) for report in reports], parsed.chart)
    page = _page(reports)
    if parsed.markdown:
        parsed.markdown.write_text(page)
    else:
        print(page)
    return int(any(not target.met for report in reports for target in report.targets))


def _for_chart(report: Report) -> Report:
    """Return the report with the program's short title. For stalls, keep only the contestants'
    stalls, without the first call, which allocates memory for all later ones."""
    series = report.series
    if report.program == "stall":
        names = ("memcpy", "holdfast", "DCP")
        later = {s.name: Series(s.name, s.seconds[1:] or s.seconds) for s in series}
        series = [later[name] for name in names]
    return replace(report, title=_TITLES.get(report.program, report.program), series=series)


def _arguments(program: str, given: Options) -> list[str]:
    shared = given.arguments(given.folder)
    if program in OWN_SIZE and "--gib" in shared:
        at = shared.index("--gib")
        return shared[:at] + shared[at + 2 :]
    return shared


if __name__ == "__main__":
    sys.exit(main())
