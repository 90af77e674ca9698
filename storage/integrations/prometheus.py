"""Prometheus metrics of this process's saves, loads, and pushes of and updates to weights, and of
the steps at risk.

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
from ..operations.report import LoadReport, Update
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
            "Operations of this rank that have ended: saves, loads, pushes and updates.",
            ("operation", "outcome"),
        )
        self.seconds = histogram(
            "holdfast_operation_seconds",
            "Duration of an operation, from its call to its end.",
            operation,
        )
        self.nbytes = counter(
            "holdfast_bytes",
            "Bytes that saves and pushes have written, and others have read from storage.",
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
            "holdfast_stalled_seconds", "Time that training waited for lazy saves and pushes."
        )
        self.damaged = counter("holdfast_damaged", "Loads and updates that found damage.")
        self.held = gauge(
            "holdfast_held_bytes",
            "Peak bytes of chunks in host memory during the latest operation.",
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

        self.version = gauge(
            "holdfast_weights_version",
            "Newest version of weights that was published, or is in use.",
            operation,
        )
        self.skipped = counter(
            "holdfast_weights_skipped", "Versions of weights that were published, but never used."
        )
        self.anchored = counter(
            "holdfast_weights_anchored_chunks", "Chunks that updates have read whole."
        )
        self.pause_seconds = histogram(
            "holdfast_weights_pause_seconds", "Duration of the swap of weights in an update."
        )

    def all(self) -> Iterable[Counter | Gauge | Histogram]:
        return vars(self).values()

    def count(self, outcome: Outcome) -> None:
        operation = outcome.operation
        report = outcome.report
        self.ended.labels(operation, "failed" if report is None else "succeeded").inc()
        if report is None:
            if operation in ("load", "update") and isinstance(outcome.error, DamagedError):
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
        if operation in ("push", "update") and outcome.step is not None:
            self.version.labels(operation).set(outcome.step)
        if isinstance(report, Update):
            self.nbytes.labels("update").inc(report.received_nbytes)
            self.skipped.inc(report.skipped)
            self.anchored.inc(report.anchored_chunks)
            self.pause_seconds.observe(report.pause_s)
            return
        self.nbytes.labels(operation).inc(report.written_nbytes)
        self.stalled.inc(report.fenced_s)
        if operation == "push":
            return
        self.borrowed.inc(report.borrowed_nbytes)
        self.whole.inc(bool(report.why_whole))
        self.newest_time.set(time.time())
        if outcome.step is not None:
            self.newest_step.set(outcome.step)
