"""``holdfast drivers --check URI``: tests whether a storage is fit for checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict

from ..core.units import size_text
from ..drivers.checks.course import check
from ..drivers.checks.findings import Finding, Report
from ..drivers.registry import schemes
from ..drivers.uri import Uri, parse
from ..errors import UsageError
from .commands import complain, print_json
from .progress import last_line
from .tables import columns
from .text import one_of, paint, printable

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
        with last_line(lines=False) as show:

            def on_finding(finding: Finding) -> None:
                show(f"{finding.title}: {_WORDS[finding.outcome]}")

            report = asyncio.run(check(place, on_finding=on_finding, warn=_warn))
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
    rows = [_cells(finding) for finding in report.findings]
    lines = columns(_TITLES, rows, ("what", "result", "detail"))
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
    result = paint(_WORDS[finding.outcome], _COLOURS[finding.outcome])
    return finding.title, result, time, rate, detail


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
