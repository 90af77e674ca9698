"""How long the storage takes to answer is no matter of the trainer's."""

from __future__ import annotations

import asyncio
import itertools

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.capture.state import flatten
from holdfast.storage.pipeline.engine import start
from holdfast.storage.pipeline.image_writer import Progress
from holdfast.storage.ranks.team import StoreTeam
from holdfast.storage.save import SaveJob, run_save

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
def test_every_rank_has_copied_its_state_before_the_storage_answers(world: int, alike: bool) -> None:
    """The ranks agree on who writes what and copy while the storage is still silent; it answers, and they commit."""
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
            flat = flatten({"w": torch.full((1000,), 0.0 if alike else float(rank)), "mine": torch.full((9,), rank)})
            job = SaveJob(flat, 7, 64 << 20)
            job.progress = Progress(lambda rank=rank: captured(rank), lambda: None)
            team = StoreTeam(store, rank, world, place, 20.0)
            saves.append(run_save(_Silent(place, answers), team, job))
        async with asyncio.timeout(30):
            await asyncio.gather(*saves)
        assert sorted(copied) == [*range(world)]

    start(run()).result()
    with holdfast.open(f"memory://{place}") as saved:
        assert saved.step == 7
        assert saved.verify().ok
