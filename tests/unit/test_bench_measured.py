"""``holdfast bench``: the meaning of figures, when they are invalid, and comparisons of results."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import run, run_json

import holdfast
from holdfast.bench.contest import Contestant
from holdfast.bench.measured import plan as plan_module
from holdfast.bench.measured.course import Course
from holdfast.bench.measured.plan import Plan, check
from holdfast.bench.measured.ranks import Ranks, job_of
from holdfast.bench.measured.result import (
    Measurement,
    Phase,
    compare,
    decoded,
    encoded,
    reasons_against,
    timed_operations,
)
from holdfast.bench.measured.run import Phases, mlperf_notes
from holdfast.bench.workloads.mlperf import mlperf
from holdfast.cli.bench.page import measurement_page
from holdfast.cli.bench.tables import print_measurement
from holdfast.drivers.uri import parse
from holdfast.errors import HoldfastError, StorageDownError, UsageError

GB = 10**9
ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
LIMIT = Phase("write limit", GB, (1.0, 2.0, 1.0, 1.0, 1.0))
SAVE = Phase("save", GB, (2.0, 4.0, 2.0, 2.0, 2.0), (1.0,) * 5, (1 << 20,) * 5, retries=2)


def measurement(*phases: Phase) -> Measurement:
    """Return a result of these phases."""
    config = {"nbytes": GB, "runs": 5, "settle_s": 1.0, "ranks": 1}
    return Measurement("file:///x", 1.9e9, config, {"cpu": "2 × x"}, phases or (LIMIT, SAVE))


def test_rates_are_of_all_rounds_together() -> None:
    """A rate is total bytes by total time. A round of several ranks ends with the last one."""
    phase = Phase("save", GB, (1.0, 3.0))
    assert phase.rate == GB / 2
    assert phase.mean_rate == pytest.approx(GB * (1 + 1 / 3) / 2)
    assert Phase("save", 1 << 30, (1.0,), (3.0,)).cpu_s_per_gib == 3.0
    job = Phase("save", GB, (3.0, 2.5), ranks_s=((1.0, 3.0), (2.0, 2.5)))
    assert (job.first_s, job.rate) == (1.5, 2 * GB / 5.5)
    assert Phase("verify", GB, (3.0,), ranks_s=((3.0, 0.0),)).first_s == 3.0


def test_a_phase_has_a_share_of_its_limit_by_rounds() -> None:
    """A slow round of both does not change it. A limit has none, nor has a phase without one."""
    found = measurement()
    assert found.share("save") == 0.5
    assert found.share("write limit") is None
    assert measurement(SAVE).share("save") is None


def test_json_comes_back() -> None:
    """The hash of a result depends on its settings, so that like is compared with like."""
    limits = {"write limit": "O_DIRECT, 8 threads"}
    found = replace(measurement(), limits=limits, invalid={"save": ("too short",)})
    text = encoded(found)
    assert decoded(text, "x") == found
    document = json.loads(text)
    assert document["phases"][1]["share"] == 0.5
    other = replace(found, config={**found.config, "runs": 6})
    assert other.config_hash != found.config_hash == document["config_hash"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"version": 2}', encoded(measurement()).replace("2.0", "0.0")],
    ids=["empty", "list", "object", "version", "no time"],
)
def test_other_files_are_refused_by_name(text: str) -> None:
    """The error names the file."""
    with pytest.raises(UsageError, match=r"^here\.json is not a result"):
        decoded(text, "here.json")


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ((1.0, 1.1, 1.0, 1.2, 1.1), None),
        ((0.05,) * 5, "too short"),
        ((1.0, 1.0), "only 2 rounds"),
        ((1.0, 1.0, 1.6), "from 1.00 to 1.60 s"),
        ((1.0, 1.05, 1.2, 1.35, 1.4), "times drift"),
        ((1.4, 1.35, 1.2, 1.05, 1.0), "times drift"),
    ],
)
def test_reasons_against_a_phase(seconds: tuple[float, ...], said: str | None) -> None:
    """Each reason is named. A steady phase has none."""
    found = reasons_against([Phase("save", GB, seconds)], busy_before=0.0, cold_shares={})
    if said is None:
        assert found == {}
    else:
        assert said in "; ".join(found["save"])


def test_reads_from_a_cache_and_a_busy_machine_are_invalid() -> None:
    """A busy machine invalidates the whole result."""
    load = Phase("load", GB, (1.0,) * 5)
    shares: Mapping[str, float] = {"load": 0.25}
    found = reasons_against([load], busy_before=0.5, cold_shares=shares)
    busy = "50% of the processors were busy before it began"
    assert found == {"load": ("75% of it came from a cache",), "": (busy,)}
    assert reasons_against([load], busy_before=0.1, cold_shares={"load": 1.01}) == {}


def slower(found: Measurement, times: float) -> Measurement:
    """Return the result with every round that many times as long."""
    phases = [replace(p, seconds=tuple(s * times for s in p.seconds)) for p in found.phases]
    return replace(found, phases=tuple(phases))


def test_results_are_compared_with_confidence() -> None:
    """Half the speed is significant; the noise between rounds is not."""
    steady = measurement(Phase("save", GB, (1.0, 1.02, 0.98, 1.01, 0.99)))
    noisy = measurement(Phase("save", GB, (1.0, 1.5, 0.7, 1.3, 0.8)))
    (half,) = compare(steady, slower(steady, 2))
    assert half.ratio == pytest.approx(0.5)
    assert half.low <= half.ratio <= half.high
    assert (half.verdict, half.is_slower(0.05)) == ("slower", True)
    (same,) = compare(noisy, slower(noisy, 1.1))
    assert (same.verdict, same.is_slower(0.05)) == ("no difference shown", False)
    (faster,) = compare(slower(steady, 2), steady)
    assert faster.verdict == "faster"
    assert compare(steady, slower(steady, 2)) == [half]
    assert compare(steady, measurement(LIMIT)) == []


@pytest.mark.parametrize(("times", "status"), [(1.0, 0), (2.0, 1)])
def test_compare_exits_with_its_verdict(times: float, status: int, tmp_path: Path) -> None:
    """The status is 1 if B is slower, as a gate of CI needs."""
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    found = measurement(Phase("save", GB, (1.0, 1.02, 0.98, 1.01, 0.99)))
    a.write_text(encoded(found))
    b.write_text(encoded(slower(found, times)))
    document = run_json("bench", "compare", a, b, status=status)
    assert document["slower"] == (["save"] if status else [])
    printed = run("bench", "compare", a, b, status=status).stdout
    assert ("slower by more than 5%" in printed) == bool(status)


REFUSED = [
    ("compare a.json", "two results"),
    ("compare none.json none.json", "cannot be read"),
    ("one two", "at a time"),
    ("x --size 1KiB", "too little"),
    ("x --runs 0", "measure nothing"),
    ("x --size 900TiB", "host memory"),
    ("x --ranks 0", "0 ranks"),
    ("x --peer nobody", "no peer is called"),
    ("x --workload raw --part-sizes 0", "below 1"),
    ("x --workload raw --part-sizes 2GiB", "larger than the object"),
    ("x --workload raw --size 900TiB", "would be stored"),
    ("x --workload raw --size 1TiB --part-sizes 8GiB", "of host memory"),
    ("x --workload raw --ranks 8", "use one process"),
    ("x --tune --forget", "exclude each other"),
    ("x --tune --html x.html", "go with neither"),
    ("x --tune --time-limit 100ms", "too short for tuning"),
    ("x --workload llama3-8b --model llama3-8b", "exclude each other"),
    ("x --workload gpt-2", "not known"),
    ("x --model gpt-2", "not known"),
    ("x --model llama3-8b --optimizer sgd", "not known"),
    ("x --model llama3-8b --layers 33", "has 32"),
    ("x --optimizer adam", "needs --model"),
    ("x --model llama3-8b --tensors 9", "goes with --size"),
    ("x --size 1KiB --tensors 1000", "do not fit in"),
    ("x --tensors 0", "out of range"),
    ("x --entropy 0", "not a kind of content"),
    ("x --simulate", "Give --ranks 8"),
    ("x --simulate --ranks 0", "0 ranks"),
    ("x --simulate --ranks 9 --workload llama3-8b", "has 8 processes, not 9"),
    ("x --simulate --ranks 100000 --model llama3-8b", "shards"),
    ("x --simulate --ranks 8 --size 900TiB", "too many to name"),
    ("compare a b --slower 120%", "argument --slower: '120%' is not a share"),
    ("x --size much", "argument --size: 'much' is not a size"),
    ("x --time-limit 90", "argument --time-limit: '90' is not a duration"),
    ("x --workload raw --part-sizes 4MiB,much", "argument --part-sizes: 'much' is not a size"),
    ("x --workload raw --concurrencies 1,two", "'two' is not a whole number"),
]


@pytest.mark.parametrize(("arguments", "said"), REFUSED)
def test_bad_arguments_are_refused_before_any_io(
    arguments: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status is 2, and neither data nor a profile is written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("HOLDFAST_CONFIG")
    assert said in run("bench", *arguments.split(), status=2).stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert not (tmp_path / "x").exists()


def test_a_disk_is_not_filled(tmp_path: Path) -> None:
    """A plan that exceeds the free space is refused, and so is a folder that cannot be written."""
    with pytest.raises(UsageError, match="would be stored in"):
        check(Plan(f"file://{tmp_path}", 1 << 20, 1), free=lambda folder: 3 << 20)
    check(Plan(f"file://{tmp_path}", 1 << 20, 1), free=lambda folder: 6 << 20)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(HoldfastError):
        check(Plan(f"file://{tmp_path}/file/below", 1 << 20, 1))


@pytest.mark.nightly(4)
@pytest.mark.parametrize("workload", ["lora", "everything"])
def test_incremental_saves_are_measured(tmp_path: Path, workload: str) -> None:
    """They replace their base, and write the changes of the workload."""
    arguments = ["bench", tmp_path, "--size", "16MiB", "--runs", "2", "--workload", workload]
    found = decoded(run(*arguments, "--json", status=1).stdout, "x")
    assert "overwrite" not in found.by_name
    assert found.share("incremental save") is not None
    assert str(found.config["workload"]).endswith(f", {workload}")
    written, stored = re.findall(r"[0-9,]{5,}", found.notes[0])
    share = int(written.replace(",", "")) / int(stored.replace(",", ""))
    assert share < 0.2 if workload == "lora" else share == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly(4)
def test_a_storage_is_measured(tmp_path: Path) -> None:
    """Document and page have all phases, which are too short to be valid; nothing is left."""
    page = tmp_path / "page.html"
    arguments = ["bench", tmp_path / "s", "--size", "4MiB", "--runs", "1", "--tensors", "64"]
    arguments += ["--entropy", "50%", "--peer", "dcp,torchsave", "--driver-alone"]
    printed = run(*arguments, "--json", "--html", page, status=1)
    assert "round 1: save: " in printed.stderr
    assert "INVALID: " in printed.stderr
    document = json.loads(printed.stdout)
    found = decoded(printed.stdout, "x")
    assert [phase.name for phase in found.phases] == [
        *("write limit", "write alone", "save", "async save", "overwrite"),
        *("save: DCP", "save: torch.save", "async save: DCP"),
        *("read limit", "read alone", "load", "verify", "load: DCP", "load: torch.save"),
        *("prune", "delete"),
    ]
    without = {phase["name"] for phase in document["phases"] if phase["share"] is None}
    assert without == {"write limit", "read limit", "prune", "delete"}
    assert set(found.limits) == {"write limit", "read limit"}
    config = found.config
    assert (config["nbytes"], config["peers"]) == (4 << 20, "dcp,torchsave")
    assert (config["workload"], config["content"]) == ("64 tensors of 64.0 KiB", "0.5")
    save, load = found.by_name["save"], found.by_name["load"]
    assert save.operations["write"].nbytes >= save.nbytes
    latency = save.operations["write"].quantiles_s
    assert 0 < latency["p50"] <= latency["p99"]
    assert load.read_amplification == pytest.approx(1, rel=0.05)
    for name in ("async save", "async save: DCP"):
        assert 0 < found.by_name[name].stall_s[0] < found.by_name[name].seconds[0]
    assert all(found.invalid[name] for name in ("save", "load"))
    assert list((tmp_path / "s").iterdir()) == []
    text = page.read_text()
    assert "INVALID: " in text
    assert "<script" not in text


@pytest.mark.clocked
@pytest.mark.parametrize("storage", ["s3://bucket/x?endpoint=http://{}", "hdfs://{}/x"])
def test_a_silent_storage_fails_soon(monkeypatch: pytest.MonkeyPatch, storage: str) -> None:
    """A server accepts connections and never answers: no step waits for longer than its limit."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setattr(plan_module, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = storage.format(f"127.0.0.1:{silent.getsockname()[1]}")
        began_s = time.monotonic()
        with pytest.raises(StorageDownError):
            check(Plan(uri, 1 << 20, 1))
    assert time.monotonic() - began_s < 15


def test_percentiles_are_times_of_operations() -> None:
    """They are exact if each operation was timed, or else the end of a bucket."""
    found = timed_operations([number / 1000 for number in range(1, 101)], GB)
    assert found.quantiles_s == {"p50": 0.05, "p90": 0.09, "p99": 0.099, "longest": 0.1}
    assert (found.count, sum(found.histogram)) == (100, 100)
    assert replace(found, exact_s=()).quantiles_s["longest"] == 2.0**-3
    read = Phase("read", GB, (1.0,), operations={"stat": found, "read": found})
    assert read.data_operations == found
    assert replace(read, operations={"stat": found}).data_operations is None


class _Interrupted(list[float]):
    """A list that is interrupted by a Ctrl-C on append."""

    def append(self, _: float) -> None:
        signal.raise_signal(signal.SIGINT)


def test_a_save_in_the_background_ends_before_an_interrupted_measurement() -> None:
    """Nothing is deleted under a running save, which would report an error at exit."""
    uri = f"memory://{uuid.uuid4().hex}?faults=delay:1,delay_s:0.02"
    plan = Plan(uri, 1 << 20, 1)
    course = Course(plan, Ranks(), lambda line: None)
    course.note("async save").stall_s = _Interrupted()
    phases = Phases(parse(uri), {"x": torch.ones(3)}, plan, course)
    background = next(each for each in phases.writing() if each.name == "async save")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            background.run()
    finally:
        signal.signal(signal.SIGINT, before)
    assert [c.problem for c in holdfast.list_checkpoints(uri)] == [None]


@pytest.mark.parametrize(
    ("variables", "job"),
    [
        ({}, (0, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4"}, (3, 4)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2)),
    ],
)
def test_launchers_define_the_rank(variables: Mapping[str, str], job: tuple[int, int]) -> None:
    """torchrun, Open MPI and descendants of MPICH set different variables."""
    assert job_of({**variables, **ADDRESS}) == job


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT do not say"),
        ({"RANK": "2", "WORLD_SIZE": "2", **ADDRESS}, "contradict each other"),
        ({"PMI_RANK": "x", "PMI_SIZE": "2", **ADDRESS}, "not a number"),
    ],
)
def test_a_job_that_cannot_meet_is_refused(variables: Mapping[str, str], said: str) -> None:
    """The error comes before any rank waits for another."""
    with pytest.raises(UsageError, match=said):
        job_of(variables)


def test_time_has_a_limit() -> None:
    """A round that has begun is finished; no other begins."""
    said: list[str] = []
    plan = Plan("file:///x", 1 << 20, runs=50, limit_s=1e-6)
    course = Course(plan, Ranks(), said.append)
    (phase,) = course.run([Contestant("save", lambda: None)], lambda name: GB)
    assert (len(phase.seconds), phase.nbytes) == (1, GB)
    assert [line.partition(": ")[0] for line in said] == ["round 1"]


def test_departures_from_the_rules_of_mlperf_are_notes(capsys: Any) -> None:
    """One process always departs. A result keeps and shows the notes; other workloads have none."""
    notes = mlperf_notes(Plan("file:///x", 13 << 30, 5, mlperf("llama3-8b")))
    assert "1 of 8 processes save a part of llama3-8b: not comparable" in notes[0]
    assert mlperf_notes(Plan("file:///x", 1 << 30, 5)) == ()
    found = replace(measurement(), notes=notes)
    assert decoded(encoded(found), "x") == found
    print_measurement(found)
    assert f"NOTE: {notes[0]}" in capsys.readouterr().out
    assert "not comparable" in measurement_page(found)
