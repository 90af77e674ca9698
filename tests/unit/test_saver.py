"""Savers: processes that write the asynchronous saves of a trainer."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.aftermath import check
from support.savers import MARK, for_any_size, pid_of_saver, savers_of, until_savers_ended
from support.victims import state_of_step

import holdfast
from holdfast.drivers.layers.metrics import snapshots
from holdfast.errors import DeadlineError, StorageError
from holdfast.storage.operations.saving import saver_save
from holdfast.storage.pipeline.image_writer import WrittenImage
from holdfast.storage.ranks.hosts import BUDGET_MIN_NBYTES, share_of
from holdfast.storage.saver import client, image_memory, promises
from holdfast.storage.state.capture.write_tracking import write_tracker

SAVES = """
import os, signal, sys, torch, holdfast
from support.savers import saver_save
from support.victims import state_of_step
saver_save.NBYTES_MIN = 1
uri = sys.argv[1]
handle = holdfast.async_save(uri, state_of_step(1))
"""


@pytest.fixture(scope="module", autouse=True)
def own_saver() -> Iterator[None]:
    """Let these tests share one saver, which ends after them. A saver of other tests may be larger,
    because it has loaded drivers."""
    before, client._state = client._state, client._State()
    yield
    saver, client._state = client._state.saver, before
    if saver is not None:
        saver.end()


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let savers write small images, too."""
    for_any_size(monkeypatch)


def stages_here(report: holdfast.SaveReport | None) -> bool:
    """Return whether threads of this process have written the image."""
    assert report is not None
    return report.stages["capture"].count > 1


@pytest.mark.parametrize("compression", [None, "lz4"])
def test_a_saver_writes_what_threads_write(tmp_path: Path, compression: str | None) -> None:
    """The file is the same, the stages are recorded, and the memory is reused."""
    image_memory.release_memory()
    for step in (1, 2):
        handle = holdfast.async_save(tmp_path / "a", state_of_step(step), compression=compression)  # type: ignore[arg-type]
        seen: list[tuple[int, int]] = []
        handle.wait()
        assert handle.report is not None
        assert {"capture", "open", "hash", "write", "upload_commit"} <= handle.report.stages.keys()
        assert handle.report.cpu_s > 0
        assert len(image_memory._free) == 1
        assert not seen
    check(tmp_path / "a", {2})
    holdfast.save(tmp_path / "b", state_of_step(2), compression=compression)  # type: ignore[arg-type]
    images = [next((tmp_path / at / "data").glob("*/0.*")) for at in ("a", "b")]
    assert images[0].read_bytes() == images[1].read_bytes()
    holdfast.release_memory()
    assert not image_memory._free


def test_requests_of_a_saver_count_as_those_of_its_trainer(tmp_path: Path) -> None:
    """A save by a saver makes as many requests as one by threads."""

    def requests() -> dict[str, int]:
        found = snapshots().get("file://")
        return {} if found is None else {name: m.count for name, m in found.operations.items()}

    uri = f"file://{tmp_path}/at?metrics=on"
    before = requests()
    holdfast.save(uri, state_of_step(1))
    between = requests()
    holdfast.async_save(uri, state_of_step(2)).wait()
    after = requests()
    assert after["write"] - between["write"] == between["write"] - before.get("write", 0) > 0


def tuned(step: int) -> dict[str, object]:
    """Return a state that is mostly the same in all steps."""
    frozen = torch.arange(2 << 20, dtype=torch.int32)
    return {"step": step, "frozen": frozen, "tuned": torch.full((200_000,), step)}


def tuned_for_steps(folder: Path) -> list[holdfast.SaveReport]:
    """Save a few steps, each with the previous one as its base."""
    reports = []
    for step in (1, 2, 3):
        uri = folder / str(step)
        handle = holdfast.async_save(uri, tuned(step), base=folder / str(step - 1))
        handle.wait()
        assert handle.report is not None
        reports.append(handle.report)
        assert torch.equal(holdfast.load(uri)["tuned"], tuned(step)["tuned"])
        with holdfast.open(uri) as checkpoint:
            assert checkpoint.verify().ok
    return reports


def test_a_saver_borrows_what_has_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It borrows as threads do, and the report says so."""
    found = tuned_for_steps(tmp_path / "a")
    monkeypatch.setenv("HOLDFAST_SAVER", "off")
    expected = tuned_for_steps(tmp_path / "b")
    assert [stages_here(report) for report in found] == [False, False, False]
    assert [report.why_whole for report in found] == ["the earlier checkpoint is gone", "", ""]
    assert [report.base[-3:] for report in found] == ["", "a/1", "a/2"]
    for report, other in zip(found, expected, strict=True):
        assert report.borrowed_nbytes == other.borrowed_nbytes
        assert report.stored_nbytes == other.stored_nbytes
    assert found[-1].borrowed_nbytes > 7 << 20


@pytest.mark.skipif(write_tracker() is None, reason="writes cannot be tracked on this machine")
@pytest.mark.usefixtures("no_write_history")
def test_what_is_known_to_be_unchanged_is_not_handed_to_a_saver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads write the rest, so that nothing else is copied. The kernel reports unchanged
    memory after three saves, which a saver has written."""
    state = tuned(0)
    by_saver, plain = list[int](), saver_save.SaverSave.write

    async def write(self: saver_save.SaverSave, *args: Any) -> WrittenImage:
        by_saver.append(step)
        return await plain(self, *args)

    monkeypatch.setattr(saver_save.SaverSave, "write", write)
    with holdfast.Checkpointer(tmp_path, every=1, incremental=True) as run:
        run.resume({})
        for step in range(1, 6):
            state["tuned"].fill_(step)  # type: ignore[attr-defined]
            if step == 5:  # most of it changes
                state["frozen"].add_(1)  # type: ignore[attr-defined]
            handle = run.step(step, state)
            assert handle is not None
            handle.wait()
            assert (holdfast.load(tmp_path / f"step-{step:08}")["tuned"] == step).all()
    assert 4 not in by_saver
    assert {1, 5} <= set(by_saver)


def test_the_state_may_change_once_captured(tmp_path: Path) -> None:
    """This also holds while the saver writes."""
    state = state_of_step(1)
    uri = f"file://{tmp_path}/slow?faults=seed:1,delay:1,delay_s:0.05"
    handle = holdfast.async_save(uri, state)
    state["x"].zero_()
    assert not handle.durable.done()
    handle.wait()
    check(tmp_path / "slow", {1})


def test_errors_are_raised_as_they_are(tmp_path: Path) -> None:
    """An error in the saver has its class, URI, key and rank, and the next save works."""
    uri = f"file://{tmp_path}/at?faults=seed:1,error:1&retries=0"
    with pytest.raises(StorageError) as caught:
        holdfast.async_save(uri, state_of_step(1)).wait()
    assert caught.value.uri
    holdfast.async_save(tmp_path / "at", state_of_step(2)).wait()
    check(tmp_path / "at", {2})


def test_a_deadline_ends_the_write(tmp_path: Path) -> None:
    """The save fails in time and leaves nothing. Its memory serves the next save."""
    uri = f"file://{tmp_path}/at?faults=seed:1,delay:1,delay_s:1"
    began_s = time.monotonic()
    with pytest.raises(DeadlineError):
        holdfast.async_save(uri, state_of_step(1), timeout_s=2.5).wait()
    assert time.monotonic() - began_s < 30
    holdfast.async_save(tmp_path / "at", state_of_step(2)).wait()
    check(tmp_path / "at", {2})
    assert len(image_memory._free) == 1


@pytest.mark.parametrize("why", ["off", "memory", "options", "budget", "process", "unknown"])
def test_threads_write_where_a_saver_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    """The save succeeds; the log says why if that is not obvious."""
    uri, options = f"file://{tmp_path}/at", {}
    monkeypatch.setattr(client, "_state", client._State())
    if why == "off":
        monkeypatch.setenv("HOLDFAST_SAVER", "off")
    elif why == "memory":
        monkeypatch.setattr(image_memory, "available_nbytes", lambda: 0)
        monkeypatch.setattr(image_memory, "_warned", False)
        image_memory.release_memory()
    elif why == "process":
        monkeypatch.setattr(client, "_PROGRAM", ("/nowhere/python",))
    elif why == "unknown":
        monkeypatch.setattr(client, "_PROGRAM", (sys.executable, "-c", "raise SystemExit(3)"))
    elif why == "budget":
        options["budget_nbytes"] = 32 << 20
    count = 80 << 20 if why == "memory" else 10 << 20
    state = {"step": 1, "x": torch.arange(count, dtype=torch.int32)}
    with caplog.at_level(logging.WARNING):
        if why == "options":
            uri = "memory://threads"
        handle = holdfast.async_save(uri, state, **options)  # type: ignore[arg-type]
        handle.wait()
    assert stages_here(handle.report)
    if why == "memory":
        assert handle.report is not None
        assert handle.report.peak_nbytes <= saver_save.BUDGET_NBYTES
    assert bool(caplog.records) == (why in ("memory", "process", "unknown"))
    assert client._state.saver is None or not client._state.saver.is_alive
    assert torch.equal(holdfast.load(uri)["x"], state["x"])


def ended(tmp_path: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run a trainer, and wait for its saver."""
    mark = str(tmp_path / "at")
    environment = os.environ | {MARK: mark, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = [sys.executable, "-c", SAVES + code, mark]
    run = subprocess.run(
        program, env=environment, timeout=120, capture_output=True, text=True, check=False
    )
    until_savers_ended(mark)
    return run


def test_a_trainer_that_ends_finishes_its_save(tmp_path: Path) -> None:
    """It needs no wait, no guard of ``__main__``, and prints no warning."""
    run = ended(tmp_path, "")
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    check(tmp_path / "at", {1})


def test_a_forked_child_has_a_saver_of_its_own(tmp_path: Path) -> None:
    """Both save at the same time. The end of the child does not end the parent's saver."""
    code = """
from holdfast.storage.saver import client
handle.wait()
parents = client._state.saver.pid
childs = state_of_step(2)  # torch's threads do not survive a fork
pid = os.fork()
if not pid:
    holdfast.async_save(uri + "-child", childs).wait()
    assert client._state.saver.pid != parents
    os._exit(0)
holdfast.async_save(uri, state_of_step(3)).wait()
assert os.waitpid(pid, 0)[1] == 0
holdfast.async_save(uri, state_of_step(4)).wait()
assert client._state.saver.pid == parents
"""
    run = ended(tmp_path, code)
    assert run.returncode == 0, run.stderr
    check(tmp_path / "at", {4})
    check(tmp_path / "at-child", {2})


def test_a_saver_survives_what_ends_its_trainer(tmp_path: Path) -> None:
    """Examples are Ctrl-C and SIGTERM to the whole process group. A forked child that lives on does
    not keep the saver alive."""
    code = """
handle.wait()
uri = f"file://{uri}?faults=seed:1,delay:1,delay_s:0.1"
handle = holdfast.async_save(uri, state_of_step(2))
import time
while not os.path.exists(next(iter(__import__("glob").glob(sys.argv[1] + "/data/*/attempt.json")), "/x")): time.sleep(0.01)
time.sleep(1.0)
if not os.fork():
    os.setsid()
    os.closerange(0, 3)
    time.sleep(20)
    os._exit(0)
os.killpg(os.getpgid(0), signal.SIGKILL)
"""
    mark = str(tmp_path / "at")
    environment = os.environ | {MARK: mark, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = [sys.executable, "-c", SAVES + code, mark]
    run = subprocess.Popen(program, env=environment, start_new_session=True)
    assert run.wait(120) == -signal.SIGKILL
    until_savers_ended(mark)
    check(tmp_path / "at", {2})


def test_an_idle_saver_is_small_and_ends_with_its_trainer(tmp_path: Path) -> None:
    """It holds no image, and hardly more than the interpreter with numpy (25 MiB)."""
    holdfast.async_save(tmp_path / "at", state_of_step(1)).wait()
    pid = pid_of_saver()
    resident = [
        int(line.split()[1]) << 10
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmRSS")
    ]
    assert resident[0] <= 48 << 20
    run = ended(tmp_path / "b", "handle.wait(); os.kill(os.getpid(), signal.SIGKILL)")
    assert run.returncode == -signal.SIGKILL
    assert not savers_of(str(tmp_path / "b"))


def test_small_images_are_written_by_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither they nor a blocking save would gain from another process."""
    monkeypatch.setattr(client, "_state", client._State())
    holdfast.save(tmp_path / "at", state_of_step(1))
    monkeypatch.setattr(saver_save, "NBYTES_MIN", 32 << 20)
    holdfast.async_save(tmp_path / "at", state_of_step(1)).wait()
    assert client._state.saver is None


@pytest.fixture
def promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of a host's promises."""
    monkeypatch.setenv("HOLDFAST_KEEPER_DIR", str(tmp_path / "private"))
    return tmp_path / "private" / "promises.json"


def test_ranks_of_a_host_heed_what_others_take(promised: Path) -> None:
    """Memory promised to a living process is not available to another, until it is taken."""
    code = "from holdfast.storage.saver.promises import promise\npromise(60, lambda: 100)\ninput()"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    other = subprocess.Popen([sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE)
    until_s = time.monotonic() + 60
    while not (promised.exists() and promised.read_text()):
        assert time.monotonic() < until_s
        time.sleep(0.01)
    with pytest.raises(MemoryError, match="40 bytes are available, since others take 60"):
        promises.promise(41, lambda: 100)
    promises.promise(40, lambda: 100)
    with pytest.raises(MemoryError):
        promises.promise(1, lambda: 100)
    promises.keep_promise()
    other.kill()
    other.communicate(timeout=60)
    promises.promise(100, lambda: 100)
    promises.keep_promise()
    assert promised.read_text() == "[]"


@pytest.mark.parametrize("text", ["no JSON", "[1, 2]", '[["a", 1, 2]]', "[[1, 2]]", "{}", "null"])
def test_damaged_promises_are_none(promised: Path, text: str) -> None:
    """They are replaced."""
    promised.parent.mkdir(mode=0o700)
    promised.write_text(text)
    promises.promise(5, lambda: 5)
    with pytest.raises(MemoryError):
        promises.promise(1, lambda: 5)


def test_promises_of_strangers_are_not_read(promised: Path) -> None:
    """A folder that other users can write to is not used, and nothing fails."""
    promised.parent.mkdir()
    promised.parent.chmod(0o777)
    promises.promise(5, lambda: 5)
    promises.promise(5, lambda: 5)
    assert not promised.exists()


def test_ranks_of_a_host_share_a_budget(caplog: pytest.LogCaptureFixture) -> None:
    """Each gets at least what it needs; then the log says that it is short."""
    assert share_of(1 << 30, 8) == 128 << 20
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert share_of(128 << 20, 8) == share_of(128 << 20, 8) == BUDGET_MIN_NBYTES
    assert len(caplog.records) == 1
