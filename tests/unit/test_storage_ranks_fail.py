"""Test failures of ranks in a save, agreed plans, and forked children."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import as_ranks
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
from holdfast.storage.state.fingerprint import fingerprints
from holdfast.storage.state.flattening.flatten import flatten

pytestmark = pytest.mark.clocked

BUDGET_NBYTES = 64 << 20


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


@pytest.mark.nightly(3)
def test_a_rank_that_fails_says_so_before_it_cleans_up() -> None:
    """Storage that is slow to delete does not keep the others waiting."""

    class Failing(MemoryDriver):
        async def create(self, key: str, nbytes: int) -> Any:
            raise holdfast.FullError("no room", key=key)

        async def delete(self, key: str) -> None:
            await asyncio.sleep(3)
            await super().delete(key)

    (own, _), (told, took_s) = saved([Failing(), MemoryDriver()])
    assert isinstance(own, holdfast.FullError)
    assert isinstance(told, errors.RankFailedError)
    assert took_s < 2


def test_a_rank_whose_files_vanish_since_another_failed_raises_that_failure() -> None:
    """The rank raises the first cause, not the vanished file."""

    class Failing(MemoryDriver):
        async def create(self, key: str, nbytes: int) -> Any:
            raise holdfast.FullError("no room", key=key)

    class Vanishing(MemoryDriver):
        async def create(self, key: str, nbytes: int) -> Any:
            await asyncio.sleep(0.5)  # the other has failed by then, and told
            raise holdfast.NotFoundError("it is gone", key=key)

    (own, _), (told, _) = saved([Failing(), Vanishing()])
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
    """It would take its parent's answers off the socket that they share."""
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
