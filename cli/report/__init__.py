"""``holdfast report``: where the time of saves went, and which ranks kept the others waiting."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ...drivers.uri import parse
from ...storage.operations.report_saves import RecordedSave, recorded_saves
from ..commands import complain, print_json, write_text

__all__ = ["run"]


def run(uri: str, *, json_output: bool, trace: str | None, html: str | None) -> int:
    """Print it; 0 if anything was recorded, 1 if not. ``trace``: a file for Perfetto. ``html``: a
    file for a browser."""
    saves = recorded_saves(uri)
    redacted = parse(uri).redacted
    known = any(save.telemetry is not None for save in saves)
    if known and trace is not None:
        _write_trace(trace, saves)
    if known and html is not None:
        from .html import report_page

        write_text(html, report_page(redacted, saves))
    _print(redacted, saves, json_output=json_output)
    if not saves:
        complain(f"no checkpoint at or below {redacted}")
    elif not known:
        complain(f"no telemetry at {redacted}: {saves[0].problem}")
    return int(not known)


def _print(redacted: str, saves: Sequence[RecordedSave], *, json_output: bool) -> None:
    from .document import document
    from .printed import print_history, print_save

    if json_output:
        print_json(document(redacted, saves))
    elif len(saves) > 1:
        print_history(saves)
    elif saves and saves[0].telemetry is not None:
        print_save(saves[0].telemetry)


def _write_trace(path: str, saves: Sequence[RecordedSave]) -> None:
    from ...storage.operations.trace import chrome_trace

    known = [save.telemetry for save in saves if save.telemetry is not None]
    write_text(path, json.dumps(chrome_trace(known)))
