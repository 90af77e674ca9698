"""Test the telemetry stored with a checkpoint: it is complete, bounded, and useful."""

from __future__ import annotations

import asyncio
import functools
import gzip
import json
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import fresh_uri
from support.drivers import HookedDriver, storage_at
from support.ranks import as_ranks
from support.recorded import CHUNKS, NBYTES, record, save_of, stage

import holdfast
from holdfast.core.histogram import BUCKETS, bucket_of
from holdfast.core.spans import Recorder, SlowOperation, StageReport, recording
from holdfast.drivers.contract import Driver
from holdfast.errors import NotFoundError, TelemetryError
from holdfast.storage.format.save_telemetry import (
    RECORD_NBYTES_MAX,
    RankTelemetry,
    SaveTelemetry,
    decode_telemetry,
    encode_head,
    encode_record,
    telemetry_key,
)
from holdfast.storage.operations.reading.reader import read_telemetry
from holdfast.storage.operations.reporting.findings import CALL, Cause, stragglers, typical
from holdfast.storage.operations.reporting.trace import chrome_trace
from holdfast.storage.operations.saving.save import SaveJob, run_save
from holdfast.storage.protocol import limits
from holdfast.storage.ranks.store_team import StoreTeam
from holdfast.storage.ranks.team import Team
from holdfast.storage.runtime.engine import run
from holdfast.storage.state.flattening.flatten import flatten

STATE = {"w": torch.arange(9.0), "step": 7}


@pytest.fixture
def uri() -> str:
    """Return an unused URI."""
    return fresh_uri()


def telemetry_of(uri: str | Path) -> SaveTelemetry | None:
    """Return the telemetry stored with a checkpoint, if any."""
    with holdfast.open(uri) as checkpoint:
        return checkpoint.telemetry()


def found(uri: str | Path) -> SaveTelemetry:
    """Return the telemetry stored with a checkpoint."""
    telemetry = telemetry_of(uri)
    assert telemetry is not None
    return telemetry


async def recorded_save(driver: Driver, team: Team | None = None, state: Any = None) -> str:
    """Save with recording; return the attempt."""
    team = team or Team()
    with recording(Recorder(team.rank)):
        flat = flatten(state or STATE)
        attempt, *_ = await run_save(driver, team, SaveJob(flat, 7, 64 << 20))
    return attempt


def saved_by_ranks(world: int, late: int, slow: int = -1) -> SaveTelemetry:
    """Return the telemetry of a save of ``world`` ranks. One rank calls late, and one is slow to
    commit its image."""
    uri = fresh_uri()

    async def act(team: StoreTeam) -> None:
        async def delay(operation: str, key: str) -> None:
            if team.rank == slow and operation == "commit":
                await asyncio.sleep(0.5)

        if team.rank == late:
            await asyncio.sleep(0.5)
        driver = HookedDriver(storage_at(uri), before=delay)
        await recorded_save(driver, team, {"own": torch.full((9,), float(team.rank))})

    assert as_ranks(world, act) == [None] * world
    return found(uri)


def test_a_checkpoint_says_where_the_time_of_its_save_went(uri: str) -> None:
    """The telemetry equals the save's report, except for everything after the commit."""
    state = {"a": torch.zeros(3 << 24, dtype=torch.uint8), "step": 7}
    report = holdfast.save(uri, state)
    telemetry = found(uri)
    assert (telemetry.attempt, telemetry.step, telemetry.world) == (report.attempt, 7, 1)
    assert 0 < telemetry.seconds <= report.durable_s
    (record,) = telemetry.ranks.values()
    assert (record.rank, record.nbytes) == (0, report.nbytes)
    assert record.peak_nbytes == report.peak_nbytes
    assert set(record.stages) == set(report.stages) - {"settle"}
    for name, stored in record.stages.items():
        reported = report.stages[name]
        assert (stored.count, stored.nbytes) == (reported.count, reported.nbytes)
        assert stored.busy_s == pytest.approx(reported.busy_s, abs=1e-4)
        assert stored.last_s == pytest.approx(reported.last_s, abs=1e-4)
    assert record.stages["write"].histogram == report.stages["write"].histogram
    assert {slow.key for slow in telemetry.slowest} == {slow.key for slow in report.slowest}


@pytest.mark.parametrize("late", [0, 2])
def test_by_how_much_a_rank_called_late_is_known_without_a_common_clock(late: int) -> None:
    """This also holds for rank 0, for which all others have waited."""
    called_s = saved_by_ranks(3, late).called_s
    assert 0.35 < called_s[late] < 5
    assert all(called_s[rank] < 0.2 for rank in called_s if rank != late)


def test_slow_and_late_ranks_are_named() -> None:
    """The telemetry of a save suffices to name its stragglers and their causes."""
    found = stragglers(saved_by_ranks(4, late=2, slow=1))
    told = {(one.rank, one.stage, one.cause) for one in found if one.excess_s > 0.3}
    assert told == {(1, "upload_commit", Cause.SLOW_STORAGE), (2, CALL, Cause.LATE)}


def test_a_copy_has_it_too(tmp_path: Path) -> None:
    """The copy gets the telemetry unchanged, even if it is damaged, or none if there is none."""
    holdfast.save(tmp_path / "a", STATE)
    holdfast.copy(tmp_path / "a", tmp_path / "b")
    assert found(tmp_path / "b") == found(tmp_path / "a")
    (path,) = (tmp_path / "a").rglob("telemetry*")
    path.write_bytes(b"foreign")
    assert holdfast.copy(tmp_path / "a", tmp_path / "c").ok
    path.unlink()
    assert holdfast.copy(tmp_path / "a", tmp_path / "d").ok
    assert telemetry_of(tmp_path / "d") is None


def put_failing(failure: Callable[[], Any]) -> Callable[[str, str], Any]:
    """Return a hook that fails puts of telemetry, and nothing else."""

    async def before(operation: str, key: str) -> None:
        if operation == "put" and "telemetry" in key:
            await failure()

    return before


async def refused() -> None:
    """Fail as storage without room does."""
    raise holdfast.FullError("injected")


async def faulty() -> None:
    """Fail as a faulty driver does."""
    raise ZeroDivisionError


async def silent() -> None:
    """Never answer."""
    await asyncio.Event().wait()


@pytest.mark.parametrize("failure", [refused, faulty, silent])
def test_a_save_does_not_fail_for_it(
    failure: Callable[[], Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failing or silent storage of telemetry only logs a warning."""
    monkeypatch.setattr(limits, "TELEMETRY_S", 0.2)
    driver = storage_at(fresh_uri())
    with caplog.at_level(logging.WARNING, "holdfast"):
        attempt = run(recorded_save(HookedDriver(driver, before=put_failing(failure))))
    assert "is not stored" in caplog.text
    assert run(read_telemetry(driver, attempt)) is None
    with pytest.raises(NotFoundError):
        run(driver.stat(f"data/{attempt}/attempt.json"))


HEAD: dict[str, Any] = {
    "version": 1,
    "attempt": "20310203T040506-8e8a630f",
    "step": 1,
    "world": 1,
    "created_s": 1.0,
    "seconds": 2.0,
    "arrivals": {},
}


def packed(*lines: dict[str, Any]) -> bytes:
    """Return the object with these lines."""
    return b"".join(gzip.compress(json.dumps(line).encode() + b"\n") for line in lines)


DAMAGED = [
    b"",
    b"foreign",
    packed(HEAD)[:-3],
    packed({**HEAD, "version": 2}),
    packed({**HEAD, "seconds": "2"}),
    packed({**HEAD, "created_s": float("inf")}),
    packed(HEAD, {"rank": 0}),
    packed({name: value for name, value in HEAD.items() if name != "arrivals"}),
    gzip.compress(b"[" * 100_000),
    gzip.compress(bytes(300 << 20), 1),
]


@pytest.mark.parametrize("data", DAMAGED, ids=range(len(DAMAGED)))
def test_what_is_damaged_harms_nobody_else(tmp_path: Path, data: bytes) -> None:
    """Reading it is an error that names the file; the checkpoint itself stays intact."""
    uri = tmp_path / "c"
    holdfast.save(uri, STATE)
    (path,) = uri.rglob("telemetry*")
    path.write_bytes(data)
    with holdfast.open(uri) as checkpoint:
        with pytest.raises(TelemetryError, match="cannot be read") as caught:
            checkpoint.telemetry()
        assert checkpoint.verify().ok
    assert caught.value.key == telemetry_key(checkpoint.attempt)
    assert not isinstance(caught.value, holdfast.CheckpointError)
    assert torch.equal(holdfast.load(uri)["w"], STATE["w"])
    assert [c.problem or c.damage for c in holdfast.list_checkpoints(tmp_path)] == [None]


def test_flipped_bits_are_noticed_or_read_as_telemetry() -> None:
    """For a flipped bit in any byte, decoding succeeds or raises TelemetryError."""
    data = packed(HEAD) + encode_record(busy_record(0, 9))
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 0x10
        try:
            decode_telemetry(bytes(damaged))
        except TelemetryError:
            pass


@functools.cache
def busy_record(rank: int, seed: int) -> RankTelemetry:
    """Return a rank's record of a 9 GB save with every stage and round."""
    random_ = random.Random(seed)
    names = ["flatten", "wait", "plan", "begin", "capture", "device_copy", "hash", "pack"]
    names += ["open", "write", "upload_commit", "merge", "manifest"]
    names += [f"round {name}" for name in ("agree", "holds", "digests", "begin", "written")]
    stages = {}
    for name in names:
        chunks = 560 if name in ("capture", "device_copy", "hash", "pack", "write") else 1
        histogram = [0] * BUCKETS
        for _ in range(chunks):
            histogram[min(BUCKETS - 1, int(random_.gauss(17, 1.5)))] += 1
        times_s = sorted(random_.uniform(0, 30) for _ in range(3))
        stages[name] = StageReport(
            count=chunks,
            nbytes=chunks * (1 << 24) if chunks > 1 else 0,
            seconds=random_.uniform(30, 300),
            busy_s=times_s[1] - times_s[0],
            first_s=times_s[0],
            last_s=times_s[2],
            queued_max=random_.randrange(60) if chunks > 1 else 0,
            retries=random_.randrange(3) if name == "write" else 0,
            last_rank=random_.randrange(1024) if name.startswith("round") else None,
            histogram=tuple(histogram),
        )
    key = f"data/{HEAD['attempt']}/{rank}.safetensors"
    slowest = tuple(
        SlowOperation(
            "write", key, random_.randrange(560) << 24, 1 << 24, rank, random_.uniform(0, 30), 1.5
        )
        for _ in range(16)
    )
    nbytes = 560 << 24
    return RankTelemetry(rank, nbytes, nbytes, 31.2345, 0.0123, 45.678, 1 << 30, stages, slowest)


def whole_telemetry(records: Sequence[RankTelemetry]) -> bytes:
    """Return the object of a job with these ranks."""
    arrivals = {
        f"round {name}": tuple(
            (record.rank, random.Random(record.rank).uniform(0, 30)) for record in records[1:]
        )
        for name in ("agree", "holds", "digests", "commit")
    }
    head = SaveTelemetry(HEAD["attempt"], 500, len(records), 1.9e9, 31.5, arrivals, {})
    return encode_head(head) + b"".join(map(encode_record, records))


@pytest.mark.nightly(4)
@pytest.mark.parametrize("world", [1, 4, 1024])
def test_it_takes_at_most_a_kilobyte_a_rank(world: int) -> None:
    """The head takes another kilobyte, in a save with every stage."""
    records = [replace(busy_record(0, rank % 16), rank=rank) for rank in range(world)]
    assert all(len(encode_record(record)) <= RECORD_NBYTES_MAX for record in records)
    data = whole_telemetry(records)
    assert len(data) <= 1000 * (world + 1)
    assert list(decode_telemetry(data).ranks) == list(range(world))


def few_slow(seconds: float) -> StageReport:
    """Return writes of which one took nearly all of the time."""
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
    """No other rank is named. A stage that only one rank has is not compared."""
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
        ("device_copy", Cause.SLOW_COPIES),  # the device copies: no processor is needed
        ("write", Cause.SLOW_STORAGE),
    ],
)
def test_who_had_no_processor_was_not_running(name: str, cause: Cause) -> None:
    """A stopped process is late in stages that need a processor, and has used none."""
    others = {rank: {"device_copy": stage(0.5, NBYTES)} for rank in range(8)}
    save = save_of({**others, 5: {**others[5], name: stage(9.0, NBYTES)}})
    stopped = replace(save.ranks[5], cpu_s=0.5)
    (straggler,) = stragglers(replace(save, ranks={**save.ranks, 5: stopped}))
    assert (straggler.rank, straggler.stage, straggler.cause) == (5, name, cause)


def test_a_rank_that_calls_late_is_named() -> None:
    """It learns the verdict of the first round sooner after its call than other ranks."""
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
    """The lower median is typical, so even three of four ranks may be slow."""
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
