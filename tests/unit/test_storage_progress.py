"""Long loads and saves say how far they are."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import fresh_uri

import holdfast

CHUNK_NBYTES = 16 << 20


@pytest.fixture
def uri() -> str:
    """A checkpoint of three chunks."""
    uri = fresh_uri()
    holdfast.save(uri, {"w": torch.arange(3 * CHUNK_NBYTES // 4, dtype=torch.float32), "x": 1})
    return uri


def rising(calls: list[tuple[int, int]], wanted_nbytes: int) -> bool:
    """Return whether these calls describe one finished operation; blocks are read whole."""
    done = [done for done, _ in calls]
    (total_nbytes,) = {total for _, total in calls}
    return (
        done == sorted(done)
        and done[-1] == total_nbytes
        and 0 <= total_nbytes - wanted_nbytes < 1 << 20
    )


def test_a_load_says_how_far_it_is(uri: str) -> None:
    """A load reports progress, with or without a target, on a thread that may call Holdfast."""
    for into in ({"w": torch.zeros(3 * CHUNK_NBYTES // 4), "x": 0}, None):
        calls: list[tuple[int, int]] = []
        threads: set[str] = set()

        def progress(done: int, total: int, calls: list = calls, threads: set = threads) -> None:  # type: ignore[type-arg]
            calls.append((done, total))
            threads.add(threading.current_thread().name)
            with holdfast.open(uri) as checkpoint:
                assert checkpoint.nbytes == 3 * CHUNK_NBYTES

        holdfast.load(uri, into=into, progress=progress)
        assert rising(calls, 3 * CHUNK_NBYTES)
        assert threads == {"holdfast-progress"}


@pytest.mark.parametrize("compression", [None, "lz4"])
def test_a_save_says_how_far_it_is(compression: Any) -> None:
    """A save reports the bytes written, in the foreground and in the background."""
    state = {"w": torch.zeros(3 * CHUNK_NBYTES // 4), "x": 1}
    for save in (holdfast.save, holdfast.async_save):
        calls: list[tuple[int, int]] = []
        threads: set[str] = set()

        def progress(done: int, total: int, calls: list = calls, threads: set = threads) -> None:  # type: ignore[type-arg]
            calls.append((done, total))
            threads.add(threading.current_thread().name)

        done = save(fresh_uri(), state, progress=progress, compression=compression)
        if isinstance(done, holdfast.SaveHandle):
            done.wait()
        assert rising(calls, 3 * CHUNK_NBYTES)
        assert threads == {"holdfast-progress"}


def test_what_the_callback_of_a_save_raises_ends_it() -> None:
    """An error in the callback ends the save and leaves the old checkpoint."""
    uri, state = fresh_uri(), {"w": torch.zeros(3 * CHUNK_NBYTES // 4)}
    holdfast.save(uri, {"x": 1})

    def progress(done: int, total: int) -> None:
        raise ZeroDivisionError("of the user")

    with pytest.raises(ZeroDivisionError, match="of the user"):
        holdfast.save(uri, state, progress=progress)


def test_a_failure_that_is_raised_is_not_logged_as_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A save raises its error without logging it; a Checkpointer continues and logs it once."""
    (tmp_path / "file").touch()
    state = {"w": torch.ones(10)}
    with pytest.raises(holdfast.HoldfastError):
        holdfast.save(tmp_path / "file" / "c", state)
    assert caplog.records == []
    holdfast.save(tmp_path / "run" / "step-00000001", state, step=1)
    checkpoints = holdfast.Checkpointer(tmp_path / "run", grace_s=None)
    with checkpoints:
        assert checkpoints.resume(state) == 1
        checkpoints.save(2, state)
        checkpoints.wait()
        caplog.clear()
        (tmp_path / "run" / "step-00000003").touch()
        checkpoints.save(3, state)
        checkpoints.wait()
    assert len([record for record in caplog.records if "not saved" in record.getMessage()]) == 1
    assert not [record for record in caplog.records if "the save to" in record.getMessage()]
