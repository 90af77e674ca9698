"""Test listeners of saves and loads, and the exports to Prometheus, OpenTelemetry and loggers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest

import holdfast
from holdfast.storage.integrations.opentelemetry import export_spans
from holdfast.storage.integrations.prometheus import export_metrics
from holdfast.storage.integrations.scalars import log_scalars

Started = Callable[[Callable[[], None]], None]

DASHBOARD = Path(__file__).parents[2] / "docs/examples/grafana-dashboard.json"


def state() -> dict[str, Any]:
    """A small state."""
    return {"w": torch.arange(999.0)}


@pytest.fixture
def ending() -> Iterator[Started]:
    """Yield a function that registers callables to run at the end of the test."""
    stops: list[Callable[[], None]] = []
    yield stops.append
    for stop in stops:
        stop()


def test_every_save_and_load_is_told(tmp_path: Path, ending: Started) -> None:
    """A listener gets every outcome: reports of successes, errors of failures."""
    told: list[holdfast.Outcome] = []
    ending(holdfast.listen(told.append))
    report = holdfast.save(tmp_path / "a", state(), step=3)
    holdfast.load(tmp_path / "a", into=state())
    with pytest.raises(holdfast.NotACheckpointError):
        holdfast.load(tmp_path / "none", into=state())
    (tmp_path / "file").write_text("")
    with pytest.raises(holdfast.HoldfastError):
        holdfast.save(tmp_path / "file" / "b", state())
    saved, loaded, not_found, not_saved = told
    assert (saved.operation, saved.step, saved.report) == ("save", 3, report)
    assert saved.uri == report.uri
    assert (loaded.operation, loaded.error) == ("load", None)
    assert isinstance(loaded.report, holdfast.LoadReport)
    assert loaded.seconds == loaded.report.seconds
    assert isinstance(not_found.error, holdfast.NotACheckpointError)
    assert (not_saved.operation, not_saved.report) == ("save", None)
    assert isinstance(not_saved.error, holdfast.HoldfastError)


def test_who_stopped_listening_is_told_nothing(tmp_path: Path) -> None:
    """A removed listener gets no more outcomes, but the others do."""
    first: list[holdfast.Outcome] = []
    second: list[holdfast.Outcome] = []
    stop_first = holdfast.listen(first.append)
    stop_second = holdfast.listen(second.append)
    stop_first()
    holdfast.save(tmp_path, state())
    stop_second()
    holdfast.save(tmp_path, state())
    assert (len(first), len(second)) == (0, 1)


def test_a_listener_that_raises_harms_nobody(
    tmp_path: Path, ending: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error in a listener is printed; the save succeeds and other listeners still run."""

    def raising(outcome: holdfast.Outcome) -> None:
        raise RuntimeError("from a listener")

    told: list[holdfast.Outcome] = []
    ending(holdfast.listen(raising))
    ending(holdfast.listen(told.append))
    handle = holdfast.async_save(tmp_path, state())
    handle.wait()
    holdfast.load(tmp_path, into=state())
    assert len(told) == 2
    assert "from a listener" in capsys.readouterr().err


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    """Return the sample of a metric with these labels."""
    return registry.get_sample_value(name, labels)


def test_prometheus_counts(tmp_path: Path, ending: Started) -> None:
    """Metrics count operations, bytes and stages, and show the newest checkpoint."""
    registry = CollectorRegistry()
    ending(export_metrics(registry))
    report = holdfast.save(tmp_path / "a", state(), step=3)
    holdfast.load(tmp_path / "a", into=state())
    with pytest.raises(holdfast.NotACheckpointError):
        holdfast.load(tmp_path / "none")
    ended = "holdfast_operations_total"
    assert value(registry, ended, operation="save", outcome="succeeded") == 1
    assert value(registry, ended, operation="load", outcome="succeeded") == 1
    assert value(registry, ended, operation="load", outcome="failed") == 1
    assert value(registry, "holdfast_bytes_total", operation="save") == report.stored_nbytes
    busy = "holdfast_stage_busy_seconds_count"
    assert value(registry, busy, operation="save", stage="write") == 1
    assert value(registry, busy, operation="load", stage="read") == 1
    assert value(registry, "holdfast_newest_step") == 3
    assert value(registry, "holdfast_newest_timestamp_seconds") == pytest.approx(
        (tmp_path / "a/manifest.safetensors").stat().st_mtime, abs=60
    )
    assert value(registry, "holdfast_damaged_total") == 0


def test_what_would_be_lost_is_exported(tmp_path: Path, ending: Started) -> None:
    """A Checkpointer exports the number of steps since the newest one in storage."""
    registry = CollectorRegistry()
    with holdfast.Checkpointer(tmp_path, every=4, lazy=False, grace_s=None) as ckpt:
        ending(export_metrics(registry, checkpointer=ckpt))
        for step in range(1, 11):
            ckpt.step(step, state())
            ckpt.wait()
        assert ckpt.unsaved_steps == 2
        assert value(registry, "holdfast_unsaved_steps") == 2
    with holdfast.Checkpointer(tmp_path, lazy=False, grace_s=None) as ckpt:
        assert ckpt.resume(state()) == 8
        assert ckpt.unsaved_steps == 0
        assert ckpt.resume(state(), step=4) == 4
        ckpt.step(5, state())
        assert ckpt.unsaved_steps == 1


def test_what_was_exported_can_be_taken_back(tmp_path: Path) -> None:
    """After export ends, the registry is empty and accepts the metrics again."""
    registry = CollectorRegistry()
    export_metrics(registry)()
    assert generate_latest(registry) == b""
    export_metrics(registry)()


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    """Every name in a query of the Grafana dashboard is one that is exported."""
    registry = CollectorRegistry()
    stop = export_metrics(registry)
    exported = {metric.name for metric in registry.collect()}
    stop()
    ends = ("", "_total", "_bucket", "_count")
    names = {f"{name}{end}" for name in exported for end in ends}
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) >= 8
    asked = {name for query in queries for name in re.findall(r"\bholdfast_\w+", query)}
    assert asked
    assert asked - names == set()


def test_spans_are_exported(tmp_path: Path, ending: Started) -> None:
    """Each operation has a span with its stages below it; errors are recorded."""
    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    ending(export_spans(provider))
    report = holdfast.save(tmp_path / "a", state(), step=3)
    with pytest.raises(holdfast.NotACheckpointError):
        holdfast.load(tmp_path / "none")
    provider.shutdown()
    spans = kept.get_finished_spans()
    (save,) = [span for span in spans if span.name == "holdfast.save"]
    (load,) = [span for span in spans if span.name == "holdfast.load"]
    stages = [span for span in spans if span.parent and span.parent.span_id == save.context.span_id]
    assert {span.name for span in stages} == {f"holdfast.{name}" for name in report.stages}
    for span in stages:
        assert save.start_time <= span.start_time <= span.end_time
        assert span.end_time <= save.end_time + 10_000_000
    assert save.attributes["holdfast.step"] == 3
    assert save.attributes["holdfast.uri"] == report.uri
    assert not load.status.is_ok
    assert load.events[0].name == "exception"


def test_scalars_are_logged(tmp_path: Path, ending: Started) -> None:
    """Figures are logged for saves with a step."""
    logged: dict[tuple[str, int], float] = {}
    ending(log_scalars(lambda name, figure, step: logged.update({(name, step): figure})))
    report = holdfast.save(tmp_path / "a", state(), step=3)
    holdfast.save(tmp_path / "b", state())
    assert {step for _, step in logged} == {3}
    assert logged["holdfast/save_seconds", 3] == report.durable_s
    assert logged["holdfast/stage_seconds/write", 3] == report.stages["write"].busy_s
