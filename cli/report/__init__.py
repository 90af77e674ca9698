"""``holdfast report``: shows where the time of saves went, and which ranks delayed the others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...drivers.uri import parse
from ...errors import UsageError
from ...storage.operations.reporting.report_saves import RecordedSave, recorded_saves
from ..commands import complain, print_json, write_text

if TYPE_CHECKING:
    from .against import Against

__all__ = ["run"]


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
    from ..bench.results import read_measurement
    from .against import Against

    measured = read_measurement(path)
    if "save" not in measured.by_name:
        raise UsageError(f"{path} has no saves to compare rates with")
    return Against(measured)


def _print(
    redacted: str, saves: Sequence[RecordedSave], against: Against | None, *, json_output: bool
) -> None:
    from .document import document
    from .printed import print_history, print_save

    if json_output:
        print_json(document(redacted, saves, against))
    elif len(saves) > 1:
        print_history(saves, against)
    elif saves and saves[0].telemetry is not None:
        print_save(saves[0].telemetry, against)


def _write_trace(path: str, saves: Sequence[RecordedSave]) -> None:
    from ...storage.operations.reporting.trace import chrome_trace

    known = [save.telemetry for save in saves if save.telemetry is not None]
    write_text(path, json.dumps(chrome_trace(known)))
