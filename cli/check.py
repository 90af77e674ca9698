"""``holdfast drivers --check URI``: tests whether a storage is fit for checkpoints."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec

from ..core.units import size_text
from ..drivers.checks.course import check
from ..drivers.checks.findings import Finding, Report
from ..drivers.registry import schemes
from ..drivers.uri import Uri, parse
from ..errors import UsageError
from .commands import complain, print_json
from .text import is_terminal, one_of, paint, printable

__all__ = ["run"]

_TITLES = ("what", "result", "time", "rate", "detail")
_COLOURS = {"kept": "green", "broken": "red", "not promised": "dim", "not tried": "dim"}
_WORDS = {"kept": "ok", "broken": "PROBLEM", "not promised": "note", "not tried": "not tried"}


def run(uri: str | None, *, json_output: bool) -> int:
    """Test the storage at ``uri`` and print the findings. Return 0 if it is fit, 1 if there is a
    problem."""
    place = _place(uri)
    if json_output:
        report = asyncio.run(check(place, warn=_warn))
        print_json(_document(report))
    else:
        report = _watched(place)
        print("\n".join(_text(report)))
    return int(not report.ok)


def _place(uri: str | None) -> Uri:
    if uri is None:
        raise UsageError(
            "--check needs the URI of a storage", advice="holdfast drivers --check s3://bucket/run"
        )
    if uri in schemes():
        raise UsageError(
            f"{uri} is a scheme; --check needs a URI",
            advice=f"Write {uri}://…, or ./{uri} for a folder of that name.",
        )
    return parse(uri)


def _watched(place: Uri) -> Report:
    """Run the check. On a terminal, show its progress."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        return asyncio.run(check(place, warn=_warn))
    from rich.console import Console

    with Console(stderr=True).status("trying the storage …") as status:

        def show(finding: Finding) -> None:
            status.update(f"{finding.title}: {_WORDS[finding.outcome]}")

        return asyncio.run(check(place, on_finding=show, warn=_warn))


def _warn(report: Report) -> None:
    complain(
        f"the check could not remove its scratch folder: {report.why_left}. It is "
        f"{report.left}: remove it by hand"
    )


def _document(report: Report) -> dict[str, object]:
    return {
        "uri": report.uri,
        "ok": report.ok,
        "may_save": report.may_save,
        "operations": report.requests,
        "seconds": round(report.seconds, 3),
        "left": report.left,
        "findings": [asdict(finding) for finding in report.findings],
    }


def _text(report: Report) -> list[str]:
    if is_terminal() and find_spec("rich") is not None:
        lines = _rich_table(report)
    else:
        lines = _plain_table(report)
    explained = set()
    for finding in report.findings:
        if finding.detail not in explained or finding.outcome == "broken":
            lines += _explained(finding)
        explained.add(finding.detail)
    return [*lines, "", _verdict(report)]


def _cells(finding: Finding) -> tuple[str, ...]:
    time = ""
    rate = ""
    detail = ""
    if finding.outcome != "not tried":
        time = f"{finding.seconds * 1000:,.0f} ms"
    if finding.nbytes_per_s:
        rate = f"{size_text(int(finding.nbytes_per_s))}/s"
    if finding.outcome not in ("broken", "not promised"):  # these are explained below the table
        detail = printable(finding.detail)
    return finding.title, _WORDS[finding.outcome], time, rate, detail


def _plain_table(report: Report) -> list[str]:
    rows = [_TITLES, *map(_cells, report.findings)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _rich_table(report: Report) -> list[str]:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="dim", pad_edge=False)
    for title in ("what", "result"):
        table.add_column(title)
    for title in ("time", "rate"):
        table.add_column(title, justify="right")
    table.add_column("detail")
    for finding in report.findings:
        what, result, *others = _cells(finding)
        style = _COLOURS[finding.outcome]
        table.add_row(Text(what), Text(result, style=style), *map(Text, others))
    console = Console()
    with console.capture() as capture:
        console.print(table)
    return capture.get().splitlines()


def _explained(finding: Finding) -> list[str]:
    """Return the explanation of a finding, if it needs one."""
    painted: Callable[[str], str] = {
        "broken": lambda text: paint(text, "red"),
        "not promised": lambda text: paint(text, "bold"),
    }.get(finding.outcome, str)
    lines = []
    if finding.outcome in ("broken", "not promised"):
        lines = ["", painted(f"{finding.title}: {printable(finding.detail)}.")]
    if finding.follows:
        lines.append(f"  It follows ({finding.effect}): {finding.follows}.")
    if finding.advice:
        lines.append(f"  {printable(finding.advice)}")
    lines += [
        f"  The driver warns: {printable(text)}"
        for text in finding.warnings
        if text != finding.detail
    ]
    return lines


def _verdict(report: Report) -> str:
    took = f"{report.requests:,} operations, {report.seconds:.1f} s"
    where = printable(report.uri)
    if report.ok:
        return paint(f"ok: {where} is fit for checkpoints ({took})", "green")
    problems = one_of(len(report.problems), "problem")
    if report.left is not None:
        problems += f", and something is left at {printable(report.left)}"
    verdict = "is not fit for checkpoints"
    if report.may_save:
        verdict = "can hold checkpoints, with the limits named above"
    return paint(f"{problems}: {where} {verdict} ({took})", "red")
