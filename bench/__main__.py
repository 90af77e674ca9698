"""Every benchmark, one after the other; the outcome as one page of Markdown."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .options import options, parser
from .report import Report, Series, Target, markdown

__all__: list[str] = []

PROGRAMS = ("limits", "save", "load", "stall", "ranks", "reshard", "small", "memory")
OWN_SIZE = ("reshard", "small", "memory")
"""Programs that know their size themselves, unless they are told."""


def _run(program: str, arguments: Sequence[str], folder: Path) -> Report:
    """The report of one program, in a process of its own. Raises CalledProcessError if it fails."""
    file = folder / f"{program}.json"
    print(f"== {program}", flush=True)
    subprocess.run([sys.executable, "-m", f"holdfast.bench.{program}", *arguments, "--json", str(file)], check=True)
    return _report(json.loads(file.read_text()))


def _report(found: dict[str, object]) -> Report:
    lists = {key: found[key] for key in ("targets", "series")}
    assert all(isinstance(entries, list) for entries in lists.values())
    given = found | {
        "targets": [Target(**t) for t in lists["targets"]],  # type: ignore[attr-defined]
        "series": [Series(**s) for s in lists["series"]],  # type: ignore[attr-defined]
    }
    return Report(**given)  # type: ignore[arg-type]


def _page(reports: Sequence[Report]) -> str:
    machine = ", ".join(f"{key}: {value}" for key, value in reports[0].machine.items())
    return "\n".join([f"Measured on: {machine}.", "", *map(markdown, reports)])


def main(argv: Sequence[str] | None = None) -> int:
    """Run all, or those that are named; 1 if a target was missed."""
    arguments = parser("", __doc__)
    arguments.prog = "python -m holdfast.bench"
    arguments.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"of: {' '.join(PROGRAMS)} (default: all)")
    arguments.add_argument("--markdown", type=Path, help="write the page to this file instead of printing it")
    parsed = arguments.parse_args(argv)
    if unknown := set(parsed.programs) - set(PROGRAMS):
        arguments.error(f"no such program: {', '.join(sorted(unknown))}")
    given = options(parsed)
    with tempfile.TemporaryDirectory() as folder:
        reports = [
            _run(name, _arguments(name, given.arguments(given.folder)), Path(folder))
            for name in parsed.programs or PROGRAMS
        ]
    page = _page(reports)
    parsed.markdown.write_text(page) if parsed.markdown else print(page)
    return int(any(not target.met for report in reports for target in report.targets))


def _arguments(program: str, shared: list[str]) -> list[str]:
    if program in OWN_SIZE and "--gib" in shared:
        at = shared.index("--gib")
        return shared[:at] + shared[at + 2 :]
    return shared


if __name__ == "__main__":
    sys.exit(main())
