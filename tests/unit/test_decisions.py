"""Decisions that all ranks share: each belongs to a step; one that was missed is made anew,
together, at the next one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from holdfast import errors
from holdfast.storage.ranks.keys import Keys
from holdfast.storage.ranks.member import Member
from holdfast.storage.runtime.engine import start
from holdfast.storage.training import decisions
from holdfast.storage.training.decisions import Decision, Decisions
from holdfast.storage.training.load_attempts import Attempted, Outcome, verdict_of
from holdfast.storage.training.schedule import schedule_of

pytestmark = pytest.mark.clocked

DEADLINE_S = 1.0
WORLD = 3


class Ranks:
    """The ranks of a job, each in a thread of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.here = threading.local()
        store = dist.HashStore()
        self.members = [Member(Keys(store, "job"), rank, WORLD, start) for rank in range(WORLD)]
        self.pool = ThreadPoolExecutor(WORLD)
        monkeypatch.setattr(
            decisions, "current_member", lambda deadline_s: self.members[self.here.rank]
        )

    def each(self, act: Callable[[int], Any]) -> list[Any]:
        """What each rank's ``act`` returns, or raises."""

        def run(rank: int) -> Any:
            self.here.rank = rank
            try:
                return act(rank)
            except errors.CoordinationError as error:
                return error

        return [f.result(30) for f in [self.pool.submit(run, rank) for rank in range(WORLD)]]

    def make(self, about: str = "run") -> list[Decisions]:
        """One agreement for each rank."""
        return [Decisions(DEADLINE_S, about) for _ in range(WORLD)]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """Three of them."""
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
    """What each rank hears at a step. One may come late."""

    def act(rank: int) -> Any:
        if rank == late:
            time.sleep(late_s)
        decision = made[rank].ask("busy", step, lambda: Decision(step, value, step + 1))
        return decision and decision.value

    return ranks.each(act)


def test_all_ranks_hear_the_leaders_decision_step_by_step(ranks: Ranks) -> None:
    """Whoever comes first; and the store does not grow."""
    made = ranks.make()
    for step in range(1, 30):
        assert (
            asked(ranks, made, step, step % 3, late=step % WORLD, late_s=0.002)
            == [step % 3] * WORLD
        )


def test_a_step_that_the_leader_misses_is_void_for_all_and_the_next_is_not(ranks: Ranks) -> None:
    """It comes later than the deadline: it does not act alone, and at the next step nobody waits
    for long."""
    made = ranks.make()
    assert asked(ranks, made, 1, 1) == [1] * WORLD
    heard = asked(ranks, made, 2, 1, late=0, late_s=1.5 * DEADLINE_S)
    assert [type(error) for error in heard] == [errors.DeadlineError] * WORLD
    began_s = time.monotonic()
    assert asked(ranks, made, 3, 1) == [1] * WORLD
    assert time.monotonic() - began_s < DEADLINE_S / 2


def test_ranks_wait_but_once_for_a_leader_that_stays_away(ranks: Ranks) -> None:
    """They go on step by step, at once; a leader that comes back passes over what they have given
    up, and then all agree."""
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
    """A second checkpointer of the run, or one that goes back; also where another rank comes there
    before the leader."""
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
    """It missed the last decision, as by an interrupt: it does not wait for one that never comes."""
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
    """The save that was due is due at the next step, on all ranks."""
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
    """Not where the first does."""
    assert asyncio.run(verdict_of([Attempted(o) for o in outcomes])).outcome is Outcome.DAMAGED
    whole = [Attempted(Outcome.WHOLE)] * 2
    assert asyncio.run(verdict_of(whole)).outcome is Outcome.WHOLE
