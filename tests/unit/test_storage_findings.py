"""Findings in a save's telemetry: slow ranks and their causes; and the trace."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.recorded import CHUNKS, NBYTES, record, save_of, stage

from holdfast.core.histogram import bucket_of
from holdfast.core.spans import SlowOperation, StageReport
from holdfast.storage.operations.reporting.findings import CALL, Cause, stragglers, typical
from holdfast.storage.operations.reporting.trace import chrome_trace


def few_slow(seconds: float) -> StageReport:
    """Return writes with one that took nearly all of the time."""
    usual = stage(2.0, NBYTES)
    histogram = list(usual.histogram)
    histogram[bucket_of(2.0 / CHUNKS)] -= 1
    histogram[bucket_of(seconds)] += 1
    return replace(usual, busy_s=2.0 + seconds, histogram=tuple(histogram))


SLOW = [
    ("write", stage(8.0, NBYTES), Cause.SLOW_STORAGE),
    ("write", few_slow(3.0), Cause.SLOW_REQUESTS),
    ("write", stage(8.0, NBYTES, retries=3), Cause.RETRIES),
    ("write", stage(8.0, NBYTES, retries=3, throttled_s=6.0), Cause.THROTTLED),
    ("write", stage(8.0, 4 * NBYTES), Cause.MORE_BYTES),
    ("upload_commit", stage(3.0), Cause.SLOW_STORAGE),
    ("open", stage(3.0), Cause.SLOW_STORAGE),
    ("capture", stage(4.0, NBYTES), Cause.SLOW_COPIES),
    ("hash", stage(4.0, NBYTES), Cause.PROCESSOR),
    ("flatten", stage(4.0), Cause.PROCESSOR),
    ("wait", stage(4.0), None),
]


@pytest.mark.parametrize(("name", "slow", "cause"), SLOW)
def test_a_rank_that_is_slow_is_named_with_its_cause(
    name: str, slow: StageReport, cause: Cause | None
) -> None:
    """And nobody else is. A stage that no other rank has is slower than none."""
    found = stragglers(save_of({5: {name: slow}}))
    if cause is None:
        assert found == []
        return
    (straggler,) = found
    assert (straggler.rank, straggler.stage, straggler.cause) == (5, name, cause)
    assert straggler.seconds == slow.busy_s
    assert straggler.excess_s == pytest.approx(slow.busy_s - record(0).stages[name].busy_s)


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("capture", Cause.NOT_RUNNING),
        ("hash", Cause.NOT_RUNNING),
        ("device_copy", Cause.SLOW_COPIES),  # by the device: it takes no processor
        ("write", Cause.SLOW_STORAGE),
    ],
)
def test_who_had_no_processor_was_not_running(name: str, cause: Cause) -> None:
    """A stopped process is late with what keeps a processor busy, and had none."""
    others = {rank: {"device_copy": stage(0.5, NBYTES)} for rank in range(8)}
    save = save_of({**others, 5: {**others[5], name: stage(9.0, NBYTES)}})
    stopped = replace(save.ranks[5], cpu_s=0.5)
    (straggler,) = stragglers(replace(save, ranks={**save.ranks, 5: stopped}))
    assert (straggler.rank, straggler.stage, straggler.cause) == (5, name, cause)


def test_a_rank_that_calls_late_is_named() -> None:
    """It learns the verdict of the first round sooner after its call."""
    (late,) = stragglers(save_of({3: {"round agree": stage(0.1, last_s=0.2)}}))
    assert (late.rank, late.stage, late.cause) == (3, CALL, Cause.LATE)
    assert late.seconds == pytest.approx(1.8)
    assert late.factor is None


def test_what_is_usual_or_hardly_matters_is_not_named() -> None:
    """Small excesses, waiting for others, and single ranks are not reported."""
    assert stragglers(save_of({})) == []
    assert stragglers(save_of({2: {"flatten": stage(0.25)}})) == []
    assert (
        stragglers(save_of({2: {"round commit": stage(5.0)}, 3: {"round commit": stage(1)}})) == []
    )
    assert stragglers(save_of({0: {"write": stage(9.0, NBYTES)}}, world=1)) == []


def test_of_two_ranks_the_faster_one_is_typical() -> None:
    """The lower median: so three of four ranks may be slow."""
    assert [typical(values) for values in ([3.0], [5, 1], [9, 1, 5], [9, 8, 1, 7])] == [3, 1, 5, 7]
    (slow,) = stragglers(save_of({1: {"write": stage(9.0, NBYTES)}}, world=2))
    assert slow.rank == 1


def test_a_trace_has_each_stage_where_it_was() -> None:
    """Ranks are processes and stages threads, offset by call time."""
    operation = SlowOperation("write", "data/x/1.safetensors", 1 << 24, 1 << 24, 1, 1.5, 0.25)
    save = save_of({1: {"round agree": stage(0.1, last_s=1.5)}}, world=2)
    ranks = {**save.ranks, 1: replace(save.ranks[1], slowest=(operation,))}
    saves = [replace(save, ranks=ranks), replace(save, created_s=1e9 + 60.0)]
    trace = json.loads(json.dumps(chrome_trace(saves)))
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert all(event["dur"] > 0 and event["ts"] >= 0 for event in events)
    writes = [event for event in events if threads[event["pid"], event["tid"]] == "write"]
    assert [(e["pid"], e["ts"], e["dur"]) for e in writes] == [
        (0, 1_000_000, 2_000_000),
        (1, 1_500_000, 2_000_000),
        (0, 61_000_000, 2_000_000),
        (1, 61_500_000, 2_000_000),
    ]
    (slow,) = [e for e in events if threads[e["pid"], e["tid"]] == "slowest operations"]
    assert (slow["ts"], slow["args"]["key"]) == (2_000_000, operation.key)
