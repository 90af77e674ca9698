"""The engine writes the parts of an image in the order that the driver's traits ask for."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.given import Serve

import holdfast
from holdfast.drivers.contract import Buffer, PartOrder, Traits, Upload, segments
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.pipeline.upload import Opening, writing_order

TRAITS = Traits(
    part_nbytes=16,
    part_min_nbytes=1,
    align_nbytes=1,
    concurrency=8,
    coalesce_nbytes=0,
    part_order="ascending",
    exclusive_is_atomic=True,
    shared=True,
)


class _Watched(Upload):
    """Records where writes begin and how many overlap; the first waits for a second one."""

    def __init__(
        self,
        inner: Upload,
        rng: random.Random,
        begun: list[int],
        overlaps: list[int],
        *,
        alone: bool = True,
    ) -> None:
        self.inner, self.rng, self.begun, self.overlaps, self.running = (
            inner,
            rng,
            begun,
            overlaps,
            0,
        )
        self.company = asyncio.Event()
        if alone:
            self.company.set()

    async def write(self, start: int, data: Buffer) -> None:
        self.begun.append(start)
        self.running += 1
        self.overlaps.append(self.running)
        if self.running > 1:
            self.company.set()
        await asyncio.wait_for(self.company.wait(), 60)
        await asyncio.sleep(self.rng.random() * 0.01)
        await self.inner.write(start, data)
        self.running -= 1

    async def commit(self, nbytes: int | None = None) -> None:
        await self.inner.commit(nbytes)

    async def abort(self) -> None:
        await self.inner.abort()


@pytest.mark.nightly(14)
@pytest.mark.parametrize("order", ["any", "ascending", "serial"])
@pytest.mark.parametrize("budget_nbytes", [None, 128 << 20])
@pytest.mark.parametrize("streams", [1, 3])
def test_parts_arrive_in_the_order_asked_for(
    order: PartOrder, budget_nbytes: int | None, streams: int, serve: Serve
) -> None:
    """Parts begin in order within each segment, overlapping unless ``serial``."""
    begun: list[int] = []
    overlaps: list[int] = []

    class Ordered(MemoryDriver):
        def __init__(self, location: str = "") -> None:
            super().__init__(location)
            self.traits = replace(self.traits, part_order=order, streams=streams)

        async def create(self, key: str, nbytes: int) -> Upload:
            inner = await super().create(key, nbytes)
            return _Watched(inner, random.Random(7), begun, overlaps, alone=order == "serial")

    uri = serve(Ordered)
    state = {"w": torch.from_numpy(np.random.default_rng(0).standard_normal(100 << 17))}
    holdfast.async_save(uri, state, budget_nbytes=budget_nbytes).wait(60)
    assert torch.equal(holdfast.load(uri)["w"], state["w"])
    assert len(begun) > 6
    cut = segments(
        begun[-1] + 1, replace(TRAITS, part_nbytes=16 << 20, streams=streams)
    )  # the trailer is written last
    if order != "any":
        for start, stop in cut:
            within = [at for at in begun if start <= at < stop]
            assert within == sorted(within)
        assert begun[:streams] == [start for start, _ in cut[:streams]]
    if order == "serial":
        assert max(overlaps) == 1
    else:
        assert max(overlaps) > 1


@pytest.mark.parametrize("hops", range(8))
def test_who_waits_for_an_upload_goes_before_who_comes_later(hops: int) -> None:
    """A caller that arrives as the upload opens does not overtake waiting callers."""

    async def run() -> None:
        go, went = asyncio.Event(), list[int]()

        async def create() -> Upload:
            await go.wait()
            return await MemoryDriver().create("x", 1)

        opening = Opening(create())

        async def ask(number: int) -> None:
            await opening.upload()
            went.append(number)

        tasks = [asyncio.ensure_future(ask(number)) for number in range(3)]
        await asyncio.sleep(0.01)
        go.set()
        for _ in range(hops):
            await asyncio.sleep(0)
        await asyncio.gather(*tasks, ask(3))
        assert went == [0, 1, 2, 3]
        await opening.drop()

    asyncio.run(run())


@pytest.mark.parametrize("nbytes", [1, 100, 1000])
@pytest.mark.parametrize("streams", [1, 3, 4])
@pytest.mark.parametrize("chunk_nbytes", [8, 16, 32])
def test_chunks_are_written_in_turn_from_each_segment(
    nbytes: int, streams: int, chunk_nbytes: int
) -> None:
    """Every chunk is written once, ascending within each segment."""
    traits = replace(TRAITS, streams=streams)
    chunks = -(-nbytes // chunk_nbytes)
    order = writing_order(chunks, chunk_nbytes, nbytes, traits)
    assert sorted(order) == list(range(chunks))
    reached: dict[int, int] = {}
    for start in (chunk * chunk_nbytes for chunk in order):
        segment = max(begin for begin, _ in segments(nbytes, traits) if begin <= start)
        assert reached.get(segment, -1) < start
        reached[segment] = start
    if streams == 3 and (nbytes, chunk_nbytes) == (1000, 16):
        assert order[:4] == [0, 21, 42, 1]
