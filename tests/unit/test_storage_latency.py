"""The latency of the storage does not delay the trainer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.drivers import HookedDriver
from support.simulation.turns import run_inline, save_of

import holdfast
from holdfast.drivers.contract import Driver
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.operations.saving.save import SaveJob, run_save
from holdfast.storage.pipeline.image_writer import Callbacks
from holdfast.storage.ranks.store_team import StoreTeam
from holdfast.storage.runtime.engine import start
from holdfast.storage.state.flattening.flatten import flatten

pytestmark = pytest.mark.clocked

_numbers = itertools.count()


class _Silent(MemoryDriver):
    """A storage that answers no write before ``answers`` is set."""

    def __init__(self, place: str, answers: asyncio.Event) -> None:
        super().__init__(place)
        self._answers = answers

    async def put(self, key: str, data: bytes | memoryview, *, exclusive: bool = False) -> None:
        await self._answers.wait()
        await super().put(key, data, exclusive=exclusive)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("alike", [True, False])
def test_every_rank_has_copied_its_state_before_the_storage_answers(
    world: int, alike: bool
) -> None:
    """Ranks agree and copy their states while the storage is silent."""
    place = f"silent-{next(_numbers)}"

    async def run() -> None:
        answers = asyncio.Event()
        copied: list[int] = []

        def captured(rank: int) -> None:
            copied.append(rank)
            if len(copied) == world:
                answers.set()

        store = dist.HashStore()
        saves = []
        for rank in range(world):
            flat = flatten(
                {
                    "w": torch.full((1000,), 0.0 if alike else float(rank)),
                    "mine": torch.full((9,), rank),
                }
            )
            job = SaveJob(flat, 7, 64 << 20)
            job.callbacks = Callbacks(lambda rank=rank: captured(rank), lambda: None)
            team = StoreTeam(store, rank, world, place, 20.0)
            saves.append(run_save(_Silent(place, answers), team, job))
        async with asyncio.timeout(30):
            await asyncio.gather(*saves)
        assert sorted(copied) == [*range(world)]

    start(run()).result()
    with holdfast.open(f"memory://{place}") as saved:
        assert saved.step == 7
        assert saved.verify().ok


def rounds_of(save: Callable[[Driver], Coroutine[Any, Any, Any]], place: MemoryDriver) -> float:
    """Return how many sequential round trips ``save`` needs, if each operation takes one."""

    async def trip(operation: str, key: str) -> None:
        await asyncio.sleep(1.0)

    async def run() -> float:
        began_s = asyncio.get_running_loop().time()
        await save(HookedDriver(place, before=trip))
        return asyncio.get_running_loop().time() - began_s

    return float(run_inline(run()))


@pytest.mark.parametrize(("bounded", "begins"), [(False, 2), (True, 4)])
def test_requests_that_do_not_depend_on_each_other_are_under_way_at_once(
    bounded: bool, begins: int
) -> None:
    """A save waits for as few round trips as its order of requests allows."""
    place = MemoryDriver(f"rounds-{next(_numbers)}")
    place.traits = replace(place.traits, bounded=bounded)
    uploads = 4  # begun, written twice, ended
    ends = 6
    save = save_of({"w": torch.ones(1000), "step": 1})
    assert rounds_of(save, place) == begins + uploads + ends
    deletes = 4  # the end of the attempt, a list of what is left, its image and its fate
    assert rounds_of(save, place) == begins + uploads + ends + 1 + deletes
