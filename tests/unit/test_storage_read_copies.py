"""Storage whose library hands over memory of its own, besides the buffers that it is copied to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.bits import fresh_uri

import holdfast
from holdfast.drivers.contract import Buffer
from holdfast.drivers.memory import MemoryDriver

BUDGET_NBYTES = 128 << 20
CHUNKS = 12


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes reads from ``memory://`` take, whenever one begins; each takes twice what it reads."""
    init, read = MemoryDriver.__init__, MemoryDriver.read
    now, seen = 0, list[int]()

    def made(self: MemoryDriver, location: str = "") -> None:
        init(self, location)
        self.traits = replace(self.traits, concurrency=64, read_copies=2)

    async def counted(self: MemoryDriver, key: str, start: int, into: Buffer) -> None:
        nonlocal now
        now += 2 * len(into)
        seen.append(now)
        await asyncio.sleep(0.01)  # all that may run at once do
        await read(self, key, start, into)
        now -= 2 * len(into)

    monkeypatch.setattr(MemoryDriver, "__init__", made)
    monkeypatch.setattr(MemoryDriver, "read", counted)
    return seen


def _load(uri: str) -> None:
    holdfast.load(uri, budget_nbytes=BUDGET_NBYTES)


def _copy(uri: str) -> None:
    holdfast.copy(uri, fresh_uri(), budget_nbytes=BUDGET_NBYTES)


@pytest.mark.parametrize("use", [_load, _copy])
def test_what_it_holds_is_within_the_budget(use: Callable[[str], None], held: list[int]) -> None:
    """Loads and copies read fewer chunks at once, but more than one."""
    uri = fresh_uri()
    holdfast.save(uri, {"w": torch.zeros(CHUNKS << 24, dtype=torch.uint8)})
    held.clear()
    use(uri)
    assert 2 << 24 < max(held) <= BUDGET_NBYTES
