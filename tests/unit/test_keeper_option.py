"""Options of keepers, the records of a run, and runs whose keepers fail."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.kept_runs import keep, keepers_below_a_folder

import holdfast
from holdfast.drivers.contract import Driver
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.arenas.client import status_of
from holdfast.storage.arenas.folder import (
    KEEPER_DIR_VARIABLE,
    KeeperFolder,
    base_folder,
    keeper_folders,
)
from holdfast.storage.arenas.hosts import KeeperHost
from holdfast.storage.arenas.label import GenerationId
from holdfast.storage.arenas.memory import available_nbytes
from holdfast.storage.arenas.numa import cpus_of
from holdfast.storage.keeper.decisions.choice import Choice
from holdfast.storage.operations.options import LoadOptions
from holdfast.storage.runtime.engine import run
from holdfast.storage.training import checkpointer, resume
from holdfast.storage.training.epochs import EPOCHS_FOLDER, Epochs, put_epochs, read_epochs
from holdfast.storage.training.memory_level import MemoryLevel
from holdfast.storage.training.run_identity import RUN_KEY, known_run_id, run_id
from holdfast.storage.training.stats import Stats

RUN = "a" * 32
ANSWERS_S = 60.0
"""Deadline of a keeper that must answer, however busy the machine is."""


@pytest.fixture
def driver() -> Iterator[MemoryDriver]:
    """Return the folder of a run."""
    made = MemoryDriver()
    yield made
    run(made.close())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": 0}, "every is 0"),
        ({"memory": "lots"}, "memory is 'lots'"),
        ({"linger": "5 parsecs"}, "linger is '5 parsecs'"),
        ({"max_bytes_per_s": "0 B"}, "nothing would ever be read"),
        ({"cpus": "all"}, "cpus is 'all'"),
        ({"cpus": "3-1"}, "ends before it begins"),
        ({"local": "nonsense://"}, "nonsense"),
    ],
)
def test_what_a_keeper_cannot_be_is_said_at_once(options: dict[str, object], said: str) -> None:
    """The error comes before any process is started."""
    with pytest.raises(holdfast.UsageError, match=said):
        holdfast.Keeper(**options)  # type: ignore[arg-type]


def test_a_checkpointer_takes_a_keeper_auto_or_none() -> None:
    """For anything else, the error names the valid values."""
    with pytest.raises(holdfast.UsageError, match="keeper is 'always'"):
        holdfast.Checkpointer("memory://x", keeper="always")  # type: ignore[arg-type]
    for keeper in (None, "auto", holdfast.Keeper(every=5)):
        holdfast.Checkpointer("memory://x", keeper=keeper).close()  # type: ignore[arg-type]


def test_options_of_a_process_are_plain_values(tmp_path: Path) -> None:
    """The process gets them through its command line, as JSON."""
    option = holdfast.Keeper(memory="2GiB", linger="90s", local=tmp_path, domain="rack 7")
    made = option.of_process(RUN)
    assert (made.host, made.budget_nbytes, made.linger_s) == ("rack 7", 2 << 30, 90.0)
    assert made.local == tmp_path.as_uri()
    assert (made.max_bytes_per_s, made.cpus) == (None, "")
    limited = holdfast.Keeper(max_bytes_per_s="2GB", cpus="0-1, 3").of_process(RUN)
    assert limited.max_bytes_per_s == 2_000_000_000
    assert cpus_of(limited.cpus) == {0, 1, 3}


def test_a_run_has_one_id(driver: MemoryDriver) -> None:
    """The id is made once, and found from then on."""
    assert run(known_run_id(driver)) is None
    made = run(run_id(driver))
    assert run(run_id(driver)) == run(known_run_id(driver)) == made


def test_a_line_that_a_later_epoch_has_left_is_not_resumed() -> None:
    """The record of epochs tells which steps a later resume has discarded."""
    epochs = Epochs().with_next(0, None).with_next(1, 40).with_next(2, 25).with_next(3, 60)
    assert epochs.begun == ((0, -1), (2, 25), (3, 60))
    assert epochs.newest == 3
    left = {
        (epoch, step)
        for epoch in range(4)
        for step in (20, 30, 50, 70)
        if epochs.has_left(GenerationId(epoch, step))
    }
    assert left == {(0, 30), (0, 50), (0, 70), (1, 30), (1, 50), (1, 70), (2, 70)}


def test_the_record_of_epochs_is_read_as_it_was_put(driver: MemoryDriver) -> None:
    """A missing record is an empty one."""
    assert run(read_epochs(driver)) == Epochs()
    epochs = Epochs().with_next(4, 7)
    run(put_epochs(driver, epochs))
    assert run(read_epochs(driver)) == epochs
    for epoch in (5, 6, 7):
        run(put_epochs(driver, epochs.with_next(epoch, 9)))
    assert run(read_epochs(driver)) == epochs.with_next(7, 9)
    assert len(driver.objects) == 2


@pytest.mark.parametrize("other", [5, 6])
def test_of_two_jobs_that_resume_at_once_the_second_is_told(
    driver: MemoryDriver, other: int
) -> None:
    """Both have read the same record. Their keepers may also know different epochs."""
    begun = Epochs().with_next(4, 7)
    run(put_epochs(driver, begun))
    run(put_epochs(driver, begun.with_next(other, 7)))
    with pytest.raises(holdfast.CoordinationError, match="another job has begun epoch 5"):
        run(put_epochs(driver, begun.with_next(5, 6)))
    assert run(read_epochs(driver)) == begun.with_next(other, 7)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", holdfast.DamagedError),
        (b"\xff", holdfast.DamagedError),
        (b"{}", holdfast.DamagedError),
        (b'{"version":1,"run":"../../x","begun":[[1,"x"]]}', holdfast.DamagedError),
        (
            b'{"version":2,"run":"' + RUN.encode() + b'","begun":[]}',
            holdfast.UnsupportedFormatError,
        ),
    ],
)
def test_damaged_and_newer_records_of_a_run_are_refused(
    driver: MemoryDriver, data: bytes, error: type[Exception]
) -> None:
    """The id of the run and its epochs are never guessed."""
    run(driver.put(RUN_KEY, data))
    run(driver.put(f"{EPOCHS_FOLDER}/00000001.json", data))
    with pytest.raises(error):
        run(run_id(driver))
    with pytest.raises(error):
        run(read_epochs(driver))


def test_keepers_have_a_folder_of_their_user_alone() -> None:
    """A folder that other users could change is refused."""
    with tempfile.TemporaryDirectory(prefix="hk") as above:  # a short path
        base = Path(above) / "base"
        folder = KeeperFolder.of(RUN, base)
        folder.make()
        assert [found.path for found in keeper_folders(base)] == [folder.path]
        base.chmod(0o755)
        with pytest.raises(holdfast.UsageError, match="open to others"):
            folder.make()
        base.chmod(0o700)
        folder.path.rmdir()
        folder.path.symlink_to(above)
        with pytest.raises(holdfast.UsageError, match="is not a folder"):
            folder.make()
        assert keeper_folders(Path(above) / "none") == []


def test_where_keepers_are_found_follows_from_the_environment() -> None:
    """The most specific variable wins."""
    assert base_folder({KEEPER_DIR_VARIABLE: "/a", "XDG_RUNTIME_DIR": "/b"}) == Path("/a")
    assert base_folder({"XDG_RUNTIME_DIR": "/b"}) == Path("/b/holdfast")
    assert base_folder({}).name.startswith("holdfast-")


def test_unusable_folders_of_keepers_are_refused(tmp_path: Path) -> None:
    """An id of a run may come from a file, and a path may be too long for a socket."""
    for odd in ("", "../" + "a" * 29, "A" * 32):
        with pytest.raises(holdfast.UsageError):
            KeeperFolder.of(odd)
    with pytest.raises(holdfast.UsageError, match=KEEPER_DIR_VARIABLE):
        KeeperFolder.of(RUN, tmp_path / ("x" * 80))


@pytest.mark.parametrize(
    ("line", "root", "names"),
    [
        ("0::/job/step", "", ("memory.max", "memory.current", "inactive_file")),
        (
            "4:cpu,memory:/job/step",
            "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_control_groups_limit_memory(
    tmp_path: Path, line: str, root: str, names: tuple[str, str, str]
) -> None:
    """A process may use the free memory of its tightest group. File cache counts as free."""
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   4000 kB\n")
    inner = groups / root / "job" / "step"
    inner.mkdir(parents=True)
    assert available_nbytes(proc, groups) == 4000 << 10
    (proc / "self" / "cgroup").write_text(f"9:pids:/job\n{line}\n")
    limit_file, used_file, reclaimable = names
    for folder, limit in ((inner, str(1 << 62)), (inner.parent, str(3 << 20))):
        (folder / limit_file).write_text(limit + "\n")
        (folder / used_file).write_text(f"{2 << 20}\n")
        (folder / "memory.stat").write_text(f"anon 5\n{reclaimable} 4096\n")
    assert available_nbytes(proc, groups) == (1 << 20) + 4096
    (inner / limit_file).write_text("5\n")
    assert available_nbytes(proc, groups) == 0


def test_a_real_control_group_limits_memory() -> None:
    """A process in a group of 64 MiB, of either version, sees that limit."""
    code = (
        "import sys; open(sys.argv[1] + '/cgroup.procs', 'w').write('0');"
        "from holdfast.storage.arenas.memory import available_nbytes; print(available_nbytes())"
    )
    for root, limit in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
        group = Path("/sys/fs/cgroup", root, f"holdfast-{os.getpid()}")
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if not (group / limit).exists():
                continue
            (group / limit).write_text(str(64 << 20))
            command = [sys.executable, "-c", code, str(group)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            assert 0 < int(done.stdout) < 64 << 20, done.stderr
            return
        finally:
            group.rmdir()
    pytest.skip("no control group can be made here")


def test_a_run_that_cannot_join_its_keepers_trains_on_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It retries after twice as many steps each time, and meanwhile saves to storage."""
    tried: list[int] = []

    def failing(memory: object, root: object, deadline_s: float) -> None:
        tried.append(step)
        raise holdfast.StorageDownError("no storage today")

    monkeypatch.setattr(checkpointer, "begin_run", failing)
    with holdfast.Checkpointer(tmp_path, every=5, keeper="auto", grace_s=None) as run_:
        for step in range(1, 20):
            run_.step(step, {"step": step})
            run_.wait()
        assert run_.counters.saved == 3
        assert run_.counters.kept == 0
    assert tried == [1, 2, 4, 8, 16]


def test_a_run_whose_first_epoch_cannot_be_recorded_keeps_later_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It joins its keeper at a later step."""
    real, tried = resume.put_epochs, list[Epochs]()

    async def failing_once(driver: Driver, epochs: Epochs) -> None:
        tried.append(epochs)
        if len(tried) == 1:
            raise holdfast.StorageDownError("no storage today")
        await real(driver, epochs)

    monkeypatch.setattr(resume, "put_epochs", failing_once)
    keeper = holdfast.Keeper(deadline_s=ANSWERS_S)
    with (
        keepers_below_a_folder(),
        holdfast.Checkpointer(tmp_path, keeper=keeper, grace_s=None) as run_,
    ):
        for step in (1, 2, 3):
            handle = run_.step(step, {"x": step})
            assert (handle is None) == (step == 1)
            run_.wait()
        assert (run_.counters.kept, run_.counters.not_kept) == (2, 1)
    assert len(tried) == 2


def test_a_folder_of_keepers_that_others_can_write_to_does_not_stop_the_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Anyone could make such a folder in /tmp. The job resumes and saves without a keeper, and says
    why."""
    with tempfile.TemporaryDirectory(prefix="hk") as base:
        os.chmod(base, 0o777)
        monkeypatch.setenv(KEEPER_DIR_VARIABLE, base)
        with holdfast.Checkpointer(tmp_path, every=2, keeper="auto", grace_s=None) as run_:
            assert run_.resume({"step": 0}) == 0
            for step in (1, 2):
                run_.step(step, {"step": step})
                run_.wait()
            assert (run_.counters.saved, run_.counters.kept) == (1, 0)
        assert os.listdir(base) == []
    assert "is open to others (mode 0777)" in caplog.text


def test_a_state_that_cannot_be_kept_is_left_out_and_said(tmp_path: Path) -> None:
    """Training continues."""
    keeper = holdfast.Keeper(deadline_s=ANSWERS_S)
    with (
        keepers_below_a_folder(),
        holdfast.Checkpointer(tmp_path, keeper=keeper, grace_s=None) as run_,
    ):
        assert run_.step(1, {"x": object()}) is None
        keep(run_, 2, {"x": 3})
        run_.wait()
        assert (run_.counters.kept, run_.counters.not_kept) == (1, 1)


def test_a_reason_that_lasts_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Warnings become ever rarer while steps are not kept, and start again after a kept one."""
    stats = Stats()
    for step in range(1000):
        stats.not_kept(step, "there is no memory for it")
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 10
    assert warned[-1].getMessage().startswith("step 511: not kept in memory (512 so far)")
    stats.kept(1000)
    stats.not_kept(1001, "there is no memory for it")
    assert caplog.records[-1].levelno == logging.WARNING
    assert stats.counters.not_kept == 1001


@pytest.mark.parametrize("stored", [False, True])
def test_a_run_whose_memory_is_damaged_does_not_begin_anew(tmp_path: Path, stored: bool) -> None:
    """It resumes from storage, or raises and leaves the keeper as it is."""

    def state(step: int) -> dict[str, object]:
        return {"a": torch.full((1000,), float(step)), "b": torch.full((1 << 20,), float(step))}

    keeper = holdfast.Keeper(deadline_s=ANSWERS_S)
    with keepers_below_a_folder():
        with holdfast.Checkpointer(tmp_path, keeper=keeper, grace_s=None) as run_:
            for step in (1, 2, 3):
                if stored and step == 1:
                    run_.save(step, state(step))
                    continue
                keep(run_, step, state(step))
        (folder,) = keeper_folders()
        before = status_of(folder)
        assert before is not None
        pid = before["pid"]
        images = []
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if os.readlink(path).startswith("/memfd:") and path.stat().st_size > 1 << 22:
                    images.append(path)
        assert len(images) >= 2
        for path in images:
            with path.open("r+b") as file:
                file.seek(3 << 20)
                file.write(b"\xff\xfe")
        into = state(0)
        with holdfast.Checkpointer(tmp_path, keeper=keeper, grace_s=None) as run_:
            if stored:
                assert run_.resume(into) == 1
                assert all(torch.equal(into[name], state(1)[name]) for name in into)  # type: ignore[arg-type]
                return
            with pytest.raises(holdfast.DamagedError, match="in memory only") as raised:
                run_.resume(into)
            assert ": 3, 2, 1" in str(raised.value)
            after = status_of(folder)
        assert after is not None
        assert (after["epoch"], after["generations"]) == (before["epoch"], before["generations"])


def test_a_resume_waits_for_a_service_that_is_being_restarted(tmp_path: Path) -> None:
    """A trainer that starts no keeper itself does not drop the steps in memory at once."""
    state = {"w": torch.arange(1000.0)}
    with keepers_below_a_folder():
        with holdfast.Checkpointer(tmp_path, keeper="auto", grace_s=None) as run_:
            keep(run_, 3, state)
        (folder,) = keeper_folders()
        hidden = f"{folder.socket}.hidden"
        os.rename(folder.socket, hidden)
        back = threading.Timer(2.0, os.rename, (hidden, folder.socket))
        back.start()
        with holdfast.Checkpointer(
            tmp_path, keeper=holdfast.Keeper(starts=False), grace_s=None
        ) as again:
            assert again.resume({"w": torch.zeros(1000)}) == 3
        back.join()


@pytest.mark.parametrize(
    ("wanted", "step", "tier", "left"),
    [
        ({"before": 6}, 5, "memory", [3]),
        ({"step": 4}, 4, "memory", [3]),
        ({"step": 3}, 3, "storage", [3]),
        ({"before": 4}, 3, "storage", [3]),
    ],
)
def test_going_back_reaches_steps_in_memory(
    tmp_path: Path, wanted: dict[str, int], step: int, tier: str, left: list[int]
) -> None:
    """They are used if storage has no newer matching step. Later steps are abandoned, in storage
    and in memory."""
    keeper = holdfast.Keeper(deadline_s=ANSWERS_S)
    with keepers_below_a_folder():
        with holdfast.Checkpointer(tmp_path, every=3, keeper=keeper, grace_s=None) as run_:
            for at in range(1, 7):
                keep(run_, at, {"w": torch.full((100,), float(at))})
        into = {"w": torch.zeros(100)}
        with holdfast.Checkpointer(tmp_path, every=3, keeper=keeper, grace_s=None) as run_:
            assert run_.resume(into, **wanted) == step
            assert run_.resumed is not None
            assert (run_.resumed.step, run_.resumed.tier) == (step, tier)
            assert set(into["w"].tolist()) == {float(step)}
        live = [one.step for one in holdfast.list_checkpoints(tmp_path) if not one.abandoned]
        assert live == left
        with holdfast.Checkpointer(tmp_path, keeper=keeper, grace_s=None) as run_:
            assert run_.resume(into) == step
            with pytest.raises(holdfast.UsageError, match="no checkpoint of step 5"):
                run_.resume(into, step=5 if step != 5 else 55)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_run_never_borrows_from_what_a_resume_has_dropped(tmp_path: Path, restarts: bool) -> None:
    """It borrows neither from an abandoned checkpoint whose step it has only in memory, nor from a
    dropped step. It borrows from the newest checkpoint that leads to its state."""
    options: dict[str, Any] = {"incremental": True, "grace_s": None}
    options["keeper"] = holdfast.Keeper(deadline_s=ANSWERS_S)
    state = {"w": torch.rand(1 << 20)}
    with keepers_below_a_folder(), contextlib.ExitStack() as opened:
        run_ = opened.enter_context(holdfast.Checkpointer(tmp_path, every=2, **options))
        for step in range(1, 5):
            keep(run_, step, state)
        opened.close()
        run_ = opened.enter_context(holdfast.Checkpointer(tmp_path, every=100, **options))
        assert run_.resume(state, step=2) == 2
        for step in (3, 4):
            keep(run_, step, state)
        if restarts:
            opened.close()
            run_ = opened.enter_context(holdfast.Checkpointer(tmp_path, every=100, **options))
            assert run_.resume(state) == 4
            assert run_.resumed is not None
            assert run_.resumed.tier == "memory"
        report = run_.save(5, state).wait(60)
    listed = {one.path: one.abandoned for one in holdfast.list_checkpoints(tmp_path)}
    assert listed == {"step-00000002": False, "step-00000004": True, "step-00000005": False}
    assert (report.base, report.why_whole) == (f"{tmp_path.as_uri()}/step-00000002", "")


def test_memory_of_a_host_that_is_gone_counts_as_damaged() -> None:
    """So a restart looks for other steps instead of failing."""
    level = MemoryLevel(holdfast.Keeper(starts=False), "memory://run/")
    run(level.join(RUN, lambda: None))
    gone = KeeperHost("gone", "domain", "127.0.0.1:1", "f" * 32)
    choice = Choice(GenerationId(0, 7), 1, (("gone",),))
    with pytest.raises(holdfast.DamagedError, match="step 7 in memory cannot be read"):
        level.load(choice, [gone], {}, LoadOptions(), set())
    level.close()
