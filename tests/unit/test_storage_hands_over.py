"""Test drivers whose library hands over its own memory: used in place, and counted."""

from __future__ import annotations

import asyncio
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.drivers import HookedDriver
from support.given import Serve
from support.inside import on_allocation, read_within

import holdfast
from holdfast.drivers.contract import Buffer
from holdfast.drivers.memory import MemoryDriver

BUDGET_NBYTES = 128 << 20
CHUNKS = 7


class _Handed(np.ndarray[Any, np.dtype[np.uint8]]):
    """Memory that a fetch returned."""


@dataclass
class Library:
    """Counts the bytes that reads hold: a read twice its size, a fetch once. ``offset``: of memory."""

    uri: str = ""
    now: int = 0
    seen: list[int] = field(default_factory=list)
    fetched: int = 0
    offset: int = 1

    def take(self, nbytes: int) -> None:
        self.now += nbytes
        self.seen.append(self.now)

    def give(self, nbytes: int) -> None:
        self.now -= nbytes


class HandsOver(MemoryDriver):
    """A driver whose fetches return their own memory, read-only and at odd addresses."""

    def __init__(self, location: str, library: Library) -> None:
        super().__init__(location)
        self.library = library
        self.traits = replace(self.traits, concurrency=64, hands_over=True)

    async def read(self, key: str, start: int, into: Buffer) -> None:
        self.library.take(2 * len(into))
        await asyncio.sleep(0.01)  # all that may run at once do
        await super().read(key, start, into)
        self.library.give(2 * len(into))

    async def fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        library = self.library
        library.take(nbytes)
        library.fetched += nbytes
        await asyncio.sleep(0.01)
        received = np.empty(nbytes + library.offset, np.uint8)[library.offset :].view(_Handed)
        weakref.finalize(received, library.give, nbytes)
        await super().read(key, start, received.data)
        return received.data.toreadonly()


@pytest.fixture
def library(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """A library whose drivers hand over fetched memory."""
    made = Library()
    made.uri = serve(lambda location: HandsOver(location, made))
    read_within(monkeypatch, BUDGET_NBYTES)
    with warnings.catch_warnings(action="error"):
        yield made


def _load(uri: str) -> None:
    holdfast.load(uri, budget_nbytes=BUDGET_NBYTES)


def _copy(uri: str) -> None:
    holdfast.copy(uri, f"{uri}-copy", budget_nbytes=BUDGET_NBYTES)


def _verify(uri: str) -> None:
    with holdfast.open(uri) as checkpoint:
        assert not checkpoint.verify().damages


@pytest.mark.nightly(3)
@pytest.mark.parametrize("use", [_load, _copy, _verify])
def test_what_it_holds_is_within_the_budget(use: Callable[[str], None], library: Library) -> None:
    """Loads, copies and verification use the whole budget and no more."""
    uri = f"{library.uri}/saved"
    holdfast.save(uri, {"w": torch.zeros(CHUNKS << 24, dtype=torch.uint8)})
    library.seen.clear()
    use(uri)
    assert 2 << 24 < max(library.seen) <= BUDGET_NBYTES
    assert library.now == 0


@pytest.mark.nightly(5)
@pytest.mark.parametrize(("held_nbytes", "at_most"), [(0, 4), (32 << 20, 2), (1 << 30, 1)])
def test_what_an_upload_holds_is_within_the_budget(
    held_nbytes: int, at_most: int, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves and copies use fewer buffers if uploads hold memory, but at least one."""

    async def slow(operation: str, key: str) -> None:
        if operation == "write":
            await asyncio.sleep(0.01)  # every buffer that may be filled meanwhile is

    def holding(location: str) -> HookedDriver:
        driver = MemoryDriver(location)
        driver.traits = replace(driver.traits, concurrency=64, upload_nbytes=held_nbytes)
        return HookedDriver(driver, before=slow)

    uri = serve(holding)
    made: list[int] = []
    on_allocation(monkeypatch, made.append)
    state = {"w": torch.zeros(CHUNKS << 24, dtype=torch.uint8)}
    for use in (
        partial(holdfast.save, f"{uri}/a", state),
        partial(holdfast.copy, f"{uri}/a", f"{uri}/b"),
    ):
        holdfast.release_memory()
        made.clear()
        use(budget_nbytes=64 << 20)
        assert 1 <= made.count(16 << 20) <= at_most


def test_a_load_uses_it_as_it_is(library: Library) -> None:
    """Tensors come back from fetched memory at any alignment, and none of it is kept."""
    uri = library.uri
    state = {"bytes": torch.arange(100_001) % 251, "floats": torch.randn(300, 701)}
    state["bytes"] = state["bytes"].to(torch.uint8)
    holdfast.save(uri, state)
    into = {"bytes": torch.zeros_like(state["bytes"]), "floats": torch.zeros(701, 300).T}
    holdfast.load(uri, into=into)
    assert all(torch.equal(into[name], state[name]) for name in state)
    assert library.fetched >= sum(tensor.nbytes for tensor in state.values())
    wide = {"floats": torch.zeros(300, 701, dtype=torch.float64)}
    holdfast.load(uri, into=wide, strict=False, cast=True)
    assert torch.equal(wide["floats"], state["floats"].double())
    with holdfast.open(uri) as checkpoint:
        assert torch.equal(
            checkpoint.read("floats", (slice(17, 200, 3), slice(5, 600))),
            state["floats"][17:200:3, 5:600],
        )
    assert library.now == 0
