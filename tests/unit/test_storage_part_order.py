"""The engine writes the parts of an image in the order that the driver's traits ask for."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

import holdfast
from holdfast.drivers.contract import Buffer, PartOrder, Upload
from holdfast.drivers.memory import MemoryDriver
from holdfast.drivers.uri import Uri


class _Watched(Upload):
    """Notes where writes begin, and how many overlap; they end in a random order."""

    def __init__(self, inner: Upload, rng: random.Random, begun: list[int], overlaps: list[int]) -> None:
        self.inner, self.rng, self.begun, self.overlaps, self.running = inner, rng, begun, overlaps, 0

    async def write(self, start: int, data: Buffer) -> None:
        self.begun.append(start)
        self.running += 1
        self.overlaps.append(self.running)
        await asyncio.sleep(self.rng.random() * 0.01)
        await self.inner.write(start, data)
        self.running -= 1

    async def commit(self) -> None:
        await self.inner.commit()

    async def abort(self) -> None:
        await self.inner.abort()


@pytest.mark.parametrize("order", ["any", "ascending", "serial"])
@pytest.mark.parametrize("budget_nbytes", [None, 128 << 20])
def test_parts_arrive_in_the_order_asked_for(
    order: PartOrder, budget_nbytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``ascending``: one after the other begun, overlapping; ``serial``: never two at once; the state comes back."""
    begun: list[int] = []
    overlaps: list[int] = []

    class Ordered(MemoryDriver):
        def __init__(self, location: str = "") -> None:
            super().__init__(location)
            self.traits = replace(self.traits, part_order=order)

        @classmethod
        def open(cls, uri: Uri) -> Ordered:
            return cls(uri.location)

        async def create(self, key: str, nbytes: int) -> Upload:
            return _Watched(await super().create(key, nbytes), random.Random(7), begun, overlaps)

    monkeypatch.setattr("holdfast.storage.api.open_driver", lambda uri: Ordered(f"order-{order}-{budget_nbytes}"))
    state = {"w": torch.from_numpy(np.random.default_rng(0).standard_normal(100 << 17))}
    holdfast.async_save("memory://x", state, budget_nbytes=budget_nbytes).wait(60)
    assert torch.equal(holdfast.load("memory://x")["w"], state["w"])
    assert len(begun) > 6
    if order != "any":
        assert begun == sorted(begun)
    if order == "serial":
        assert max(overlaps) == 1
    else:
        assert max(overlaps) > 1
