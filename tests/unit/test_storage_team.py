"""Rounds over a store, and failing ranks: each failure is reported by name, and no key is left."""

from __future__ import annotations

import asyncio
import datetime
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import meeting
from support.meeting import RAW, Act, Job, joined, raw, stating
from support.ranks import BUDGET_NBYTES, as_ranks
from support.servers.ports import free_port
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

import holdfast
from holdfast import errors
from holdfast.core.lru import LruCache
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.operations.saving.global_plan import GlobalPlans, agree
from holdfast.storage.operations.saving.handle import SaveHandle
from holdfast.storage.operations.saving.save import SaveJob, run_save
from holdfast.storage.ranks import process_group
from holdfast.storage.ranks.failures import Failure
from holdfast.storage.ranks.store_team import StoreTeam
from holdfast.storage.ranks.team import Team
from holdfast.storage.state.fingerprint import fingerprints
from holdfast.storage.state.flattening.flatten import flatten

pytestmark = pytest.mark.clocked


@pytest.fixture(params=["hash", "tcp"])
def store(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return a store of torch.distributed."""
    if request.param == "hash":
        yield dist.HashStore()
    else:
        yield dist.TCPStore(
            "127.0.0.1",
            free_port(),
            None,
            True,
            datetime.timedelta(seconds=20),
            wait_for_workers=False,
        )


@pytest.fixture
def plain_store() -> Any:
    """Return a store for tests in which time matters."""
    return dist.HashStore()


def kept(world: int) -> int:
    """Keys of a job that stay: a board for each rank, the leader's name, and its acknowledgements."""
    return world + 2


def together(store: Any, acts: Sequence[Act], silence_s: float = 5.0) -> list[Any]:
    """Make one call of a new job, one rank per act."""
    return repeatedly(store, 1, acts, silence_s)[0]


def repeatedly(
    store: Any, times: int, acts: Sequence[Act], silence_s: float = 5.0
) -> list[list[Any]]:
    """Make ``times`` calls of a job, one after the other."""

    async def run() -> list[list[Any]]:
        job = Job(store, len(acts), silence_s)
        return [
            await meeting.together(*map(job.acts, range(job.world), acts)) for _ in range(times)
        ]

    return asyncio.run(run())


def test_every_rank_learns_what_the_leader_made_of_all_statements(store: Any) -> None:
    """Statements arrive in rank order, and no key is left."""
    keys = store.num_keys()
    assert together(store, [stating("a", "b")] * 4) == [[b"a0|a1|a2|a3", b"b0|b1|b2|b3"]] * 4
    assert store.num_keys() == keys + kept(4)


@pytest.mark.parametrize("nbytes", [0, 1, 9 << 20])
def test_statements_and_verdicts_may_be_of_any_size(store: Any, nbytes: int) -> None:
    """torch's TCPStore refuses values of 8 MiB; ours are cut."""
    keys = store.num_keys()

    async def what(team: Team) -> bytes:
        return await team.round(raw("r"), bytes([team.rank]) * nbytes, joined)

    expected = b"|".join(bytes([rank]) * nbytes for rank in range(2))
    assert together(store, [what] * 2) == [expected] * 2
    assert store.num_keys() == keys + kept(2)


ERRORS = [
    holdfast.CoverageError("x", advice="do"), holdfast.InvisibleFilesError("x", uri="u", key="k", rank=2), holdfast.FullError("no room"),
    holdfast.MismatchError("x", differences=("a", "b")), holdfast.NotACheckpointError("x", uri="u"), holdfast.SupersededError("x"),
]  # fmt: skip


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_an_error_of_the_decision_is_raised_on_every_rank_with_its_type(
    error: holdfast.HoldfastError, store: Any
) -> None:
    """It concerns all ranks: each raises it, with all its details."""

    async def decide(payloads: Sequence[bytes]) -> bytes:
        raise error

    async def what(team: Team) -> bytes:
        return await team.round(raw("r"), b"", decide)

    keys = store.num_keys()
    for raised in repeatedly(store, 10, [what] * 4):
        assert [(type(e), str(e)) for e in raised] == [(type(error), str(error))] * 4
        assert [getattr(e, "differences", None) for e in raised] == [
            getattr(error, "differences", None)
        ] * 4
    assert store.num_keys() == keys + kept(4) + 1  # the last answer, for those who come late


@pytest.mark.parametrize("failing", [0, 2, 5])
def test_a_rank_that_fails_makes_all_others_raise_at_once_and_by_its_name(
    failing: int, store: Any
) -> None:
    """The error does not name a rank that only passed it on. It comes long before the deadline."""

    async def fails(team: Team) -> None:
        raise holdfast.FullError("no room", key="k")

    keys = store.num_keys()
    began = time.monotonic()
    acts = [fails if rank == failing else stating("r") for rank in range(6)]
    for raised in repeatedly(store, 5, acts, silence_s=20):
        assert isinstance(raised.pop(failing), holdfast.FullError)
        assert [(type(e), e.rank) for e in raised] == [(errors.RankFailedError, failing)] * 5
        assert all("no room" in str(e) and f"rank {failing}" in str(e) for e in raised)
    assert time.monotonic() - began < 10
    assert store.num_keys() == keys + kept(6) + 1


@pytest.mark.parametrize("silent", [0, 1, 3])
def test_a_rank_without_a_sign_of_life_is_named_within_the_deadline(
    silent: int, plain_store: Any
) -> None:
    """The others raise DeadlineError soon after the time."""

    async def run() -> tuple[list[Any], float]:
        job, began = Job(plain_store, 4, 0.5), time.monotonic()
        others = [rank for rank in range(4) if rank != silent]
        done = await meeting.together(*(job.acts(rank, stating("r")) for rank in others))
        return done, time.monotonic() - began

    raised, took_s = asyncio.run(run())
    assert [(type(e), e.rank) for e in raised] == [(errors.DeadlineError, silent)] * 3
    assert all(isinstance(e, TimeoutError) and f"rank {silent}" in str(e) for e in raised)
    assert 0.5 <= took_s < 2.5


def working(seconds: float) -> Act:
    """Return an act that takes this long before its round, and makes progress all the time."""

    async def what(team: Team) -> bytes:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            await asyncio.sleep(0.05)
            team.report_progress()
        return await team.round(raw("r"), b"slow", joined)

    return what


def test_a_slow_rank_where_something_moves_is_waited_for(plain_store: Any) -> None:
    """Three times as long as the deadline; also by those who wait for the leader, who waits for it."""
    acts = [working(0), working(1.2), working(0)]
    assert together(plain_store, acts, silence_s=0.4) == [b"slow|slow|slow"] * 3


@pytest.mark.nightly(10)
@pytest.mark.parametrize("stuck", [0, 2])
def test_a_rank_that_beats_and_where_nothing_moves_is_named(stuck: int, plain_store: Any) -> None:
    """Heartbeats alone do not count: the others name the stuck rank."""

    async def stands_still(team: Team) -> None:
        await team.round(raw("a"), b"", joined)
        await asyncio.sleep(5)

    acts = [stands_still if rank == stuck else stating("a", "b") for rank in range(3)]
    began = time.monotonic()
    raised = together(plain_store, acts, silence_s=1.5)
    assert raised.pop(stuck) is None
    assert [(type(e), e.rank) for e in raised] == [(errors.DeadlineError, stuck)] * 2
    assert f"rank {stuck} is alive" in str(raised[0])
    # Rank 1 may notice before it learns of it from the leader, which waits for the same rank.
    noticed = f"rank {stuck}, for which rank 0 waits"
    assert f"rank {stuck} is alive" in str(raised[1]) or noticed in str(raised[1])
    assert all("round 'b'" in str(e) for e in raised)
    assert time.monotonic() - began < 5.5


@pytest.mark.nightly(3)
def test_who_waits_for_a_third_is_not_blamed(plain_store: Any) -> None:
    """Rank 1 waits for rank 2, which stands still; the leader waits for rank 1, and names rank 2."""

    async def first(team: Team) -> Any:
        await team.round(raw("a"), b"", joined)
        return await team.gather("host", RAW, [0, 1], b"")

    async def second(team: Team) -> Any:
        await team.round(raw("a"), b"", joined)
        await team.gather("pair", RAW, [1, 2], b"")
        return await team.gather("host", RAW, [0, 1], b"")

    async def third(team: Team) -> None:
        await team.round(raw("a"), b"", joined)
        await asyncio.sleep(3)

    raised = together(plain_store, [first, second, third], silence_s=0.5)
    assert [getattr(e, "rank", None) for e in raised] == [2, 2, None]


class StrictStore:
    """A store that is slow at random, and raises for a missing key instead of waiting."""

    def __init__(self, seed: int) -> None:
        self._inner = dist.HashStore()
        self._lock = threading.Lock()
        self._seed = seed
        self._calls = 0
        self.waits: list[str] = []

    def _pause(self) -> None:
        with self._lock:
            self._calls += 1
            slow = hash((self._seed, self._calls)) % 7 == 0
        time.sleep(0.004 if slow else 0.0002)

    def get(self, key: str, /) -> bytes:
        self._pause()
        if not self._inner.check([key]):
            self.waits.append(key)
            raise RuntimeError(f"waited for {key}")
        return self._inner.get(key)

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> Any:
            self._pause()
            return getattr(self._inner, name)(*given)

        return call


@pytest.mark.parametrize("seed", range(3))
def test_no_rank_ever_waits_for_a_key_that_another_has_removed(seed: int) -> None:
    """Looking at a rank that leaves must not hang."""
    store = StrictStore(seed)

    async def fails(team: Team) -> None:
        await team.round(raw("a"), b"", joined)
        raise holdfast.FullError("no room")

    async def run() -> None:
        job = Job(store, 3)
        for _ in range(10):
            both = [job.acts(rank, stating("a", "b")) for rank in range(3)]
            assert await meeting.together(*both) == [[b"a0|a1|a2", b"b0|b1|b2"]] * 3
            others = [job.acts(rank, stating("a", "b")) for rank in range(2)]
            await meeting.together(*others, job.acts(2, fails))

    asyncio.run(run())
    assert store.waits == []
    assert store.num_keys() == kept(3)


def test_a_store_that_goes_away_is_a_coordination_error() -> None:
    """When its server dies, every rank raises CoordinationError instead of torch's error."""

    class Dead:
        def __getattr__(self, name: str) -> Any:
            def fail(*args: Any) -> Any:
                raise dist.DistNetworkError("Connection reset by peer")

            return fail

    raised = together(Dead(), [stating("r")] * 2)
    assert [type(e) for e in raised] == [errors.CoordinationError] * 2
    assert [e.rank for e in raised] == [0, 1]


def saved(drivers: list[Any]) -> list[Any]:
    """Save as one rank per driver; return each error and the seconds until it was raised."""

    async def act(team: StoreTeam) -> Any:
        began_s = time.monotonic()
        job = SaveJob(flatten({"own": torch.full((9,), float(team.rank))}), 1, BUDGET_NBYTES)
        error = None
        try:
            await run_save(drivers[team.rank], team, job)
        except holdfast.HoldfastError as raised:
            error = raised
        return error, time.monotonic() - began_s

    return as_ranks(len(drivers), act)


class Full(MemoryDriver):
    """Storage without room for an image."""

    async def create(self, key: str, nbytes: int) -> Any:
        raise holdfast.FullError("no room", key=key)


@pytest.mark.nightly(3)
def test_a_rank_that_fails_says_so_before_it_cleans_up() -> None:
    """Storage that is slow to delete does not keep the others waiting."""

    class SlowToDelete(Full):
        async def delete(self, key: str) -> None:
            await asyncio.sleep(3)
            await super().delete(key)

    (own, _), (told, took_s) = saved([SlowToDelete(), MemoryDriver()])
    assert isinstance(own, holdfast.FullError)
    assert isinstance(told, errors.RankFailedError)
    assert took_s < 2


def test_a_rank_whose_files_vanish_since_another_failed_raises_that_failure() -> None:
    """The rank raises the first cause, not the vanished file."""

    class Vanishing(MemoryDriver):
        async def create(self, key: str, nbytes: int) -> Any:
            await asyncio.sleep(0.5)  # the other rank has failed by then, and reported it
            raise holdfast.NotFoundError("it is gone", key=key)

    (own, _), (told, _) = saved([Full(), Vanishing()])
    assert isinstance(own, holdfast.FullError)
    assert isinstance(told, errors.RankFailedError)
    assert told.rank == 0
    assert "no room" in str(told)


def test_what_was_agreed_on_holds_for_one_size_of_the_job() -> None:
    """A job of more ranks with the same layouts makes a new plan."""
    kin = object()
    memory: GlobalPlans = LruCache(8)

    def holders(world: int) -> list[Any]:
        async def act(team: StoreTeam) -> Any:
            flat = flatten({"x": torch.ones(3)})
            flat.layout_id = kin
            async with team.session():
                plan = await agree(
                    team, "memory://", flat, lambda rows: fingerprints(flat, rows), memory
                )
            return next(iter(plan.agreed.holders.values()))

        return as_ranks(world, act)

    assert holders(2) == [(0, 1)] * 2
    assert holders(3) == [(0, 1, 2)] * 3


def test_no_stage_of_a_save_that_fails_is_waited_for_in_vain() -> None:
    """Stages that were not reached raise the error of the save."""
    handle = SaveHandle("memory://")
    handle.captured.reach()
    handle.fail(holdfast.FullError("no room"))
    handle.captured.wait(1)
    for stage in (handle.sealed, handle.durable):
        with pytest.raises(holdfast.FullError):
            stage.wait(1)


def test_a_process_group_that_is_made_anew_has_a_new_contact() -> None:
    """The ranks of the new group know nothing of the old one's calls."""
    members = []
    for _ in range(2):
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
        members.append(process_group.contact_of(dist.group.WORLD, 5.0).member)
        dist.destroy_process_group()
    assert members[0] is not members[1]


def test_a_forked_child_has_a_connection_of_its_own() -> None:
    """Otherwise it would read its parent's answers from the socket that they share."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    dist.init_process_group("fake", store=store, rank=0, world_size=2)
    try:
        group = dist.group.WORLD
        ours = process_group.contact_of(group, 5.0)
        assert process_group.contact_of(group, 5.0) is ours
        child = os.fork()
        if child == 0:
            theirs = process_group.contact_of(group, 5.0)
            os._exit(
                0 if theirs.store is not ours.store and theirs.member is not ours.member else 1
            )
        assert os.waitpid(child, 0)[1] == 0
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ["annotations", "Any", "ValueError"])
def test_a_failure_whose_type_is_no_error_of_ours_is_that_of_its_rank(name: str) -> None:
    """The name of an error from elsewhere may be the name of anything."""
    failure = Failure.of(type(name, (Exception,), {})("out of luck"), 3)
    with pytest.raises(errors.RankFailedError, match=r"rank 3 failed: .*out of luck"):
        failure.raise_alike()
