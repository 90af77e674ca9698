"""kill -9 of trainers whose saves are written by their savers, and of the savers."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.aftermath import check, check_next_save, some
from support.bits import difference
from support.fresh import first_seed
from support.savers import (
    for_any_size,
    pid_of_saver,
    save_and_die_at,
    save_as_rank,
    until_savers_ended,
)
from support.victims import spawned, state_of_step, tuned_state

import holdfast
from holdfast.storage.saver import client

WAIT_S = 60.0
POINTS = 8
"""Number of points, of about ninety. HOLDFAST_TEST_CRASH_POINTS=all tries all."""


@pytest.mark.timeout(300)
def test_a_save_is_committed_although_its_trainer_is_killed(tmp_path: Path) -> None:
    """Once a saver has the image, the checkpoint appears, wherever in the save the trainer dies,
    also in its own commit. The saver then ends, and the next save removes all leftovers."""
    process, pipe = spawned(save_and_die_at, str(tmp_path / "counted"), 1, 0, "counted")
    process.join(WAIT_S)
    until_savers_ended("counted")
    for at in some(range(1, pipe.recv() + 10), POINTS, first_seed()):
        uri, mark = tmp_path / str(at), f"{tmp_path}/{at}"
        holdfast.save(uri, state_of_step(1000 + at))
        process, pipe = spawned(save_and_die_at, str(uri), 2000 + at, at, mark)
        process.join(WAIT_S)
        until_savers_ended(mark)
        before = [] if process.exitcode == 0 else pipe.recv()
        has_begun_to_commit = any(label.startswith("open .fate") for label in before)
        is_certain = process.exitcode == 0 or has_begun_to_commit
        check(uri, {2000 + at} if is_certain else {1000 + at, 2000 + at})
        check_next_save(uri, 3000 + at)


@pytest.mark.timeout(300)
def test_an_incremental_save_is_committed_although_its_trainer_is_killed(tmp_path: Path) -> None:
    """The checkpoint keeps the data that its saver has borrowed, also without the base."""
    base = tmp_path / "base"
    holdfast.save(base, tuned_state(1))
    arguments = (str(tmp_path / "counted"), 2, 0, "counted", str(base))
    process, pipe = spawned(save_and_die_at, *arguments)
    process.join(WAIT_S)
    until_savers_ended("counted")
    found = []
    for at in some(range(1, pipe.recv() + 10), POINTS, first_seed()):
        uri, mark = tmp_path / str(at), f"{tmp_path}/{at}"
        process, pipe = spawned(save_and_die_at, str(uri), 2, at, mark, str(base))
        process.join(WAIT_S)
        until_savers_ended(mark)
        if (uri / "manifest.safetensors").exists():
            found.append(uri)
        else:
            assert process.exitcode == -signal.SIGKILL
            assert not any(label.startswith("open .fate") for label in pipe.recv())
    shutil.rmtree(base)
    for uri in found:
        assert difference(tuned_state(2), holdfast.load(uri)) is None
        with holdfast.open(uri) as checkpoint:
            assert checkpoint.verify().ok
            manifest = checkpoint._manifest
            assert manifest.increments == 1
            assert manifest.extents is not None
    assert len(found) > 1


@pytest.fixture
def saving(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Return a folder for saves by savers that are killed in between."""
    for_any_size(monkeypatch)
    monkeypatch.setattr(client, "_state", client._State())
    yield tmp_path / "saved"
    saver = client._state.saver
    if saver is not None:
        saver.end()


@pytest.mark.parametrize(
    "delay_s",
    [0.25, *(pytest.param(s, marks=pytest.mark.nightly(4)) for s in (0.0, 0.1, 0.4, 0.6))],
)
def test_a_killed_saver_is_replaced(saving: Path, delay_s: float) -> None:
    """Wherever it dies, the save is written again. Training and later saves continue."""
    slow = f"file://{saving}?faults=seed:1,delay:1,delay_s:0.05"
    holdfast.async_save(slow, state_of_step(1)).wait()
    first = pid_of_saver()
    handle = holdfast.async_save(slow, state_of_step(2))
    killer = threading.Timer(delay_s, os.kill, (first, signal.SIGKILL))
    killer.start()
    handle.wait()
    killer.join()
    check(saving, {2})
    time.sleep(0.1)
    holdfast.async_save(slow, state_of_step(3)).wait()
    assert pid_of_saver() != first
    check(saving, {3})


def test_a_stopped_saver_is_replaced(saving: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A saver that hangs is replaced, too. A save does not wait for it forever."""
    monkeypatch.setattr(client, "SILENT_S", 0.3)
    monkeypatch.setattr(client, "BEAT_S", 0.1)
    slow = f"file://{saving}?faults=seed:1,delay:1,delay_s:0.05"
    handle = holdfast.async_save(slow, state_of_step(1))
    until_s = time.monotonic() + WAIT_S
    while client._state.saver is None:
        assert time.monotonic() < until_s
        time.sleep(0.001)
    first = pid_of_saver()
    os.kill(first, signal.SIGSTOP)
    handle.wait()
    check(saving, {1})
    assert not Path(f"/proc/{first}").exists()


@pytest.mark.parametrize("killed", [(0, 1), (1, 0)])
def test_the_savers_of_a_job_commit_without_it(tmp_path: Path, killed: tuple[int, int]) -> None:
    """All ranks are killed, one after the other, while their images are written. The savers meet in
    the storage."""
    uri = f"file://{tmp_path}/at?faults=seed:1,delay:1,delay_s:0.3"
    store = str(tmp_path / "store")
    ranks = [spawned(save_as_rank, uri, rank, 2, store) for rank in range(2)]
    for _, pipe in ranks:
        assert pipe.recv() == "handed over"
    for rank in killed:
        process, _ = ranks[rank]
        process.kill()
        process.join(WAIT_S)
        time.sleep(0.5)
    until_savers_ended(store)
    found = holdfast.load(tmp_path / "at")
    assert found["step"] == 2
    assert all((found[f"x{rank}"] == rank).all() for rank in range(2))
    assert not list((tmp_path / "at").rglob("*.fragment"))
    with holdfast.open(tmp_path / "at") as checkpoint:
        assert checkpoint.verify().ok
