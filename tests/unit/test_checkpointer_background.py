"""Test the Checkpointer's metrics and background work: no error stops the saves that follow."""

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
    """Return a state that contains its step."""
    return {"x": torch.full((1000,), float(step)), "step": step}


def steps(uri: str) -> list[int | None]:
    """Return the steps of the checkpoints at ``uri``."""
    return [c.step for c in holdfast.list_checkpoints(uri)]


class Breakable:
    """Storage in memory that creates no object while there is an ``error``."""

    def __init__(self, serve: Serve) -> None:
        self.error: BaseException | None = None
        self.uri = serve(lambda path: HookedDriver(MemoryDriver(path), before=self._before))

    async def _before(self, operation: str, key: str) -> None:
        if operation == "create" and self.error is not None:
            raise self.error


@pytest.fixture
def storage(serve: Serve) -> Breakable:
    """Storage that works until a test breaks it."""
    return Breakable(serve)


def test_metric_is_any_number(tmp_path: Path) -> None:
    """Tensors and numpy numbers count like Python's."""
    metrics = [torch.tensor([0.5]), np.float32(0.5), np.array(0.5), np.int64(1), True]
    with holdfast.Checkpointer(tmp_path, every=1, keep=Keep(last=9, best=9)) as ckpt:
        for step, metric in enumerate(metrics, 1):
            ckpt.step(step, state(step), metric=metric)
            ckpt.wait()
    stored = json.loads((tmp_path / "metrics.json").read_text())
    assert list(stored.values()) == [0.5, 0.5, 0.5, 1.0, 1.0]


class Odd:
    """A metric that fails when it is converted."""

    def __float__(self) -> float:
        raise RuntimeError("not today")


@pytest.mark.parametrize("call", ["step", "save"])
def test_metric_that_is_no_number_is_refused(call: str) -> None:
    """The call raises whatever ``on_error`` says, and the next one saves."""
    with holdfast.Checkpointer(fresh_uri(), every=1) as ckpt:
        for step, metric in enumerate(("0.5", torch.zeros(2), np.zeros(3), 1j, Odd()), 1):
            with pytest.raises(holdfast.UsageError, match="metric is"):
                getattr(ckpt, call)(step, state(step), metric=metric)
        ckpt.save(9, state(9), metric=0.5)
    assert ckpt.counters.saved == 1


def test_metric_is_read_only_when_a_save_begins() -> None:
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


def test_metric_counts_once_its_step_is_durable(storage: Breakable) -> None:
    """A failed save leaves no metric, even if an older checkpoint has its step."""
    with holdfast.Checkpointer(storage.uri, keep=Keep(best=1)) as ckpt:
        ckpt.save(1, state(1), metric=5.0)
        ckpt.wait()
        storage.error = holdfast.StorageDownError("away")
        ckpt.save(2, state(2), metric=1.0)
        ckpt.wait()
        storage.error = None
    folder = MemoryDriver(storage.uri.removeprefix("given://"))
    assert json.loads(start(folder.get("metrics.json")).result(20)) == {"1": 5.0}


ODD = [TypeError("odd"), asyncio.CancelledError(), SystemExit(3), KeyboardInterrupt()]


@pytest.mark.parametrize("error", ODD, ids=lambda error: type(error).__name__)
def test_saves_survive_errors_of_retention(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever retention raises is logged; saves are counted and awaited."""

    async def fails(*_: Any) -> None:
        raise error

    uri = fresh_uri()
    with monkeypatch.context() as patch:
        patch.setattr(Retention, "note", fails)
        patch.setattr(Retention, "apply", fails)
        with holdfast.Checkpointer(uri, every=1, keep=1, when_busy="wait") as ckpt:
            for step in (1, 2):
                ckpt.step(step, state(step), metric=0.5)
            ckpt.wait()
            assert (ckpt.counters.saved, ckpt.counters.in_flight) == (2, 0)
    assert caplog.text.count("its metric could not be") == 2
    assert caplog.text.count("checkpoints could not be") == 2
    assert holdfast.load(f"{uri}/step-00000002")["step"] == 2


@pytest.mark.parametrize("error", ODD, ids=lambda error: type(error).__name__)
def test_saves_survive_errors_of_a_save(
    error: BaseException, storage: Breakable, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a save raises is counted, even if it would end the event loop."""
    with holdfast.Checkpointer(storage.uri, every=1, when_busy="wait") as ckpt:
        for step in (1, 2, 3):
            storage.error = error if step == 2 else None
            ckpt.step(step, state(step))
            ckpt.wait()
    assert (ckpt.counters.saved, ckpt.counters.failed) == (2, 1)
    assert "step 2: not saved" in caplog.text
    assert steps(storage.uri) == [1, 3]


class Broken(logging.Handler):
    """A log handler that raises on all threads but the main one."""

    def emit(self, record: logging.LogRecord) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ZeroDivisionError(record.getMessage())


def test_saves_survive_errors_of_log_handlers(
    storage: Breakable, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Saves end and old ones are deleted; the handler's error is printed."""
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


def test_wait_includes_retention(monkeypatch: pytest.MonkeyPatch) -> None:
    """wait() returns once the old checkpoints of all earlier saves are deleted."""
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


def test_nothing_is_deleted_after_a_failed_save(storage: Breakable) -> None:
    """Retention counts the checkpoints that exist, and the newest is not among them."""
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


def test_nothing_is_deleted_of_a_step_in_flight() -> None:
    """A checkpoint that is being saved anew stays whole until the new one is committed."""
    uri = fresh_uri()
    for step in (1, 2, 3):
        holdfast.save(f"{uri}/step-{step:08d}", state(step))
    rules = Retention(Place.of(uri, None), Keep(last=1))
    assert [c.step for c in start(rules.apply(3, [1])).result(20).checkpoints] == [2]
    assert steps(uri) == [1, 3]
    assert [c.step for c in start(rules.apply(3, [])).result(20).checkpoints] == [1]
