"""Reports, the log, listeners and exporters say where the time of saves and loads went."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest
from support.bits import fresh_uri
from support.drivers import storage_at
from support.ranks import as_ranks, load_as_ranks, saved_as_ranks

import holdfast
from holdfast.core.spans import Recorder, StageReport, Summary, recording
from holdfast.storage.integrations.opentelemetry import export_spans
from holdfast.storage.integrations.prometheus import export_metrics
from holdfast.storage.integrations.scalars import log_scalars
from holdfast.storage.operations.saving.save import SaveJob, run_save
from holdfast.storage.ranks.store_team import StoreTeam
from holdfast.storage.state.flattening.flatten import flatten

SAVING = ["flatten", "wait", "plan", "begin", "capture", "open", "hash", "write", "upload_commit"]
COMMITTING = ["merge", "manifest", "settle"]
LOADING = ["wait", "open", "flatten", "manifest", "match", "plan", "checksums", "read", "deliver"]
DELIVERING = ["verify", "scatter", "finish"]
NBYTES = 3 << 24


@pytest.fixture
def uri() -> str:
    """Return an unused URI."""
    return fresh_uri()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Return the log of Holdfast from level DEBUG on."""
    caplog.set_level(logging.DEBUG, "holdfast")
    return caplog


def state() -> dict[str, Any]:
    """Return two tensors, of four chunks together."""
    return {"a": torch.zeros(NBYTES, dtype=torch.uint8), "b": torch.ones(5), "step": 7}


def loaded(uri: str, **options: Any) -> holdfast.LoadReport:
    """Load into a state of the same shape; return the report."""
    reports: list[holdfast.LoadReport] = []
    holdfast.load(uri, state(), on_report=reports.append, **options)
    return reports[0]


def whole(stages: dict[str, StageReport], end_s: float) -> None:
    """Figures that contradict each other are none."""
    for stage in stages.values():
        assert stage.count == sum(stage.histogram) > 0
        assert 0 <= stage.first_s <= stage.last_s <= end_s
        assert 0 <= stage.busy_s <= stage.last_s - stage.first_s + 1e-6
        assert stage.busy_s <= stage.seconds + 1e-6


def test_a_save_says_where_its_time_went(uri: str) -> None:
    """The report has every stage in order of beginning, with chunks and bytes."""
    report = holdfast.save(uri, state())
    assert set(report.stages) == {*SAVING, *COMMITTING}
    assert sorted(report.stages, key=lambda name: report.stages[name].first_s) == list(
        report.stages
    )
    for name in ("capture", "hash", "write"):
        assert report.stages[name].count == 4
        assert report.stages[name].nbytes >= NBYTES
    whole(dict(report.stages), report.durable_s)
    assert NBYTES // 4 < report.peak_nbytes <= report.nbytes
    assert report.cpu_s > 0


def test_a_load_says_where_its_time_went(uri: str) -> None:
    """Its report has the same form. Verifying and scattering are timed apart, on one thread."""
    holdfast.save(uri, state())
    report = loaded(uri)
    assert set(report.stages) == {*LOADING, *DELIVERING}
    for name in ("read", "deliver", "verify", "scatter"):
        assert report.stages[name].nbytes >= NBYTES
    delivered = report.stages["verify"].seconds + report.stages["scatter"].seconds
    assert delivered <= report.stages["deliver"].seconds
    whole(dict(report.stages), report.seconds)


def test_the_slowest_operations_are_named(uri: str) -> None:
    """Each has its file, its offset there, and the rank."""
    report = holdfast.save(uri, state())
    image = f"data/{report.attempt}/0.safetensors"
    writes = {slow.offset: slow for slow in report.slowest if slow.stage == "write"}
    assert sorted(writes) == [0, 1 << 24, 2 << 24, 3 << 24]
    assert {slow.key for slow in writes.values()} == {image}
    assert {slow.rank for slow in report.slowest} == {0}
    assert "manifest.safetensors" in {slow.key for slow in report.slowest}
    assert report.slowest == tuple(sorted(report.slowest, key=lambda slow: -slow.seconds))


def test_what_telemetry_may_be(uri: str) -> None:
    """Anything else is refused before any I/O, by saves, loads and the Checkpointer."""
    wrong: Any = "sometimes"
    with pytest.raises(holdfast.UsageError, match="sometimes"):
        holdfast.save(uri, state(), telemetry=wrong)
    with pytest.raises(holdfast.UsageError, match="sometimes"):
        holdfast.load(uri, state(), telemetry=wrong)
    with pytest.raises(holdfast.UsageError, match="sometimes"):
        holdfast.Checkpointer(uri, telemetry=wrong)


def test_one_line_says_all_that_matters(uri: str, log: pytest.LogCaptureFixture) -> None:
    """One at level INFO for each save and load, one at level DEBUG for each of their stages."""
    report = holdfast.save(uri, state())
    loaded(uri)
    lines = [record for record in log.records if record.name.endswith("operations.telemetry")]
    saved_line, loaded_line = [r.getMessage() for r in lines if r.levelno == logging.INFO]
    assert re.fullmatch(
        r"step 7: saved, 50\.4 MB from this rank in [\d.]+ s \([\d.]+ [kMG]?B/s\) to \S+; "
        r"captured after [\d.]+ s, fences waited [\d.]+ ms; longest: \w+ [\d.]+ s, \w+ [\d.]+ s, "
        r"\w+ [\d.]+ s; [\d.]+ s of processor time, [\d.]+ MB held at most",
        saved_line,
    )
    assert re.match(
        r"loaded, 50\.3 MB for this rank in [\d.]+ s .* read, 0 B received", loaded_line
    )
    details = [r.getMessage() for r in lines if r.levelno == logging.DEBUG]
    for name in report.stages:
        assert any(line.startswith(f"step 7: saved: {name}: ") for line in details)


def test_requests_made_again_are_counted(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    """A retried read counts once, with its retries."""
    uri = f"file://{tmp_path}/c"
    holdfast.save(uri, state())
    report = loaded(f"{uri}?faults=seed:3,error:0.5&retries=20")
    retries = sum(stage.retries for stage in report.stages.values())
    assert retries > 0
    assert report.stages["read"].count == 4
    assert f", {retries} requests made again" in log.text


def test_what_a_rate_holds_back_is_counted(uri: str) -> None:
    """Three of four chunks wait for those before them."""
    report = holdfast.save(f"{uri}?max_bytes_per_s=50MB", state())
    assert report.stages["write"].throttled_s > 0.1
    assert report.stages["capture"].throttled_s == 0
    assert holdfast.save(uri, state()).stages["write"].throttled_s == 0


def rank_summaries(world: int, late: int) -> list[Summary]:
    """Return the records of the ranks of a save; ``late`` was slow to come to its first round."""
    uri = fresh_uri()

    async def act(team: StoreTeam) -> Summary:
        recorder = Recorder(team.rank)
        with recording(recorder):
            if team.rank == late:
                await asyncio.sleep(0.3)
            flat = flatten({"own": torch.full((9,), float(team.rank))})
            await run_save(storage_at(uri), team, SaveJob(flat, None, 64 << 20))
        return recorder.summary()

    return as_ranks(world, act)


def test_rounds_name_the_rank_that_came_last() -> None:
    """Rank 0 waits for all ranks. On the others, the last one is rank 0."""
    summaries = rank_summaries(3, late=2)
    rounds = [
        {name for name in summary.stages if name.startswith("round ")} for summary in summaries
    ]
    assert {"round agree", "round begin", "round commit"} <= rounds[0]
    assert rounds[1] == rounds[2]
    agree = [summary.stages["round agree"] for summary in summaries]
    assert [stage.last_rank for stage in agree] == [2, 0, 0]
    assert agree[0].busy_s >= 0.2


@pytest.mark.parametrize("apart", [False, True])
def test_what_ranks_exchange_is_counted(apart: bool) -> None:
    """Each byte is read by one rank and received by the other."""
    weights = torch.arange(1 << 22, dtype=torch.int32)
    driver = saved_as_ranks([{"w": weights}, {"w": weights}])
    recorder = Recorder()
    into = [{"w": torch.zeros_like(weights)} for _ in range(2)]
    with recording(recorder):
        load_as_ranks(driver, into, exchange=True, apart=apart)
    stages = recorder.summary().stages
    assert {"exchange", "forward", "receive", "round exchange", "round fits"} <= set(stages)
    assert stages["receive"].nbytes == stages["forward"].nbytes == stages["read"].nbytes
    assert stages["scatter"].nbytes == 2 * stages["read"].nbytes


ROOT = Path(holdfast.__file__).parent
_NAMED = re.compile(r'\b(?:span|counting)\("(\w+)"')


def test_every_stage_is_described() -> None:
    """The reference has all names that code gives to spans, and no other."""
    text = (ROOT / "docs/reference/telemetry.md").read_text()
    tables = text.partition("## The stages")[2].splitlines()
    first_cells = [line.split("|")[1] for line in tables if line.startswith("|")]
    described = {name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)}
    named = {
        name
        for path in (ROOT / "storage").rglob("*.py")
        for name in _NAMED.findall(path.read_text())
    }
    piped = {"capture", "hash", "pack", "write", "read", "deliver", "forward"}
    assert {name for name in described if not name.startswith("round ")} == named | piped
    assert {*SAVING, *COMMITTING, *LOADING, *DELIVERING} <= described


DASHBOARD = Path(__file__).parents[2] / "docs/examples/grafana-dashboard.json"


def small_state() -> dict[str, Any]:
    """Return a small state."""
    return {"w": torch.arange(999.0)}


@pytest.fixture
def ending() -> Iterator[contextlib.ExitStack]:
    """Calls at the end of the test."""
    with contextlib.ExitStack() as stack:
        yield stack


def test_every_save_and_load_is_told(tmp_path: Path, ending: contextlib.ExitStack) -> None:
    """A listener gets every outcome: reports of successes, errors of failures."""
    told: list[holdfast.Outcome] = []
    ending.callback(holdfast.listen(told.append))
    report = holdfast.save(tmp_path / "a", small_state(), step=3)
    holdfast.load(tmp_path / "a", into=small_state())
    with pytest.raises(holdfast.NotACheckpointError):
        holdfast.load(tmp_path / "none", into=small_state())
    (tmp_path / "file").write_text("")
    with pytest.raises(holdfast.HoldfastError):
        holdfast.save(tmp_path / "file" / "b", small_state())
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
    holdfast.save(tmp_path, small_state())
    stop_second()
    holdfast.save(tmp_path, small_state())
    assert (len(first), len(second)) == (0, 1)


def test_a_listener_that_raises_harms_nobody(
    tmp_path: Path, ending: contextlib.ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error in a listener is printed; the save succeeds and other listeners still run."""

    def raising(outcome: holdfast.Outcome) -> None:
        raise RuntimeError("from a listener")

    told: list[holdfast.Outcome] = []
    ending.callback(holdfast.listen(raising))
    ending.callback(holdfast.listen(told.append))
    handle = holdfast.async_save(tmp_path, small_state())
    handle.wait()
    holdfast.load(tmp_path, into=small_state())
    assert len(told) == 2
    assert "from a listener" in capsys.readouterr().err


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    """Return the sample of a metric with these labels."""
    return registry.get_sample_value(name, labels)


def test_prometheus_counts(tmp_path: Path, ending: contextlib.ExitStack) -> None:
    """Metrics count operations, bytes and stages, and show the newest checkpoint."""
    registry = CollectorRegistry()
    ending.callback(export_metrics(registry))
    report = holdfast.save(tmp_path / "a", small_state(), step=3)
    holdfast.load(tmp_path / "a", into=small_state())
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


def test_prometheus_counts_versions_of_weights(ending: contextlib.ExitStack) -> None:
    """Pushes are no saves; updates say how far they were behind, and how much they read."""
    registry, told = CollectorRegistry(), list[holdfast.Outcome]()
    ending.callback(export_metrics(registry))
    ending.callback(holdfast.listen(told.append))
    uri = fresh_uri()
    state = {"w": torch.arange(1000.0)}
    with holdfast.publish(uri) as publisher, holdfast.subscribe(uri) as subscriber:
        for versions in ((3,), (5, 7, 9)):
            for version in versions:
                report = publisher.push(version, state).wait()
            update = subscriber.update()
    assert report is not None
    assert update is not None
    assert [(o.operation, o.step) for o in told] == [
        ("push", 3), ("update", 3), ("push", 5), ("push", 7), ("push", 9), ("update", 9),
    ]  # fmt: skip
    assert (told[-1].report, update.skipped) == (update, 2)
    assert told[-1].seconds == update.prepare_s + update.pause_s
    ended = "holdfast_operations_total"
    assert value(registry, ended, operation="push", outcome="succeeded") == 4
    assert value(registry, ended, operation="update", outcome="succeeded") == 2
    assert value(registry, ended, operation="save", outcome="succeeded") is None
    assert value(registry, "holdfast_newest_step") == 0
    for operation in ("push", "update"):
        assert value(registry, "holdfast_weights_version", operation=operation) == 9
        assert value(registry, "holdfast_bytes_total", operation=operation) > 4000
    assert value(registry, "holdfast_weights_skipped_total") == 2
    assert value(registry, "holdfast_weights_anchored_chunks_total") == 1
    assert value(registry, "holdfast_weights_pause_seconds_count") == 2


def test_what_would_be_lost_is_exported(tmp_path: Path, ending: contextlib.ExitStack) -> None:
    """A Checkpointer exports the number of steps since the newest one in storage."""
    registry = CollectorRegistry()
    with holdfast.Checkpointer(tmp_path, every=4, lazy=False, grace_s=None) as ckpt:
        ending.callback(export_metrics(registry, checkpointer=ckpt))
        for step in range(1, 11):
            ckpt.step(step, small_state())
            ckpt.wait()
        assert ckpt.unsaved_steps == 2
        assert value(registry, "holdfast_unsaved_steps") == 2
    with holdfast.Checkpointer(tmp_path, lazy=False, grace_s=None) as ckpt:
        assert ckpt.resume(small_state()) == 8
        assert ckpt.unsaved_steps == 0
        assert ckpt.resume(small_state(), step=4) == 4
        ckpt.step(5, small_state())
        assert ckpt.unsaved_steps == 1


def test_what_was_exported_can_be_taken_back() -> None:
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


def test_spans_are_exported(tmp_path: Path, ending: contextlib.ExitStack) -> None:
    """Each operation has a span with its stages below it; errors are recorded."""
    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    ending.callback(export_spans(provider))
    report = holdfast.save(tmp_path / "a", small_state(), step=3)
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


def test_borrowed_bytes_are_exported(ending: contextlib.ExitStack) -> None:
    """Every door tells written bytes from borrowed ones, and counts whole saves."""
    registry, kept, provider = CollectorRegistry(), InMemorySpanExporter(), TracerProvider()
    logged: dict[tuple[str, int], float] = {}
    provider.add_span_processor(SimpleSpanProcessor(kept))
    ending.callback(export_metrics(registry))
    ending.callback(export_spans(provider))
    ending.callback(log_scalars(lambda name, figure, step: logged.update({(name, step): figure})))
    uri = fresh_uri()
    state = {"w": torch.arange(float(1 << 18))}
    first = holdfast.save(f"{uri}/1", state, step=1, base=f"{uri}/0")
    second = holdfast.save(f"{uri}/2", state, step=2, base=f"{uri}/1")
    written = first.stored_nbytes + second.written_nbytes
    assert value(registry, "holdfast_bytes_total", operation="save") == written
    assert value(registry, "holdfast_borrowed_bytes_total") == second.borrowed_nbytes > 1 << 20
    assert value(registry, "holdfast_whole_saves_total") == 1
    assert logged["holdfast/borrowed_gigabytes", 2] == second.borrowed_nbytes / 1e9
    saves = [span.attributes for span in kept.get_finished_spans() if span.name == "holdfast.save"]
    assert saves[0]["holdfast.why_whole"] == first.why_whole != ""
    assert saves[1]["holdfast.borrowed_nbytes"] == second.borrowed_nbytes
    assert saves[1]["holdfast.written_nbytes"] == second.written_nbytes


def test_scalars_are_logged(tmp_path: Path, ending: contextlib.ExitStack) -> None:
    """Figures are logged for saves with a step."""
    logged: dict[tuple[str, int], float] = {}
    ending.callback(log_scalars(lambda name, figure, step: logged.update({(name, step): figure})))
    report = holdfast.save(tmp_path / "a", small_state(), step=3)
    holdfast.save(tmp_path / "b", small_state())
    assert {step for _, step in logged} == {3}
    assert logged["holdfast/save_seconds", 3] == report.durable_s
    assert logged["holdfast/stage_seconds/write", 3] == report.stages["write"].busy_s
