"""Incremental saves to a disk that shares blocks: killed, without a base, without room, many."""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.aftermath import some
from support.bits import difference
from support.disks import new_disk, run, take
from support.inside import after_grace
from support.victims import (
    copy_run_and_die_at,
    save_increment_and_die_at,
    spawned,
    tapped,
    tuned_state,
)

import holdfast

WAIT_S = 60.0
POINTS = 8
FILES_MAX = 40
FROZEN_NBYTES = 4 << 20
"""Bytes that are equal in all steps. About a fifth of that changes."""


@pytest.fixture(scope="module", params=["xfs", "ext4"])
def disk(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Yield the folder of a file system whose files can share blocks, or have several names."""
    with new_disk(request.param, tmp_path_factory.mktemp("incremental")).mounted() as made:
        yield made.folder


@pytest.fixture
def folder(disk: Path) -> Iterator[Path]:
    """Yield an empty folder on it."""
    folder = disk / "run"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def check(uri: Path, step: int) -> None:
    """Check that this checkpoint is whole, and of this step."""
    assert difference(tuned_state(step), holdfast.load(uri)) is None
    with holdfast.open(uri) as checkpoint:
        assert checkpoint.verify().ok


def steps(folder: Path) -> list[int]:
    """Return the steps of all committed checkpoints, each of which is whole."""
    found = [path.parent for path in sorted(folder.glob("step-*/manifest.safetensors"))]
    for uri in found:
        check(uri, int(uri.name.removeprefix("step-")))
    return [int(uri.name.removeprefix("step-")) for uri in found]


def test_a_run_killed_in_an_incremental_save_goes_on_from_the_newest_checkpoint(
    folder: Path, seed: int
) -> None:
    """It resumes, and borrows from that one, wherever its process was killed."""
    process, pipe = spawned(save_increment_and_die_at, str(folder / "counted"), 0)
    process.join(WAIT_S)
    resumed = set()
    for at in some(range(1, pipe.recv() + 10), POINTS, seed):
        uri = folder / str(at)
        process, _ = spawned(save_increment_and_die_at, str(uri), at)
        process.join(WAIT_S)
        assert process.exitcode == -9
        newest = steps(uri)[-1]
        state = tuned_state(0)
        with pytest.MonkeyPatch.context() as patch:
            after_grace(patch)
            with holdfast.Checkpointer(uri, every=1, incremental=True, lazy=False) as run_:
                assert run_.resume(state) == newest
                assert difference(state, tuned_state(newest)) is None
                handle = run_.step(newest + 1, tuned_state(newest + 1))
                assert handle is not None
                report = handle.wait()
        assert report.base.endswith(f"step-{newest:08}")
        assert report.borrowed_nbytes >= FROZEN_NBYTES // 2
        assert steps(uri)[-1] == newest + 1
        # Telemetry that a committed step never got is small, and is deleted with it.
        assert not [path for path in uri.rglob(".*") if "telemetry" not in path.name]
        shutil.rmtree(uri)
        resumed.add(newest)
    assert resumed == {1, 2}


def _all(base: Path) -> None:
    shutil.rmtree(base)


def _images(base: Path) -> None:
    shutil.rmtree(base / "data")


def _manifest(base: Path) -> None:
    (base / "manifest.safetensors").unlink()


@pytest.mark.parametrize("remove", [_all, _images, _manifest])
def test_a_base_removed_by_hand_at_any_moment_harms_no_save(
    remove: Callable[[Path], None], folder: Path, seed: int
) -> None:
    """The save never fails, and keeps its borrowed data."""
    calls, borrowed = 0, []

    def saved(at: int) -> Any:
        base, uri = folder / f"base-{at}", folder / f"step-{at}"
        holdfast.save(base, tuned_state(1))

        def before(number: int, label: str) -> None:
            nonlocal calls
            calls = number
            if number == at:
                remove(base)

        with tapped(before):
            report = holdfast.save(uri, tuned_state(2), base=base)
        check(uri, 2)
        shutil.rmtree(uri)
        shutil.rmtree(base, ignore_errors=True)
        return report

    assert saved(0).borrowed_nbytes
    for at in some(range(1, calls + 1), POINTS, seed):
        borrowed.append(saved(at).borrowed_nbytes)
    assert borrowed[-1] > 0  # in the last call, everything was copied already


@pytest.mark.nightly(16)
def test_a_copy_of_a_run_that_is_killed_is_resumed(folder: Path, seed: int) -> None:
    """All checkpoints at the destination are whole, wherever the copy was killed. The same command
    completes the run, and sends shared data once. Then all but one are deleted, in any order."""
    chance, source = random.Random(seed), folder / "source"
    with holdfast.Checkpointer(source, every=1, incremental=True, lazy=False) as run_:
        run_.resume({})
        for step in (1, 2, 3):
            run_.step(step, tuned_state(step))
            run_.wait()
    process, pipe = spawned(copy_run_and_die_at, str(source), str(folder / "0"), 0)
    process.join(WAIT_S)
    found = set()
    for at in some(range(1, pipe.recv() + 1), POINTS, seed):
        uri = folder / str(at)
        process, _ = spawned(copy_run_and_die_at, str(source), str(uri), at)
        process.join(WAIT_S)
        if process.exitcode == 0:  # fewer calls than were counted
            continue
        assert process.exitcode == -9
        there = steps(uri)
        with pytest.MonkeyPatch.context() as patch:
            after_grace(patch)
            report = holdfast.copy(source, uri, recursive=True)
        for copy in report.checkpoints:
            assert copy.step not in there or copy.sent_nbytes == copy.borrowed_nbytes == 0
            assert copy.step == 1 or copy.sent_nbytes <= copy.nbytes - FROZEN_NBYTES // 2
        assert steps(uri) == [1, 2, 3]
        assert [len(list(path.iterdir())) for path in uri.glob("step-*/data")] == [1, 1, 1]
        assert not [path for path in uri.rglob(".*") if "telemetry" not in path.name]
        order = chance.sample([1, 2, 3], 3)
        for number, left in itertools.pairwise(order):
            shutil.rmtree(uri / f"step-{number:08}")
            check(uri / f"step-{left:08}", left)
        shutil.rmtree(uri)
        found.add(len(there))
    assert found >= {0, 1, 2}


def used_nbytes(folder: Path) -> int:
    """Return the used space of a disk after all writes."""
    run("sync", "-f", folder)
    room = os.statvfs(folder)
    return (room.f_blocks - room.f_bfree) * room.f_frsize


@pytest.mark.timeout(300)
def test_an_incremental_save_needs_room_for_what_has_changed_only(folder: Path, seed: int) -> None:
    """Without that room, the save fails, and the earlier checkpoint stays whole."""
    base, uri, other = folder / "1", folder / "2", folder.parent / "other"
    holdfast.save(base, tuned_state(1))
    fits = []
    try:
        for free in (*some(range(0, 1 << 20, 65536), 3, seed), 3 << 20):
            run("sync", "-f", folder)
            room = os.statvfs(folder)
            take(other, room.f_bavail * room.f_frsize - free)
            try:
                holdfast.save(uri, tuned_state(2), base=base)
            except holdfast.FullError as error:
                assert "Free some space" in str(error)
                fits.append(False)
            else:
                fits.append(True)
                check(uri, 2)
            check(base, 1)
            other.unlink()
            shutil.rmtree(uri, ignore_errors=True)
    finally:
        other.unlink(missing_ok=True)
    assert fits[0] is False
    assert fits[-1] is True  # of 5 MB
    assert holdfast.save(uri, tuned_state(2), base=base).borrowed_nbytes


@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [20, pytest.param(300, marks=pytest.mark.nightly(60))])
def test_neither_files_nor_space_grow_in_a_long_run(count: int, folder: Path) -> None:
    """Three checkpoints are retained, which share unchanged data."""
    before_nbytes = used_nbytes(folder)
    seen = []
    with holdfast.Checkpointer(
        folder, every=1, keep=3, incremental=True, lazy=False, when_busy="wait"
    ) as run_:
        run_.resume({})
        for step in range(1, count + 1):
            handle = run_.step(step, tuned_state(step))
            assert handle is not None
            report = handle.wait()
            is_whole = step % 50 == 1  # bounds the harm of one damaged block
            assert (report.borrowed_nbytes > FROZEN_NBYTES // 2) != is_whole
            if step >= 5 and step % 5 == 0:
                run_.wait()
                files = sum(path.is_file() for path in folder.rglob("*"))
                seen.append((files, used_nbytes(folder) - before_nbytes))
    assert max(files for files, _ in seen) <= FILES_MAX
    own_nbytes = sum(t.nbytes for t in tuned_state(1).values() if isinstance(t, torch.Tensor))
    assert max(nbytes for _, nbytes in seen) < 3 * own_nbytes
    assert steps(folder) == [count - 2, count - 1, count]
