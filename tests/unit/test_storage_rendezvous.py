"""Test how calls and failures of ranks find each other after errors, delays and restarts."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from support.meeting import DEADLINE_S, LOAD, SAVE, Job, everybody, kinds, together

import holdfast
from holdfast import errors
from holdfast.storage.ranks.calls import LOGGED, Call, RankStatus, Settled, logged, paired
from holdfast.storage.ranks.hosts import compressed, numbers_in
from holdfast.storage.ranks.keys import Keys
from holdfast.storage.ranks.member import Member
from holdfast.storage.ranks.store_team import StoreTeam

pytestmark = pytest.mark.clocked

AT_ONCE_S = 8.0
"""Much less than the deadline."""


@pytest.fixture
def store() -> Any:
    """Return a store with torch's interface, within one process."""
    return dist.HashStore()


@pytest.mark.nightly(10)
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_in_different_calls_learn_it_at_once_and_both_are_named(
    world: int, store: Any
) -> None:
    """Kinds, URIs or steps may differ. The leader may be in either call. The next call works."""
    history = [
        (SAVE, LOAD),
        (LOAD, SAVE),
        (SAVE, Call("save", "file:///a", 2)),
        (SAVE, Call("save", "file:///b", 1)),
    ]

    async def main() -> None:
        job = Job(store, world)
        for ours, theirs in history:
            began_s = time.monotonic()
            calls = [ours] * (world - 1) + [theirs]
            outcomes = await together(*(job.calls(rank, call) for rank, call in enumerate(calls)))
            assert time.monotonic() - began_s < AT_ONCE_S
            assert [type(error) for error in outcomes] == [holdfast.UsageError] * world
            assert all(str(ours) in str(error) and str(theirs) in str(error) for error in outcomes)
            await job.all(ours)
            await job.all(theirs)

    asyncio.run(main())


def test_a_rank_that_fails_in_another_call_is_heard_of(store: Any) -> None:
    """It was expected in this call, but had another URI, for example."""

    async def main() -> None:
        job = Job(store, 2)
        await job.all(SAVE)
        outcomes = await together(job.calls(0, SAVE), job.fails(1, LOAD))
        assert kinds(outcomes)[0] == (errors.RankFailedError, 1)
        assert str(SAVE) in str(outcomes[0])
        assert str(LOAD) in str(outcomes[0])
        await job.all(SAVE)
        await job.all(LOAD)

    asyncio.run(main())


def test_calls_that_go_on_side_by_side_match_in_whatever_order_they_come(store: Any) -> None:
    """Concurrent calls match in any order, even two of the same name."""
    calls = [Call("save", f"file:///{name}", 1) for name in "abc"] + [LOAD, LOAD]

    async def main() -> None:
        job = Job(store, 3)
        works = []
        for rank in range(3):
            order = calls[rank:] + calls[:rank]
            works += [job.calls(rank, call, late_s=0.05 * i) for i, call in enumerate(order)]
        outcomes = await together(*works)
        assert outcomes == [[everybody("a", 3), everybody("b", 3)]] * len(works)

    asyncio.run(main())


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_after_the_others_gave_up_learns_it_at_once(
    late: int, store: Any
) -> None:
    """It does not wait, and the next call works."""

    async def main() -> None:
        job = Job(store, 3, deadline_s=1.0)
        await job.all(SAVE)
        outcomes = await together(*(job.calls(rank, SAVE) for rank in range(3) if rank != late))
        assert kinds(outcomes) == [(errors.DeadlineError, late)] * 2
        began_s = time.monotonic()
        (outcome,) = await together(job.calls(late, SAVE))
        assert isinstance(outcome, errors.CoordinationError)
        assert time.monotonic() - began_s < 0.9
        await job.all(SAVE)
        await job.all(LOAD)

    asyncio.run(main())


@pytest.mark.nightly(3)
@pytest.mark.parametrize("cancelled", [0, 1])
@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.2])
def test_a_call_that_is_cancelled_is_told_and_the_next_one_works(
    cancelled: int, after_s: float, store: Any
) -> None:
    """An interrupt may come while it waits for others, or has just met them."""

    async def main() -> None:
        job = Job(store, 3)
        task = asyncio.ensure_future(job.calls(cancelled, SAVE))
        others = [
            job.calls(rank, SAVE, late_s=0.1) for rank in range(3) if rank not in (cancelled, 2)
        ]

        async def cancels() -> None:
            await asyncio.sleep(after_s)
            task.cancel()

        async def comes_last() -> Any:
            return await job.calls(2, SAVE, late_s=0.4)

        began_s = time.monotonic()
        outcomes = await together(*others, comes_last(), cancels(), task)
        assert time.monotonic() - began_s < AT_ONCE_S
        assert kinds(outcomes[:2]) == [(errors.RankFailedError, cancelled)] * 2
        await job.all(SAVE)

    asyncio.run(main())


@pytest.mark.nightly(5)
@pytest.mark.parametrize("dead", ["in a call", "failed", "gave up"])
def test_a_job_that_is_started_anew_over_the_same_store_begins_afresh(
    dead: str, store: Any
) -> None:
    """Keys of the dead job do not matter."""

    async def main() -> None:
        for first in (0, 1, 2):
            old = Job(store, 3, deadline_s=0.5 if dead == "gave up" else DEADLINE_S)
            await old.all(SAVE)
            await old.all(LOAD)
            if dead == "failed":
                await together(*(old.fails(rank, SAVE) for rank in (0, 2)))
            else:
                tasks = [asyncio.ensure_future(old.calls(rank, SAVE)) for rank in (0, 2)]
                await asyncio.wait(tasks, timeout=0.2 if dead == "in a call" else 5)
                for rank in range(3):
                    old.silence(rank)
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
            job = Job(store, 3)
            late = [0.0 if rank == first else 0.2 for rank in range(3)]
            outcomes = await together(
                *(job.calls(rank, SAVE, late_s=late[rank]) for rank in range(3))
            )
            assert outcomes == [[everybody("a", 3), everybody("b", 3)]] * 3
            await job.all(LOAD)

    asyncio.run(main())


def test_a_rank_that_waits_for_a_leader_that_was_started_anew_says_so(store: Any) -> None:
    """The leader that the rank knew never answers."""

    async def main() -> None:
        old = Job(store, 2)
        await old.all(SAVE)
        waiting = asyncio.ensure_future(old.calls(1, LOAD))
        await asyncio.sleep(0.1)
        new = Member(Keys(store, "job"), 0, 2)
        leaders = asyncio.ensure_future(
            StoreTeam(store, 0, 2, "", 1.0, SAVE, new).fail(holdfast.StateError("x"))
        )
        await leaders
        await new.publish_status()
        (outcome,) = await together(waiting)
        assert kinds([outcome]) == [(errors.RankFailedError, 0)]
        assert "was restarted" in str(outcome)

    asyncio.run(main())


@pytest.mark.nightly(4)
def test_a_rank_in_another_call_is_named_with_it_at_the_deadline(store: Any) -> None:
    """With calls from other threads, the rank could still be about to arrive."""
    other = Call("load", "file:///b", thread="evaluation")

    async def main() -> None:
        job = Job(store, 2, deadline_s=4.0)
        outcomes = await together(job.calls(0, SAVE), job.calls(1, other))
        assert kinds(outcomes) == [(errors.DeadlineError, 1), (errors.DeadlineError, 0)]
        # The rank that gives up first has seen the other's call; the other may find that call gone.
        assert str(other) in str(outcomes[0]) or str(SAVE) in str(outcomes[1])

    asyncio.run(main())


def test_rosters_and_boards_come_back_as_they_were() -> None:
    """Any numbers round-trip, and equal ones take a few bytes."""
    for roster in ([5], [5, 5, 5], [-3, 0, 7, 7, 7, -(1 << 60)]):
        assert numbers_in(compressed(roster)).tolist() == roster
    assert len(compressed([7] * 100_000)) < 1000
    status = RankStatus("n", "l", 3, logs={"x": (1, -2)}, settled={"x": Settled(1, 2)})
    assert RankStatus.decode(status.encode(), 1) == status


async def one_round(job: Job, failing: set[int], late_s: dict[int, float]) -> None:
    """Make one call in which some ranks fail early. Every other rank must learn of it at once."""

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
    """A late rank learns that the others have given up, and does the same."""
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


def test_a_rank_that_failed_and_ended_before_it_found_the_leader_is_named() -> None:
    """It looks like a process of a former job at first, but is named long before the deadline."""

    async def main() -> None:
        store = dist.HashStore()
        gone = Job(store, 2, deadline_s=0.5)
        await together(gone.fails(1, SAVE))
        await asyncio.sleep(0.6)  # the rank no longer looks for the leader
        job = Job(store, 2, deadline_s=8.0)
        (outcome,) = await together(job.calls(0, SAVE))
        assert kinds([outcome]) == [(errors.RankFailedError, 1)]
        assert "cannot be saved" in str(outcome)

    asyncio.run(main())


def test_failures_pair_in_order_from_where_two_ranks_are_even() -> None:
    """The first pairs with the first. The rest belong to calls that the other has yet to make."""
    assert paired(Settled(), [], []) == (Settled(), [], [])
    assert paired(Settled(), [3], [5, 6]) == (Settled(3, 5), [], [6])
    assert paired(Settled(), [3, -4], [5]) == (Settled(3, 5), [-4], [])
    assert paired(Settled(3, 5), [3, 4], [-5, -7, 9]) == (Settled(4, 7), [], [9])
    assert Settled(3, 9).joined(Settled(4, 2)) == Settled(4, 9)


def test_a_log_forgets_its_oldest() -> None:
    """Every status contains it, so it must stay short."""
    log: list[int] = []
    for number in range(1, LOGGED + 11):
        log = logged(log, number, waited=number % 2 == 0)
    assert len(log) == LOGGED
    assert log[-2:] == [LOGGED + 9, -(LOGGED + 10)]
