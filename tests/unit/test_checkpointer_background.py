"""Test the Checkpointer's background work: whatever it raises, saves are counted and awaited."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import fresh_uri
from support.drivers import HookedDriver
from support.given import Serve

import holdfast
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.operations.location import Place
from holdfast.storage.runtime.engine import start
from holdfast.storage.training.retention import Keep, Retention

pytestmark = pytest.mark.clocked


def state(step: int) -> dict[str, Any]:
    """A state that says which step it is of."""
    return {"x": torch.full((1000,), float(step)), "step": step}


def steps(uri: str | Path) -> list[int | None]:
    """The steps that are there."""
    return [c.step for c in holdfast.list_checkpoints(uri)]


class Breakable:
    """Storage in memory in which no image can be begun while there is an ``error``."""

    def __init__(self, serve: Serve) -> None:
        self.error: BaseException | None = None
        self.uri = serve(lambda path: HookedDriver(MemoryDriver(path), before=self._before))

    async def _before(self, operation: str, key: str) -> None:
        if operation == "create" and self.error is not None:
            raise self.error


@pytest.fixture
def storage(serve: Serve) -> Breakable:
    """Storage that works until it is broken."""
    return Breakable(serve)


METRICS = [
    torch.tensor(0.5),
    torch.tensor([0.5]),
    np.float32(0.5),
    np.array(0.5),
    np.int64(1),
    1,
    True,
    0.5,
]


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: type(metric).__name__)
def test_a_metric_is_any_number(metric: Any, tmp_path: Path) -> None:
    """Tensors and numpy numbers count like Python's."""
    with holdfast.Checkpointer(tmp_path, every=1, keep=Keep(best=1), when_busy="wait") as ckpt:
        for step in (1, 2, 3):
            ckpt.step(step, state(step), metric=metric)
    assert (ckpt.counters.saved, ckpt.counters.pruned, ckpt.counters.failed) == (3, 2, 0)
    assert steps(tmp_path) == [3]
    assert json.loads((tmp_path / "metrics.json").read_text())["3"] == float(metric)


class Odd:
    """A number that cannot be had."""

    def __float__(self) -> float:
        raise RuntimeError("not today")


@pytest.mark.parametrize(
    "metric",
    ["0.5", [0.5], torch.zeros(2), np.zeros(3), {}, 1j, Odd()],
    ids=["text", "list", "vector", "array", "dict", "complex", "odd"],
)
@pytest.mark.parametrize("call", ["step", "save"])
def test_a_metric_that_is_no_number_is_said_at_the_call(metric: Any, call: str) -> None:
    """By an error that names it, whatever ``on_error`` says; and the next call saves."""
    with holdfast.Checkpointer(fresh_uri(), every=1) as ckpt:
        with pytest.raises(holdfast.UsageError, match="metric is"):
            getattr(ckpt, call)(1, state(1), metric=metric)
        ckpt.save(2, state(2), metric=0.5)
    assert ckpt.counters.saved == 1


def test_the_value_of_a_metric_is_asked_for_where_a_save_begins() -> None:
    """At other steps training would wait for the device to no purpose."""
    asked = []

    class Loss:
        def __float__(self) -> float:
            asked.append(len(asked))
            return 0.5

    with holdfast.Checkpointer(fresh_uri(), every=3) as ckpt:
        for step in range(1, 7):
            ckpt.step(step, state(step), metric=Loss())
            ckpt.wait()
    assert len(asked) == ckpt.counters.saved == 2


def test_a_metric_counts_once_its_step_is_durable(storage: Breakable) -> None:
    """A save that fails leaves no metric, though there may be an older checkpoint of its step."""
    with holdfast.Checkpointer(storage.uri, keep=Keep(best=1)) as ckpt:
        ckpt.save(1, state(1), metric=5.0)
        ckpt.wait()
        storage.error = holdfast.StorageDownError("away")
        ckpt.save(2, state(2), metric=1.0)
        ckpt.wait()
        storage.error = None
    folder = MemoryDriver(storage.uri.removeprefix("given://"))
    assert json.loads(start(folder.get("metrics.json")).result(20)) == {"1": 5.0}


ODD = [
    TypeError("odd"),
    asyncio.CancelledError(),
    SystemExit(3),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", ODD, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["note", "apply"])
def test_whatever_retention_raises_the_next_save_goes_on(
    error: BaseException,
    where: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is logged; saves are counted, and waited for."""

    async def fails(*_: Any) -> None:
        raise error

    uri = fresh_uri()
    with monkeypatch.context() as patch:
        patch.setattr(Retention, where, fails)
        with holdfast.Checkpointer(uri, every=1, keep=1, when_busy="wait") as ckpt:
            for step in (1, 2):
                ckpt.step(step, state(step), metric=0.5)
            ckpt.wait()
            assert (ckpt.counters.saved, ckpt.counters.in_flight) == (2, 0)
            assert steps(uri)[-1] == 2
    assert caplog.text.count("could not be") == 2
    assert holdfast.load(f"{uri}/step-00000002")["step"] == 2


@pytest.mark.parametrize("error", ODD, ids=lambda error: type(error).__name__)
def test_whatever_a_save_raises_it_is_counted_and_the_next_one_goes_on(
    error: BaseException, storage: Breakable, caplog: pytest.LogCaptureFixture
) -> None:
    """Also what ends the loop of events that all saves run in."""
    with holdfast.Checkpointer(storage.uri, every=1, when_busy="wait") as ckpt:
        ckpt.step(1, state(1))
        ckpt.wait()
        storage.error = error
        ckpt.step(2, state(2))
        ckpt.wait()
        assert (ckpt.counters.saved, ckpt.counters.failed) == (1, 1)
        storage.error = None
        ckpt.step(3, state(3))
        ckpt.wait()
    assert (ckpt.counters.saved, ckpt.counters.failed) == (2, 1)
    assert "step 2: not saved" in caplog.text
    assert steps(storage.uri) == [1, 3]


class Broken(logging.Handler):
    """Raises whatever is logged."""

    def emit(self, record: logging.LogRecord) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ZeroDivisionError(record.getMessage())


def test_a_log_handler_that_raises_keeps_nothing_from_being_done(
    storage: Breakable, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Saves end, well or not, are counted, and old ones are deleted; what was raised is printed."""
    caplog.set_level(logging.INFO, "holdfast")
    away = holdfast.StorageDownError("away")
    handler = Broken()
    logger = logging.getLogger("holdfast")
    logger.addHandler(handler)
    try:
        with holdfast.Checkpointer(storage.uri, every=1, keep=1, when_busy="wait") as ckpt:
            for step in (1, 2, 3, 4):
                storage.error = away if step == 3 else None
                ckpt.step(step, state(step))
                ckpt.wait()
        storage.error = away
        with pytest.raises(holdfast.StorageDownError):
            holdfast.async_save(f"{storage.uri}/other", state(5)).wait(20)
    finally:
        logger.removeHandler(handler)
    assert (ckpt.counters.saved, ckpt.counters.failed, ckpt.counters.pruned) == (3, 1, 2)
    assert steps(storage.uri) == [4]
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt()], ids=lambda error: type(error).__name__
)
def test_the_engine_survives_what_would_end_its_loop(error: BaseException) -> None:
    """Whoever waits for the task gets the error, and others theirs."""

    async def fails() -> None:
        raise error

    async def later() -> int:
        await asyncio.sleep(0.05)
        return 7

    other = start(later())
    failed = start(fails())
    assert isinstance(failed.exception(20), type(error))
    assert other.result(20) == 7


def test_wait_returns_when_old_checkpoints_are_deleted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that a save deletes which had ended when the next one began."""
    uri, go, plain = fresh_uri(), threading.Event(), Retention.apply

    async def held(self: Retention, saved: int, in_flight: Any) -> Any:
        await asyncio.to_thread(go.wait, 60)
        return await plain(self, saved, in_flight)

    monkeypatch.setattr(Retention, "apply", held)
    with holdfast.Checkpointer(uri, every=1, keep=1, when_busy="wait") as ckpt:
        for step in (1, 2, 3):
            ckpt.step(step, state(step))
        threading.Timer(0.1, go.set).start()
        ckpt.wait()
        assert (ckpt.counters.pruned, steps(uri)) == (2, [3])


def test_nothing_is_deleted_after_a_save_that_failed(storage: Breakable) -> None:
    """What is to be kept is counted from what is there, and the newest is not."""
    with holdfast.Checkpointer(storage.uri) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state(step))
    storage.error = holdfast.StorageDownError("away")
    with holdfast.Checkpointer(storage.uri, keep=1) as ckpt:
        ckpt.resume(state(0))
        ckpt.save(4, state(4))
        with pytest.raises(holdfast.StorageDownError):
            ckpt.close()
    assert steps(storage.uri) == [1, 2, 3]


def test_nothing_is_deleted_of_a_step_that_is_under_way() -> None:
    """Whoever saves it anew may have begun, and what is there is whole until that is committed."""
    uri = fresh_uri()
    for step in (1, 2, 3):
        holdfast.save(f"{uri}/step-{step:08d}", state(step))
    rules = Retention(Place.of(uri, None), Keep(last=1))
    assert [c.step for c in start(rules.apply(3, [1])).result(20).checkpoints] == [2]
    assert steps(uri) == [1, 3]
    assert [c.step for c in start(rules.apply(3, [])).result(20).checkpoints] == [1]


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_first_save_that_fails_is_raised(
    on_error: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first failure is raised regardless of ``on_error``; later ones follow it."""
    (tmp_path / "step-00000001").write_text("in the way")
    (tmp_path / "step-00000003").write_text("in the way")
    ckpt = holdfast.Checkpointer(tmp_path, every=1, on_error=on_error, when_busy="wait")
    handle = ckpt.step(1, state(1))
    assert handle is not None
    with pytest.raises(holdfast.StorageError):
        handle.wait(60)
    with pytest.raises(holdfast.StorageError):
        ckpt.wait()
    ckpt.wait()  # once
    ckpt.step(2, state(2))
    ckpt.step(3, state(3))
    if on_error == "raise":
        with pytest.raises(holdfast.StorageError):
            ckpt.close()
    else:
        ckpt.close()
    assert (ckpt.counters.saved, ckpt.counters.failed) == (1, 2)
    assert steps(tmp_path) == [2]


def test_a_run_that_was_never_saved_nor_closed_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """When its Checkpointer is collected, which is at exit at the latest."""
    (tmp_path / "step-00000001").write_text("in the way")
    ckpt = holdfast.Checkpointer(tmp_path, every=1, grace_s=None)
    ckpt.step(1, state(1))
    with pytest.raises(holdfast.StorageError):
        ckpt.wait()
    finish = ckpt._unclosed
    assert finish.atexit
    finish()
    (said,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert "never closed" in said
    assert "0 saved, 1 failed" in said


@pytest.mark.parametrize("end", ["step", "wait", "close"])
def test_a_first_save_that_fails_is_raised_by_whatever_comes_next(end: str, tmp_path: Path) -> None:
    """The next step after it has failed, or the end of the loop."""
    (tmp_path / "step-00000001").write_text("in the way")
    ckpt = holdfast.Checkpointer(tmp_path, every=100)
    handle = ckpt.save(1, state(1))
    assert handle is not None
    with pytest.raises(holdfast.StorageError):
        handle.wait(60)
    while ckpt.counters.failed == 0:  # it is counted in a moment
        threading.Event().wait(0.01)
    with pytest.raises(holdfast.StorageError):
        ckpt.step(2, state(2)) if end == "step" else getattr(ckpt, end)()
    if end != "close":
        with pytest.raises(holdfast.StorageError):
            ckpt.close()


def test_a_first_save_of_a_state_that_cannot_be_saved_is_raised_at_the_call() -> None:
    """It would not be saved later either."""
    with pytest.raises(holdfast.StateError), holdfast.Checkpointer(fresh_uri(), every=1) as ckpt:
        ckpt.step(1, {"f": print})


@pytest.mark.parametrize(
    "uri",
    ["s3://bucket/run?endpoint=http://127.0.0.1:9&retries=0", "file:///proc/holdfast/run"],
    ids=["s3", "proc"],
)
def test_storage_that_is_not_there(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong endpoint, or a path where nothing can be made, ends training at the first save."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    gone = (holdfast.StorageError, holdfast.DeadlineError)
    with pytest.raises(gone), holdfast.Checkpointer(uri, every=1, timeout_s=2) as ckpt:
        ckpt.step(1, state(1))
