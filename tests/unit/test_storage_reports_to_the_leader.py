"""Test reports to the leader: one per host, and each layout once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.bits import difference, plain
from support.ranks import as_ranks, load_as_ranks

import holdfast
from holdfast.core.lru import LruCache
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.format.manifest import MANIFEST_KEY, Manifest
from holdfast.storage.operations.saving import save
from holdfast.storage.operations.saving.global_plan import GlobalPlans
from holdfast.storage.operations.saving.save import SaveJob, run_save
from holdfast.storage.protocol.current import read_manifest
from holdfast.storage.ranks.store_team import StoreTeam
from holdfast.storage.state.flattening.flatten import flatten

HOSTS = [
    list("aabb"),
    list("abab"),
    list("abbcca"),
    list("aaa"),
    list("abc"),
    ["a", None, None, "b", "b"],
]


class Listening:
    """A store that records the sizes of values."""

    def __init__(self) -> None:
        self._inner = dist.HashStore()
        self.told: dict[str, int] = {}

    def set(self, key: str, value: bytes | str, /) -> None:
        self.told[key.split("/", 3)[-1]] = len(
            value
        )  # below the job's prefix, its generation, and the call
        self._inner.set(key, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def ranks(self, name: str) -> list[int]:
        """Return the ranks that sent something under ``name``."""
        return sorted(
            int(key.split("/")[1])
            for key in self.told
            if key.startswith(f"{name}/") and key.count("/") == 1
        )

    def nbytes(self, name: str) -> int:
        """Return the bytes sent under ``name``."""
        return sum(
            n for key, n in self.told.items() if key.startswith(f"{name}/") and "verdict" not in key
        )


def state_of(rank: int) -> dict[str, Any]:
    """Two kinds of ranks, that have something in common, and each something of its own."""
    stage = {f"layer {i} of stage {rank % 2}": torch.full((3,), float(i)) for i in range(50)}
    return {
        "shared": torch.arange(1000.0),
        "own": torch.full((5,), float(rank)),
        "rank": rank,
    } | stage


def saved(
    driver: MemoryDriver, hosts: Sequence[str | None], memory: Sequence[GlobalPlans]
) -> tuple[Listening, list[Any]]:
    """Save as one rank per host named, which may be the same; return what they have told, and the
    outcomes."""
    store = Listening()

    async def act(team: StoreTeam) -> Any:
        rank = team.rank
        job = SaveJob(flatten(state_of(rank)), 1, 64 << 20, created_s=1.0, plans=memory[rank])
        return await run_save(driver, team, job)

    return store, as_ranks(len(hosts), act, store=store, hosts=hosts)


def memories(world: int) -> list[GlobalPlans]:
    """Nothing was agreed on before."""
    return [LruCache(2) for _ in range(world)]


def manifest(driver: MemoryDriver) -> Manifest:
    """Return the committed manifest, without its attempt."""
    return replace(asyncio.run(read_manifest(driver))[0], attempt="")


def whole(driver: MemoryDriver, world: int) -> bool:
    """Return whether each rank loads the state that it saved."""
    into = [
        {
            k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else -1
            for k, v in state_of(rank).items()
        }
        for rank in range(world)
    ]
    return all(
        difference(state_of(rank), found) is None
        for rank, found in enumerate(load_as_ranks(driver, into))
    )


@pytest.mark.parametrize("hosts", HOSTS, ids=lambda hosts: "".join(host or "-" for host in hosts))
def test_the_ranks_of_a_host_report_to_the_leader_as_one(hosts: list[str | None]) -> None:
    """The host's first rank forwards all; the commit is the same."""
    driver, world = MemoryDriver(), len(hosts)
    store, outcomes = saved(driver, hosts, memories(world))
    assert not [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    near = {r for r in range(world) if hosts[r] == hosts[0]}
    first = {r for r in range(world) if hosts[r] is None or hosts.index(hosts[r]) == r}
    assert store.ranks("commit") == sorted((near | first) - {0})
    assert store.ranks("written") == sorted(set(range(world)) - near - first)
    assert whole(driver, world)
    flat = MemoryDriver()
    saved(flat, [None] * world, memories(world))
    if hosts == sorted(hosts, key=str):
        assert plain(manifest(driver)) == plain(manifest(flat))


def test_a_layout_is_sent_once() -> None:
    """Later saves send its key only; a rank that forgot makes all send everything."""
    hosts = list("aabbb")
    driver, memory = MemoryDriver(), memories(len(hosts))
    first, *again = [saved(driver, hosts, memory)[0] for _ in range(3)]
    for store in again:
        assert store.ranks("digests") == []  # they went by their plan
        assert store.nbytes("commit") < 0.5 * first.nbytes("commit")
        assert store.nbytes("written") < 0.5 * first.nbytes("written")
        assert whole(driver, len(hosts))
    for rank in (0, 2, 4):
        memory[rank].clear()
        store, _ = saved(driver, hosts, memory)
        assert (store.nbytes("commit"), store.nbytes("written")) == (
            first.nbytes("commit"),
            first.nbytes("written"),
        )
        assert whole(driver, len(hosts))


def test_a_layout_of_a_save_that_failed_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows how far it got."""
    hosts = list("aabb")
    driver, memory = MemoryDriver(), memories(len(hosts))

    def fail(*_: Any) -> Any:
        raise holdfast.FullError("no room")

    with monkeypatch.context() as broken:
        broken.setattr(save, "commit", fail)
        first, outcomes = saved(driver, hosts, memory)
        assert [type(outcome) for outcome in outcomes] == [holdfast.FullError] * 4
    store, outcomes = saved(driver, hosts, memory)
    assert store.ranks("digests") == []
    assert (store.nbytes("commit"), store.nbytes("written")) == (
        first.nbytes("commit"),
        first.nbytes("written"),
    )
    assert whole(driver, len(hosts))


@pytest.mark.parametrize("rank", [2, 3])
def test_a_failure_of_a_report_reaches_all_ranks_with_the_name_of_the_rank(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All raise, and the next save collects leftovers."""
    real = save.join if rank == 2 else save.written_fragment
    driver = MemoryDriver()

    def broken(*args: Any) -> Any:
        joins = rank == 2 and args[0][0].groups[0].ranks[0] == 2
        if joins or args[-1] == 3:
            raise holdfast.FullError("no memory")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(save, real.__name__, broken)
        _, raised = saved(driver, list("aabbc"), memories(5))
    assert isinstance(raised.pop(rank), holdfast.FullError)
    assert [(type(e), e.rank) for e in raised] == [(holdfast.RankFailedError, rank)] * 4
    assert all("no memory" in str(e) for e in raised)
    assert all(key.startswith("data/") and key.endswith(".safetensors") for key in driver.objects)
    saved(driver, list("aabbc"), memories(5))
    assert whole(driver, 5)
    current = asyncio.run(read_manifest(driver))[0].attempt
    assert {key.split("/")[1] for key in driver.objects if key != MANIFEST_KEY} == {current}


def test_a_digest_of_an_unknown_layout_is_damage() -> None:
    """A key alone does for those who know it."""
    flat = flatten(state_of(0))
    from holdfast.storage.format.fragment import decode_fragment, fragment_of
    from holdfast.storage.format.tables import ImageTable
    from holdfast.storage.state.plan import plan_save

    plan = plan_save(flat, 0, None)
    images = ImageTable(
        np.array([0]),
        np.array([plan.layout.hashed_end]),
        np.zeros((plan.layout.chunks, 16), np.uint8),
    )
    fragment = fragment_of(
        ("20260101T000000-00000000", 1, 1.0), 0, plan.reported, plan.shards, images, flat.tree
    )
    told = fragment.encode({plan.reported.key})
    known = {plan.reported.key: plan.reported}
    assert len(told) < len(fragment.encode()) / 2
    assert decode_fragment(told, "a fragment", known).encode() == fragment.encode()
    with pytest.raises(holdfast.DamagedError, match="a fragment"):
        decode_fragment(told, "a fragment", {})
