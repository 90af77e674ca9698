"""A report as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ...storage.operations.reporting.findings import stragglers
from ...storage.operations.reporting.report_saves import RecordedSave
from .against import Against
from .words import words

__all__ = ["document"]


def document(
    redacted: str, saves: Sequence[RecordedSave], against: Against | None = None
) -> dict[str, Any]:
    """Return the output of ``--json``."""
    return {"uri": redacted, "saves": [_entry(save, against) for save in saves]}


def _entry(save: RecordedSave, against: Against | None) -> dict[str, Any]:
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
        "nbytes": sum(record.nbytes for record in telemetry.ranks.values()),
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
            "share_of_limit": against.share_of_limit(telemetry),
        }
    return {**entry, "telemetry": fields, "stragglers": slow_ranks}
