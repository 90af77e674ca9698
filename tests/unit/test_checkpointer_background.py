"""The Checkpointer's metrics and background work: no error stops later saves."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.bits import fresh_uri
from support.copies import steps_at
from support.drivers import HookedDriver
from support.given import Serve

import holdfast
from holdfast import errors
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.operations.location import Place
from holdfast.storage.ranks.keys import Keys
from holdfast.storage.ranks.member import Member
from holdfast.storage.runtime.engine import start
from holdfast.storage.training import decisions
from holdfast.storage.training.decisions import Decision, Decisions
from holdfast.storage.training.load_attempts import Attempted, Outcome, verdict_of
from holdfast.storage.training.retention import Keep, Retention
from holdfast.storage.training.schedule import schedule_of

pytestmark = pytest.mark.clocked


def state(step: int) -> dict[str, Any]:
    """Return a state that contains its step."""
    return {"x": torch.full((1000,), float(step)), "step": step}


class Breakable:
    """Storage in memory that creates no object while it has an ``error``."""

    def __init__(self, serve: Serve) -> None:
        self.error: BaseException | None = None
        self.uri = serve(lambda path: HookedDriver(MemoryDriver(path), before=self._before))

    async def _before(self, operation: str, key: str) -> None:
        if operation == "create" and self.error is not None:
            raise self.error


@pytest.fixture
def storage(serve: Serve) -> Breakable:
    """Return storage that works until a test breaks it."""
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
    """The call raises regardless of ``on_error``, and the next one saves."""
    with holdfast.Checkpointer(fresh_uri(), every=1) as ckpt:
        for step, metric in enumerate(("0.5", torch.zeros(2), np.zeros(3), 1j, Odd()), 1):
            with pytest.raises(holdfast.UsageError, match="metric is"):
                getattr(ckpt, call)(step, state(step), metric=metric)
        ckpt.save(9, state(9), metric=0.5)
    assert ckpt.counters.saved == 1


def test_metric_is_read_only_when_a_save_begins() -> None:
    """At other steps, training would wait for the device in vain."""
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
    """All errors of retention are logged. Saves are counted and awaited."""

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
    """All errors of a save are counted, even one that would end the event loop."""
    with holdfast.Checkpointer(storage.uri, every=1, when_busy="wait") as ckpt:
        for step in (1, 2, 3):
            storage.error = error if step == 2 else None
            ckpt.step(step, state(step))
            ckpt.wait()
    assert (ckpt.counters.saved, ckpt.counters.failed) == (2, 1)
    assert "step 2: not saved" in caplog.text
    assert steps_at(storage.uri) == [1, 3]


class Broken(logging.Handler):
    """A log handler that raises on all threads except the main one."""

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
    assert steps_at(storage.uri) == [4]
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
        assert (ckpt.counters.pruned, steps_at(uri)) == (2, [3])


def test_nothing_is_deleted_after_a_failed_save(storage: Breakable) -> None:
    """Retention counts only existing checkpoints, and the newest one is missing."""
    with holdfast.Checkpointer(storage.uri) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state(step))
    storage.error = holdfast.StorageDownError("away")
    with holdfast.Checkpointer(storage.uri, keep=1) as ckpt:
        ckpt.resume(state(0))
        ckpt.save(4, state(4))
        with pytest.raises(holdfast.StorageDownError):
            ckpt.close()
    assert steps_at(storage.uri) == [1, 2, 3]


def test_nothing_is_deleted_of_a_step_in_flight() -> None:
    """A checkpoint that is being replaced stays whole until the new one is committed."""
    uri = fresh_uri()
    for step in (1, 2, 3):
        holdfast.save(f"{uri}/step-{step:08d}", state(step))
    rules = Retention(Place.of(uri, None), Keep(last=1))
    assert [c.step for c in start(rules.apply(3, [1])).result(20).checkpoints] == [2]
    assert steps_at(uri) == [1, 3]
    assert [c.step for c in start(rules.apply(3, [])).result(20).checkpoints] == [1]


DEADLINE_S = 1.0
WORLD = 3


class Ranks:
    """The ranks of a job, each in its own thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.here = threading.local()
        store = dist.HashStore()
        self.members = [Member(Keys(store, "job"), rank, WORLD, start) for rank in range(WORLD)]
        self.pool = ThreadPoolExecutor(WORLD)
        monkeypatch.setattr(
            decisions, "current_member", lambda deadline_s: self.members[self.here.rank]
        )

    def each(self, act: Callable[[int], Any]) -> list[Any]:
        """Return the result or the error of each rank's ``act``."""

        def run(rank: int) -> Any:
            self.here.rank = rank
            try:
                return act(rank)
            except errors.CoordinationError as error:
                return error

        return [f.result(30) for f in [self.pool.submit(run, rank) for rank in range(WORLD)]]

    def make(self, about: str = "run") -> list[Decisions]:
        """Return an agreement for each rank."""
        return [Decisions(DEADLINE_S, about) for _ in range(WORLD)]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """Return the ranks of a job of three."""
    made = Ranks(monkeypatch)
    yield made
    made.pool.shutdown()


def asked(
    ranks: Ranks,
    made: list[Decisions],
    step: int,
    value: int,
    late: int = -1,
    late_s: float = 0.0,
) -> list[Any]:
    """Return the decision that each rank gets at a step. One may come late."""

    def act(rank: int) -> Any:
        if rank == late:
            time.sleep(late_s)
        decision = made[rank].ask("busy", step, lambda: Decision(step, value, step + 1))
        return decision and decision.value

    return ranks.each(act)


def test_all_ranks_hear_the_leaders_decision_step_by_step(ranks: Ranks) -> None:
    """The order of arrival does not matter, and the store does not grow."""
    made = ranks.make()
    for step in range(1, 30):
        heard = asked(ranks, made, step, step % 3, late=step % WORLD, late_s=0.002)
        assert heard == [step % 3] * WORLD


def test_a_step_that_the_leader_misses_is_void_for_all_and_the_next_is_not(ranks: Ranks) -> None:
    """The leader comes after the deadline. It does not act alone, and at the next step no rank
    waits long."""
    made = ranks.make()
    assert asked(ranks, made, 1, 1) == [1] * WORLD
    heard = asked(ranks, made, 2, 1, late=0, late_s=1.5 * DEADLINE_S)
    assert [type(error) for error in heard] == [errors.DeadlineError] * WORLD
    began_s = time.monotonic()
    assert asked(ranks, made, 3, 1) == [1] * WORLD
    assert time.monotonic() - began_s < DEADLINE_S / 2


def test_ranks_wait_but_once_for_a_leader_that_stays_away(ranks: Ranks) -> None:
    """They continue step by step, at once. A leader that comes back skips the steps that they have
    given up. Then all agree again."""
    made = ranks.make()
    assert asked(ranks, made, 1, 0) == [0] * WORLD

    def alone(rank: int) -> Any:
        if rank == 0:
            return None
        waited = []
        for step in (2, 3, 4):
            began_s = time.monotonic()
            with pytest.raises(errors.DeadlineError):
                made[rank].ask("busy", step, partial(Decision, step, 1, step + 1))
            waited.append(time.monotonic() - began_s)
        return waited

    for waited in ranks.each(alone)[1:]:
        assert max(waited[1:]) < DEADLINE_S / 2

    def back(rank: int) -> Any:
        if rank:
            return None
        for step in (2, 3, 4):
            with pytest.raises(errors.DeadlineError):
                made[0].ask("busy", step, partial(Decision, step, 1, step + 1))
        return None

    ranks.each(back)
    assert asked(ranks, made, 5, 1) == [1] * WORLD


def test_another_loop_over_the_same_steps_hears_nothing_of_the_one_before(ranks: Ranks) -> None:
    """It may be the loop of a second checkpointer, or of one that goes back. Another rank may
    arrive there before the leader."""
    made = ranks.make()
    for step in (1, 2, 3):
        assert asked(ranks, made, step, 1) == [1] * WORLD
    for turn in range(4):
        if turn % 2:
            for each in made:
                each.begin_run()
        else:
            made = ranks.make()
        for step in (2, 3):
            assert asked(ranks, made, step, 0, late=0, late_s=0.2) == [0] * WORLD


def test_a_rank_that_asks_where_the_leader_does_not_is_told_when_it_will(ranks: Ranks) -> None:
    """It missed the last decision, for example by an interrupt. It must not wait in vain."""
    made = ranks.make()

    def act(rank: int) -> Any:
        if rank == 2:
            time.sleep(0.1)
            decision = made[2].ask("due", 12, lambda: Decision(12, 1, 13))
        else:
            decision = made[rank].ask("due", 10, lambda: Decision(10, 1, 20))
        return decision and (decision.value, decision.again_at)

    assert ranks.each(act) == [(1, 20), (1, 20), (0, 20)]


def test_time_is_asked_anew_after_a_step_that_was_void(ranks: Ranks) -> None:
    """A save that was due becomes due at the next step, on all ranks."""
    now = [0.0]
    made = ranks.make()
    schedules = [schedule_of("10s", lambda: now[0]) for _ in range(WORLD)]

    def due(step: int, late_s: float = 0.0) -> list[Any]:
        def act(rank: int) -> Any:
            time.sleep(late_s if rank == 0 else 0.0)
            return schedules[rank].due(step, made[rank])

        return ranks.each(act)

    assert due(1) == [False] * WORLD
    now[0] = 11.0
    assert [type(error) for error in due(2, 1.5 * DEADLINE_S)] == [errors.DeadlineError] * WORLD
    assert due(3) == [True] * WORLD
    assert due(4) == [False] * WORLD


@pytest.mark.parametrize(
    "outcomes",
    [
        [Outcome.WHOLE, Outcome.DAMAGED],
        [Outcome.WHOLE, Outcome.FAILED_ELSEWHERE],
        [Outcome.DAMAGED, Outcome.WHOLE],
    ],
)
def test_a_checkpoint_is_whole_only_where_every_rank_says_so(outcomes: list[Outcome]) -> None:
    """It does not suffice that the first rank says so."""
    assert asyncio.run(verdict_of([Attempted(o) for o in outcomes])).outcome is Outcome.DAMAGED
    whole = [Attempted(Outcome.WHOLE)] * 2
    assert asyncio.run(verdict_of(whole)).outcome is Outcome.WHOLE
