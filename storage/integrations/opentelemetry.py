"""OpenTelemetry spans: one for each save and load, with a child span for each stage.

from holdfast.storage.integrations.opentelemetry import export_spans

export_spans()  # to the tracer provider of the process
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from opentelemetry import trace
from opentelemetry.trace import Span, Status, StatusCode, Tracer, TracerProvider

from ...core.spans import StageReport
from ..operations.report import LoadReport, SaveReport, Update
from ..operations.telemetry import Outcome, listen

__all__ = ["export_spans"]

_NS = 1e9


def export_spans(provider: TracerProvider | None = None) -> Callable[[], None]:
    """Export spans of all saves and loads of this process from now on, once each has ended.

    Returns a function that stops the export. ``provider``: by default the process's own. A stage's
    span extends from the start of its first operation to the end of its last one; its busy time is
    an attribute. Durations are in seconds, sizes in bytes.
    """
    tracer = trace.get_tracer("holdfast", tracer_provider=provider)
    return listen(lambda outcome: _export(tracer, outcome))


def _export(tracer: Tracer, outcome: Outcome) -> None:
    ended_ns = time.time_ns()
    began_ns = ended_ns - round(outcome.seconds * _NS)
    span = tracer.start_span(f"holdfast.{outcome.operation}", start_time=began_ns)
    span.set_attribute("holdfast.uri", outcome.uri)
    if outcome.step is not None:
        span.set_attribute("holdfast.step", outcome.step)
    if outcome.report is not None:
        span.set_attributes(_attributes(outcome.report))
        _export_stages(tracer, span, began_ns, outcome.report.stages)
    if outcome.error is not None:
        span.record_exception(outcome.error)
        span.set_status(Status(StatusCode.ERROR, str(outcome.error)))
    span.end(ended_ns)


def _attributes(report: SaveReport | LoadReport | Update) -> Mapping[str, float | str]:
    found: dict[str, float | str] = {
        "holdfast.attempt": report.attempt,
        "holdfast.cpu_s": report.cpu_s,
        "holdfast.peak_nbytes": report.peak_nbytes,
    }
    if isinstance(report, SaveReport):
        found["holdfast.nbytes"] = report.nbytes
        found["holdfast.fenced_s"] = report.fenced_s
        found["holdfast.written_nbytes"] = report.written_nbytes
        found["holdfast.borrowed_nbytes"] = report.borrowed_nbytes
        if report.why_whole:
            found["holdfast.why_whole"] = report.why_whole
    elif isinstance(report, LoadReport):
        found["holdfast.nbytes"] = report.bytes_read
    else:
        found["holdfast.nbytes"] = report.received_nbytes
        found["holdfast.pause_s"] = report.pause_s
    return found


def _export_stages(
    tracer: Tracer, whole: Span, began_ns: int, stages: Mapping[str, StageReport]
) -> None:
    within = trace.set_span_in_context(whole)
    for name, stage in stages.items():
        first_ns = began_ns + round(stage.first_s * _NS)
        span = tracer.start_span(f"holdfast.{name}", context=within, start_time=first_ns)
        span.set_attribute("holdfast.busy_s", stage.busy_s)
        span.set_attribute("holdfast.count", stage.count)
        span.set_attribute("holdfast.nbytes", stage.nbytes)
        span.set_attribute("holdfast.retries", stage.retries + stage.hedges)
        if stage.last_rank is not None:
            span.set_attribute("holdfast.last_rank", stage.last_rank)
        span.end(began_ns + round(stage.last_s * _NS))
