"""Test the pairing of failures: each call ends as its own ranks make it end."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from support.meeting import LOAD, SAVE, Job, kinds, together

import holdfast
from holdfast import errors
from holdfast.storage.ranks.calls import Call
from holdfast.storage.ranks.pairing import LOGGED, Settled, logged, paired

pytestmark = pytest.mark.clocked

AT_ONCE_S = 8.0
DEAD_IN = {"failed": SAVE, "gave up": SAVE, "in another call": LOAD}


async def one_round(job: Job, failing: set[int], late_s: dict[int, float]) -> None:
    """Make one call in which some ranks fail early; every other rank must learn of one at once."""

    async def act(rank: int) -> Any:
        await asyncio.sleep(late_s.get(rank, 0.0))
        return await (job.fails(rank, SAVE) if rank in failing else job.calls(rank, SAVE))

    began_s = time.monotonic()
    outcomes = await together(*map(act, range(job.world)))
    assert time.monotonic() - began_s < AT_ONCE_S
    for rank, outcome in enumerate(outcomes):
        if rank in failing:
            assert isinstance(outcome, holdfast.StateError)
        elif failing:
            assert isinstance(outcome, errors.RankFailedError), (rank, failing, outcome)
            assert outcome.rank in failing
        else:
            assert isinstance(outcome, list), (rank, outcome)


@pytest.mark.nightly(6)
@pytest.mark.parametrize("world", [2, 3])
def test_any_ranks_may_fail_in_any_call(world: int, rng: np.random.Generator) -> None:
    """Others learn of every failure, and a call without one succeeds."""
    rounds = []
    for _ in range(40):
        failing = {rank for rank in range(world) if rng.random() < 0.5}
        late_s = {rank: float(rng.choice((0.0, 0.0, 0.02, 0.1))) for rank in range(world)}
        rounds.append((failing, late_s))

    async def main() -> None:
        job = Job(dist.HashStore(), world)
        for failing, late_s in rounds:
            await one_round(job, failing, late_s)
        await one_round(job, set(), {})

    asyncio.run(main())


@pytest.mark.nightly(8)
@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_after_the_deadline_is_not_in_a_different_call(late: int) -> None:
    """A late rank learns that the others gave up, and follows."""
    following = Call("save", "file:///a", 2)

    async def main() -> None:
        job = Job(dist.HashStore(), 2, deadline_s=4.0)
        await job.all(SAVE)
        (gave_up,) = await together(job.calls(1 - late, SAVE))
        assert kinds([gave_up]) == [(errors.DeadlineError, late)]

        async def comes_late() -> Any:
            with pytest.raises(errors.CoordinationError):
                await job.calls(late, SAVE)
            return await job.calls(late, following)

        outcomes = await together(job.calls(1 - late, following), comes_late())
        assert all(isinstance(outcome, list) for outcome in outcomes), outcomes
        await job.all(SAVE)

    asyncio.run(main())


@pytest.mark.nightly(9)
@pytest.mark.parametrize("stage", DEAD_IN)
def test_what_ranks_showed_to_a_leader_that_died_unfound_does_not_count(stage: str) -> None:
    """A new leader ignores the status of a dead rank."""

    async def main() -> None:
        store = dist.HashStore()
        old = Job(store, 2, deadline_s=0.5)
        task = asyncio.ensure_future(
            old.fails(1, SAVE) if stage == "failed" else old.calls(1, DEAD_IN[stage])
        )
        await asyncio.wait([task], timeout=0.2 if stage == "in another call" else 5)
        old.silence(1)
        task.cancel()
        await asyncio.wait([task])
        job = Job(store, 2)
        outcomes = await together(job.calls(0, SAVE), job.calls(1, SAVE, late_s=2.5))
        assert all(isinstance(outcome, list) for outcome in outcomes), outcomes
        await job.all(SAVE)

    asyncio.run(main())


def test_a_rank_that_failed_and_ended_before_it_found_the_leader_is_named() -> None:
    """Nobody can tell it from a process of a former job at once: but long before the deadline."""

    async def main() -> None:
        store = dist.HashStore()
        gone = Job(store, 2, deadline_s=0.5)
        await together(gone.fails(1, SAVE))
        await asyncio.sleep(0.6)  # it looks for the leader no more
        job = Job(store, 2, deadline_s=8.0)
        (outcome,) = await together(job.calls(0, SAVE))
        assert kinds([outcome]) == [(errors.RankFailedError, 1)]
        assert "cannot be saved" in str(outcome)

    asyncio.run(main())


@pytest.mark.nightly(5)
@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_rank_that_failed_elsewhere_and_one_that_comes_late_hear_of_one_failure_once(
    first: int,
) -> None:
    """An old failure does not affect the next call."""

    async def main() -> None:
        job = Job(dist.HashStore(), 3)
        await job.all(SAVE)
        outcomes = await together(job.calls(0, SAVE), job.calls(1, SAVE), job.fails(2, LOAD))
        assert kinds(outcomes)[:2] == [(errors.RankFailedError, 2)] * 2
        for call in (SAVE, LOAD):
            late_s = [0.0 if rank == first else 0.3 for rank in range(3)]
            outcomes = await together(
                *(job.calls(rank, call, late_s=late_s[rank]) for rank in range(3))
            )
            assert all(isinstance(outcome, list) for outcome in outcomes), outcomes

    asyncio.run(main())


def test_failures_pair_in_order_from_where_two_ranks_are_even() -> None:
    """First with first; what is left over is that of calls which the other has yet to make."""
    assert paired(Settled(), [], []) == (Settled(), [], [])
    assert paired(Settled(), [3], [5, 6]) == (Settled(3, 5), [], [6])
    assert paired(Settled(), [3, -4], [5]) == (Settled(3, 5), [-4], [])
    assert paired(Settled(3, 5), [3, 4], [-5, -7, 9]) == (Settled(4, 7), [], [9])
    assert Settled(3, 9).joined(Settled(4, 2)) == Settled(4, 9)


def test_a_log_forgets_its_oldest() -> None:
    """It stands on every status."""
    log: list[int] = []
    for number in range(1, LOGGED + 11):
        log = logged(log, number, waited=number % 2 == 0)
    assert len(log) == LOGGED
    assert log[-2:] == [LOGGED + 9, -(LOGGED + 10)]
