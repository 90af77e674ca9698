"""``holdfast bench``: what figures mean, when they are not to be believed, and how two results are
held against each other."""

from __future__ import annotations

import csv
import io
import json
import signal
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.bench_job import assert_interrupted_cleanly
from support.given import Serve

import holdfast
from holdfast.bench.measured import plan as plan_module
from holdfast.bench.measured.comparability import mlperf_notes
from holdfast.bench.measured.comparison import compare
from holdfast.bench.measured.course import Course
from holdfast.bench.measured.observed import Operations
from holdfast.bench.measured.phases import Phases
from holdfast.bench.measured.plan import Plan, check
from holdfast.bench.measured.ranks import Ranks, job_of
from holdfast.bench.measured.result import Measurement, Phase, decoded, encoded
from holdfast.bench.measured.run import measured
from holdfast.bench.measured.validity import reasons_against
from holdfast.bench.workloads.mlperf import mlperf
from holdfast.cli import app
from holdfast.cli.bench.driver_command import Output, status_of
from holdfast.cli.bench.page import measurement_page
from holdfast.cli.bench.tables import csv_text, print_measurement
from holdfast.drivers.memory import MemoryDriver
from holdfast.drivers.uri import parse
from holdfast.errors import HoldfastError, StorageDownError, UsageError

GB = 10**9
ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
LIMIT = Phase("write limit", GB, (1.0, 2.0, 1.0, 1.0, 1.0))
SAVE = Phase("save", GB, (2.0, 4.0, 2.0, 2.0, 2.0), (1.0,) * 5, (1 << 20,) * 5, retries=2)


def measurement(*phases: Phase) -> Measurement:
    """A result of these phases."""
    config = {"nbytes": GB, "runs": 5, "settle_s": 1.0, "ranks": 1}
    return Measurement("file:///x", 1.9e9, config, {"cpu": "2 × x"}, phases or (LIMIT, SAVE))


def test_rates_are_of_all_rounds_together() -> None:
    """Total bytes by total time, which no fast round can raise as it raises a mean of rates."""
    phase = Phase("save", GB, (1.0, 3.0))
    assert phase.rate == GB / 2
    assert phase.mean_rate == pytest.approx(GB * (1 + 1 / 3) / 2)
    assert Phase("save", 1 << 30, (1.0,), (3.0,)).cpu_s_per_gib == 3.0


def test_a_phase_is_held_against_its_limit_round_by_round() -> None:
    """A slow round of both says nothing against either; a limit has none, nor has a phase whose
    limit was not measured."""
    found = measurement()
    assert found.share("save") == 0.5
    assert found.share("write limit") is None
    assert measurement(SAVE).share("save") is None


def test_json_comes_back() -> None:
    """And names what was asked for, so that like is compared with like."""
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
    """Not with a traceback."""
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
def test_what_speaks_against_a_phase(seconds: tuple[float, ...], said: str | None) -> None:
    """Each reason is said, and nothing is said against a steady one."""
    found = reasons_against([Phase("save", GB, seconds)], busy_before=0.0, cold_shares={})
    if said is None:
        assert found == {}
    else:
        assert said in "; ".join(found["save"])


def test_reads_from_a_cache_and_a_busy_machine_are_said() -> None:
    """The latter against all of it."""
    load = Phase("load", GB, (1.0,) * 5)
    shares: Mapping[str, float] = {"load": 0.25}
    found = reasons_against([load], busy_before=0.5, cold_shares=shares)
    assert found == {
        "load": ("75% of it came from a cache",),
        "": ("50% of the processors were busy before it began",),
    }
    assert reasons_against([load], busy_before=0.1, cold_shares={"load": 1.01}) == {}


def slower(found: Measurement, times: float) -> Measurement:
    """The same, with every round of every phase that much longer."""
    phases = [replace(p, seconds=tuple(s * times for s in p.seconds)) for p in found.phases]
    return replace(found, phases=tuple(phases))


def test_two_results_are_compared_with_their_confidence() -> None:
    """Half as fast is shown; what rounds of the same phase differ by is not."""
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
def test_compare_ends_with_its_verdict(
    times: float, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1 where B is slower: for a gate of CI."""
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    found = measurement(Phase("save", GB, (1.0, 1.02, 0.98, 1.01, 0.99)))
    a.write_text(encoded(found))
    b.write_text(encoded(slower(found, times)))
    assert app.run(["bench", "compare", str(a), str(b), "--json"]) == status
    document = json.loads(capsys.readouterr().out)
    assert document["slower"] == (["save"] if status else [])
    assert app.run(["bench", "compare", str(a), str(b)]) == status
    assert ("slower by more than 5%" in capsys.readouterr().out) == bool(status)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["compare", "a.json"], "two results"),
        (["compare", "none.json", "none.json"], "cannot be read"),
        (["one", "two"], "at a time"),
        (["x", "--size", "much"], "not a size"),
        (["x", "--size", "1KiB"], "too little"),
        (["x", "--runs", "0"], "measure nothing"),
        (["x", "--size", "900TiB"], "host memory"),
        (["x", "--ranks", "0"], "0 ranks"),
        (["x", "--warm-ups", "-1"], "not a number of warm-up rounds"),
        (["x", "--time-limit", "90"], "not a duration"),
        (["compare", "a", "b", "--slower", "120%"], "not a share"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_written(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With status 2."""
    monkeypatch.chdir(tmp_path)
    assert app.run(["bench", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_disk_is_not_filled(tmp_path: Path) -> None:
    """What would not fit is refused, with what is free."""
    with pytest.raises(UsageError, match="would be stored in"):
        check(Plan(f"file://{tmp_path}", 1 << 20, 1), free=lambda folder: 3 << 20)
    check(Plan(f"file://{tmp_path}", 1 << 20, 1), free=lambda folder: 6 << 20)
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_written_is_said_at_once(tmp_path: Path) -> None:
    """By the storage's own error."""
    (tmp_path / "file").write_text("")
    with pytest.raises(HoldfastError):
        check(Plan(f"file://{tmp_path}/file/below", 1 << 20, 1))


def test_a_storage_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All phases, in a document, as lines and as a page; nothing is left. So few bytes in one round
    are not to be believed, which the status says."""
    page, lines = tmp_path / "page.html", tmp_path / "lines.csv"
    arguments = ["bench", str(tmp_path / "s"), "--size", "4MiB", "--runs", "1"]
    assert app.run([*arguments, "--json", "--html", str(page), "--csv", str(lines)]) == 1
    captured = capsys.readouterr()
    assert "round 1: save: " in captured.err
    found = decoded(captured.out, "x")
    assert [phase.name for phase in found.phases] == [
        "write limit",
        "save",
        "async save",
        "overwrite",
        "read limit",
        "load",
        "verify",
        "prune",
        "delete",
    ]
    save, load = found.by_name["save"], found.by_name["load"]
    assert save.operations["write"].nbytes >= save.nbytes
    assert 0 < save.operations["write"].quantile_s(0.5) <= save.operations["write"].quantile_s(0.99)
    assert load.read_amplification == pytest.approx(1, rel=0.05)
    assert 0 < found.by_name["async save"].stall_s[0] < found.by_name["async save"].seconds[0]
    assert all(found.invalid[name] for name in ("save", "load"))
    assert (tmp_path / "s").exists()
    assert list((tmp_path / "s").iterdir()) == []
    assert "INVALID" in page.read_text()
    rows = list(csv.DictReader(lines.read_text().splitlines()))
    assert [row["phase"] for row in rows] == [phase.name for phase in found.phases]
    assert float(rows[1]["seconds"]) == found.by_name["save"].seconds[0]


@pytest.mark.clocked
@pytest.mark.parametrize("storage", ["s3://bucket/x?endpoint=http://{}", "hdfs://{}/x"])
def test_a_storage_that_does_not_answer_is_told_soon(
    monkeypatch: pytest.MonkeyPatch, storage: str
) -> None:
    """A server that takes connections and says nothing: neither the request, nor its end, nor the
    driver's is waited for any longer."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setattr(plan_module, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = storage.format(f"127.0.0.1:{silent.getsockname()[1]}")
        began_s = time.monotonic()
        with pytest.raises(StorageDownError):
            check(Plan(uri, 1 << 20, 1))
    assert time.monotonic() - began_s < 15


def test_timeouts_may_be_whole_numbers_to_a_driver() -> None:
    """As to those of fsspec, which would refuse a fraction before it asks the server."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(StorageDownError):
        check(Plan(f"fsspec+ftp://127.0.0.1:{port}/x", 1 << 20, 1))


def test_programs_are_told_why_a_result_is_invalid(capsys: pytest.CaptureFixture[str]) -> None:
    """On stderr: stdout has the document."""
    assert status_of({}, Output(None, None, True)) == 0
    assert status_of({"save": ("it drifts", "too short")}, Output(None, None, True)) == 1
    assert capsys.readouterr().err == "holdfast: INVALID: save: it drifts; too short\n"


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP])
def test_a_scheduler_or_a_closed_terminal_interrupts(serve: Serve, how: signal.Signals) -> None:
    """Like a Ctrl-C, after which all that was written is deleted."""

    class Ending(MemoryDriver):
        async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
            """See :meth:`Driver.put`."""
            interrupt = signal.getsignal(how)
            assert callable(interrupt)  # or the signal would end the tests
            interrupt(how, None)

    uri = serve(Ending)
    before = signal.signal(how, signal.SIG_DFL)  # nohup ignores it
    try:
        assert app.run(["bench", uri, "--size", "1MiB"]) == 130
        assert signal.getsignal(how) == signal.SIG_DFL
    finally:
        signal.signal(how, before)


class _Interrupted(list[float]):
    """Is interrupted by a Ctrl-C wherever something is noted."""

    def append(self, _: float) -> None:
        signal.raise_signal(signal.SIGINT)


def test_a_save_in_the_background_ends_before_an_interrupted_measurement() -> None:
    """Nothing is deleted under it, of which it would complain after the last word."""
    uri = f"memory://{uuid.uuid4().hex}?faults=delay:1,delay_s:0.02"
    plan = Plan(uri, 1 << 20, 1)
    ranks = Ranks()
    course = Course(plan, ranks, lambda line: None)
    course.note("async save").stall_s = _Interrupted()
    phases = Phases(parse(uri), {"x": torch.ones(3)}, 12, plan, ranks, course)
    background = next(each for each in phases.writing() if each.name == "async save")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            background.run()
    finally:
        signal.signal(signal.SIGINT, before)
    assert [c.problem for c in holdfast.list_checkpoints(uri)] == [None]


@pytest.mark.drill  # two ranks that are interrupted are in every run
def test_an_interrupted_measurement_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C in the middle of a round."""
    assert_interrupted_cleanly(tmp_path)


def test_lines_and_page_of_a_result() -> None:
    """A line a round; the page says what speaks against it."""
    found = replace(measurement(), invalid={"save": ("it drifts",), "": ("busy",)})
    rows = list(csv.reader(io.StringIO(csv_text(found))))
    assert len(rows) == 1 + 10
    assert rows[1] == ["write limit", "1", str(GB), "1.0", "", ""]
    page = measurement_page(found)
    assert "INVALID: save: it drifts" in page
    assert "INVALID: all of it: busy" in page
    assert "<script" not in page


def test_ranks_of_a_phase_are_one_job() -> None:
    """It has ended when the last rank has; the first one is named beside it."""
    ranks_s = ((1.0, 3.0), (2.0, 2.5))
    phase = Phase("save", GB, (3.0, 2.5), ranks_s=ranks_s)
    assert phase.first_s == 1.5
    assert phase.rate == 2 * GB / 5.5
    assert Phase("verify", GB, (3.0,), ranks_s=((3.0, 0.0),)).first_s == 3.0


@pytest.mark.parametrize(
    ("variables", "job"),
    [
        ({}, (0, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4", **ADDRESS}, (3, 4)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", **ADDRESS}, (1, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", **ADDRESS}, (1, 2)),
    ],
)
def test_launchers_say_who_a_process_is(variables: Mapping[str, str], job: tuple[int, int]) -> None:
    """torchrun, Open MPI and what follows MPICH, each by variables of its own."""
    assert job_of(variables) == job


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT do not say"),
        ({"RANK": "2", "WORLD_SIZE": "2", **ADDRESS}, "contradict each other"),
        ({"PMI_RANK": "x", "PMI_SIZE": "2", **ADDRESS}, "not a number"),
    ],
)
def test_a_job_that_cannot_meet_is_refused(variables: Mapping[str, str], said: str) -> None:
    """Before any rank waits for another."""
    with pytest.raises(UsageError, match=said):
        job_of(variables)


def test_rounds_that_warm_up_do_not_count_and_time_has_a_limit(tmp_path: Path) -> None:
    """A round that has begun is finished; no other one is begun."""
    said: list[str] = []
    plan = Plan(f"file://{tmp_path}", 1 << 20, runs=50, warm_ups=1, limit_s=1e-6)
    found = measured(plan, said.append)
    assert all(len(phase.seconds) == 1 for phase in found.phases)
    assert sum(line.startswith("round 1: save") for line in said) == 2
    assert sum(line.startswith("round 2") for line in said) == 0


def test_a_run_of_mlperfs_checkpoint_says_where_it_departs_from_the_rules(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Alone it always does; as notes, which a result keeps and shows. Other workloads have none."""
    plan = Plan("file:///x", 13 << 30, 5, mlperf("llama3-8b"))
    notes = mlperf_notes(plan)
    assert "1 of 8 processes save a part of llama3-8b: not comparable" in notes[0]
    assert "only 1 on a host, of 4 processes" in notes[1]
    assert "5 checkpoints are written, not 10" in notes[2]
    assert mlperf_notes(replace(plan, runs=10), (8,)) == ()
    assert mlperf_notes(Plan("file:///x", 1 << 30, 5)) == ()
    found = replace(measurement(), notes=notes)
    assert decoded(encoded(found), "x") == found
    print_measurement(found)
    assert f"NOTE: {notes[0]}" in capsys.readouterr().out
    assert "not comparable" in measurement_page(found)


def test_requests_cost_what_the_store_charges() -> None:
    """By round; nothing is said without prices, or where nothing was counted."""
    none = (0,) * 32
    operations = {
        "create": Operations(2, 0, none),
        "write": Operations(20, GB, none),
        "commit": Operations(2, 0, none),
        "stat": Operations(4, 0, none),
        "delete": Operations(8, 0, none),
    }
    save = Phase("save", GB, (1.0, 1.0), operations=operations)
    found = measurement(LIMIT, save)
    assert found.cost_usd(save) is None
    priced = replace(found, config={**found.config, "prices": {"put_usd": 0.5, "get_usd": 0.25}})
    assert priced.cost_usd(save) == 0.5 * 12 + 0.25 * 2
    assert priced.cost_usd(LIMIT) is None
