"""Runs every benchmark in turn, and writes the results as one Markdown page. Here --json and --svg
name folders, which get a file per program."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .program import parser
from .report import Report, markdown, read_report

__all__: list[str] = []

PROGRAMS = ("stall", "lazy", "replicas", "keeper", "kept_steps")


def _run(program: str, given: argparse.Namespace, folder: Path) -> Report:
    """Run one program in its own process and return its report. Raises CalledProcessError if it
    fails."""
    file = folder / f"{program}.json"
    command = [sys.executable, "-m", f"holdfast.bench.{program}", "--json", str(file)]
    command += ["--dir", str(given.dir)]
    command += [f"--{name}" for name in ("tiny", "alone") if getattr(given, name)]
    for name in ("gib", "runs"):
        if getattr(given, name) is not None:
            command += [f"--{name}", str(getattr(given, name))]
    if given.svg:
        command += ["--svg", str(given.svg / f"{program}.svg")]
    print(f"== {program}", flush=True)
    subprocess.run(command, check=True)
    return read_report(file)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all programs, or the named ones. Return 1 if a target was missed."""
    arguments = parser("", __doc__, gib=None, runs=None)
    arguments.prog = "python -m holdfast.bench"
    arguments.add_argument(
        "programs", nargs="*", metavar="PROGRAM", help=f"of: {' '.join(PROGRAMS)} (default: all)"
    )
    arguments.add_argument(
        "--markdown", type=Path, help="write the page to this file instead of printing it"
    )
    given = arguments.parse_args(argv)
    if unknown := set(given.programs) - set(PROGRAMS):
        arguments.error(f"no such program: {', '.join(sorted(unknown))}")
    for folder in filter(None, (given.json, given.svg)):
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        programs = given.programs or PROGRAMS
        reports = [_run(program, given, given.json or Path(temporary)) for program in programs]
    machine = ", ".join(f"{key}: {value}" for key, value in reports[0].machine.items())
    page = "\n".join([f"Measured on: {machine}.", "", *map(markdown, reports)])
    if given.markdown:
        given.markdown.write_text(page)
    else:
        print(page)
    return int(any(not target.met for report in reports for target in report.targets))


if __name__ == "__main__":
    sys.exit(main())
