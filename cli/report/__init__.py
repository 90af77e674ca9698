"""``holdfast report``: shows where the time of saves went, and which ranks delayed the others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ...bench.measured.result import WRITE_LIMIT
from ...drivers.uri import parse
from ...errors import UsageError
from ...storage.format.save_telemetry import SaveTelemetry
from ...storage.operations.reporting.findings import stragglers
from ...storage.operations.reporting.report_saves import RecordedSave, recorded_saves
from ..commands import complain, print_json, write_text
from ..text import paint, printable
from .rows import history_table, operations_table, ranks_table, stages_table
from .words import Against, all_facts, nbytes_of, recurring, words


def run(
    uri: str, *, json_output: bool, trace: str | None, html: str | None, bench: str | None
) -> int:
    """Print the report. Return 0 if there is telemetry, else 1.

    ``trace`` and ``html`` name files to write for Perfetto and for a browser. ``bench`` names a
    file with a result of ``holdfast bench``, with which to compare rates.
    """
    against = None if bench is None else _against(bench)
    saves = recorded_saves(uri)
    redacted = parse(uri).redacted
    known = any(save.telemetry is not None for save in saves)
    if known and trace is not None:
        _write_trace(trace, saves)
    if known and html is not None:
        from .html import report_page

        write_text(html, report_page(redacted, saves, against))
    _print(redacted, saves, against, json_output=json_output)
    if not saves:
        complain(f"no checkpoint at or below {redacted}")
    elif not known:
        complain(f"no telemetry at {redacted}: {saves[0].problem}")
    return int(not known)


def _against(path: str) -> Against:
    from ..bench.choices import read_measurement

    measured = read_measurement(path)
    if "save" not in measured.by_name:
        raise UsageError(f"{path} has no saves to compare rates with")
    return Against(measured)


def _write_trace(path: str, saves: Sequence[RecordedSave]) -> None:
    from ...storage.operations.reporting.trace import chrome_trace

    known = [save.telemetry for save in saves if save.telemetry is not None]
    write_text(path, json.dumps(chrome_trace(known)))


def _print(
    redacted: str, saves: Sequence[RecordedSave], against: Against | None, *, json_output: bool
) -> None:
    if json_output:
        print_json({"uri": redacted, "saves": [_document(save, against) for save in saves]})
    elif len(saves) > 1:
        _print_history(saves, against)
    elif saves and saves[0].telemetry is not None:
        _print_save(saves[0].telemetry, against)


def _print_save(save: SaveTelemetry, against: Against | None) -> None:
    for name, fact in all_facts(save, against).items():
        print(f"{paint(f'{name:<9}', 'dim')}{fact}")
    print()
    found = stragglers(save)
    for slow in found:
        print(paint(printable(words(slow)), "red"))
    if not found and len(save.ranks) > 1:
        print("no rank stands out")
    if found or len(save.ranks) > 1:
        print()
    for table in (stages_table(save), ranks_table(save), operations_table(save)):
        table.print()


def _print_history(saves: Sequence[RecordedSave], against: Against | None) -> None:
    """Print a line for each save, and the ranks that cost the run the most time."""
    found = [stragglers(save.telemetry) if save.telemetry else [] for save in saves]
    history_table(saves, found, against).print()
    for line in recurring(found, sum(save.telemetry is not None for save in saves)):
        print(paint(line, "red"))


def _document(save: RecordedSave, against: Against | None) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "path": save.checkpoint.path,
        "step": save.checkpoint.step,
        "problem": save.problem,
        "telemetry": None,
        "stragglers": [],
        "bench": None,
    }
    telemetry = save.telemetry
    if telemetry is None:
        return entry
    fields = {
        "attempt": telemetry.attempt,
        "world": telemetry.world,
        "created_s": telemetry.created_s,
        "seconds": telemetry.seconds,
        "nbytes": nbytes_of(telemetry),
        "arrivals": {name: list(found) for name, found in telemetry.arrivals.items()},
        "ranks": [
            {"called_s": telemetry.called_s[rank], **asdict(record)}
            for rank, record in telemetry.ranks.items()
        ],
        "slowest": [asdict(slow) for slow in telemetry.slowest],
    }
    slow_ranks = [
        {**asdict(slow), "excess_s": slow.excess_s, "factor": slow.factor, "text": words(slow)}
        for slow in stragglers(telemetry)
    ]
    if against is not None:
        entry["bench"] = {
            "share": against.share(telemetry),
            "share_of_limit": against.share(telemetry, WRITE_LIMIT),
        }
    return {**entry, "telemetry": fields, "stragglers": slow_ranks}
