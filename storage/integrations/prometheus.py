"""Prometheus metrics of this process's saves and loads, and of the steps at risk.

    from holdfast.storage.integrations.prometheus import export_metrics

    export_metrics(checkpointer=ckpt)
    prometheus_client.start_http_server(9400)

A process exports the metrics of its own rank. ``docs/reference/metrics.md`` lists them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from ...errors import DamagedError
from ..operations.report import LoadReport
from ..operations.telemetry import Outcome, listen
from ..training.checkpointer import Checkpointer

__all__ = ["export_metrics"]

_BUCKETS_S = tuple(0.001 * 2.0**power for power in range(22))
"""From a millisecond to 35 minutes."""


def export_metrics(
    registry: CollectorRegistry = REGISTRY, *, checkpointer: Checkpointer | None = None
) -> Callable[[], None]:
    """Collect metrics of all saves and loads of this process in ``registry`` from now on.

    Returns a function that stops this and unregisters the metrics. ``checkpointer`` provides the
    number of unsaved steps. Raises ValueError if the registry has the metrics already.
    """
    metrics = _Metrics(registry)
    if checkpointer is not None:
        metrics.unsaved_steps.set_function(lambda: checkpointer.unsaved_steps)
    stop_listening = listen(metrics.count)

    def stop() -> None:
        stop_listening()
        for metric in metrics.all():
            registry.unregister(metric)

    return stop


class _Metrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry, buckets=_BUCKETS_S)
        operation = ("operation",)
        self.ended = counter(
            "holdfast_operations",
            "Saves and loads of this rank that have ended.",
            ("operation", "outcome"),
        )
        self.seconds = histogram(
            "holdfast_operation_seconds",
            "Duration of a save or a load, from its call to its end.",
            operation,
        )
        self.nbytes = counter(
            "holdfast_bytes",
            "Bytes that saves have written, and loads have read from storage.",
            operation,
        )
        self.borrowed = counter(
            "holdfast_borrowed_bytes", "Bytes that incremental saves have not written."
        )
        self.whole = counter(
            "holdfast_whole_saves", "Incremental saves that had nothing to borrow from."
        )
        self.stage_seconds = histogram(
            "holdfast_stage_busy_seconds",
            "Time that a stage of a save or a load was busy.",
            ("operation", "stage"),
        )
        self.retries = counter("holdfast_retries", "Retried requests.", operation)
        self.throttled = counter(
            "holdfast_throttled_seconds", "Total time that requests were throttled.", operation
        )
        self.stalled = counter(
            "holdfast_stalled_seconds", "Time that training waited for lazy saves."
        )
        self.damaged = counter("holdfast_damaged", "Loads that found a damaged checkpoint.")
        self.held = gauge(
            "holdfast_held_bytes",
            "Peak bytes of chunks in host memory during the latest save or load.",
            operation,
        )
        self.newest_step = gauge("holdfast_newest_step", "Step of the newest durable checkpoint.")
        self.newest_time = gauge(
            "holdfast_newest_timestamp_seconds",
            "When the newest checkpoint became durable, since the epoch.",
        )
        self.unsaved_steps = gauge(
            "holdfast_unsaved_steps", "Steps that would be lost if the job died now."
        )

    def all(self) -> Iterable[Counter | Gauge | Histogram]:
        return vars(self).values()

    def count(self, outcome: Outcome) -> None:
        operation = outcome.operation
        report = outcome.report
        self.ended.labels(operation, "failed" if report is None else "succeeded").inc()
        if report is None:
            if operation == "load" and isinstance(outcome.error, DamagedError):
                self.damaged.inc()
            return
        self.seconds.labels(operation).observe(outcome.seconds)
        self.held.labels(operation).set(report.peak_nbytes)
        for name, stage in report.stages.items():
            self.stage_seconds.labels(operation, name).observe(stage.busy_s)
            self.retries.labels(operation).inc(stage.retries + stage.hedges)
            self.throttled.labels(operation).inc(stage.throttled_s)
        if isinstance(report, LoadReport):
            self.nbytes.labels("load").inc(report.bytes_read)
            return
        self.nbytes.labels("save").inc(report.written_nbytes)
        self.borrowed.inc(report.borrowed_nbytes)
        self.whole.inc(bool(report.why_whole))
        self.stalled.inc(report.fenced_s)
        self.newest_time.set(time.time())
        if outcome.step is not None:
            self.newest_step.set(outcome.step)
