"""Test ranks that read for each other: a replaced checkpoint, and the memory limit."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.bits import difference
from support.ranks import load_as_ranks, save_as_ranks
from support.tiny import CHUNK_NBYTES, rechunked

from holdfast.drivers.contract import Buffer
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.exchange.connection import Connection
from holdfast.storage.exchange.group import ExchangeGroup, ExchangeLimits, serve_in_thread
from holdfast.storage.format.manifest import MANIFEST_KEY
from holdfast.storage.protocol.current import read_manifest
from holdfast.storage.ranks.team import Solo
from holdfast.storage.runtime import buffers
from holdfast.storage.runtime.engine import offload, start
from holdfast.storage.state.filling.scatter import Scatter


class Replaced(MemoryDriver):
    """Another save replaces the checkpoint, once, just before bytes of its image are read."""

    def __init__(self) -> None:
        super().__init__()
        self.new: Any = None

    async def read(self, key: str, start: int, into: Buffer) -> None:
        """Later than it was meant to be."""
        new, self.new = self.new, None
        if new is not None:
            await offload(save_as_ranks, self, [new])
        await super().read(key, start, into)


def state(value: float) -> dict[str, Any]:
    """One tensor, of one unit: one rank reads it for all."""
    return {"t": torch.full((100_000,), value)}


def test_a_rank_whose_mate_left_since_the_checkpoint_was_replaced_starts_over() -> None:
    """Both ranks load the new checkpoint."""
    limits = ExchangeLimits(failure_report_s=0.2)
    driver = Replaced()
    save_as_ranks(driver, [state(1.0)])
    driver.new = state(2.0)
    for found in load_as_ranks(driver, [state(0.0), state(0.0)], exchange=True, limits=limits):
        assert difference(state(2.0), found) is None


@pytest.mark.parametrize("how", ["shared memory", "network"])
def test_an_exchange_stays_within_the_budget(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading, receiving and sharing together fit the budget, even if delivery is slow."""
    limits = ExchangeLimits(unit_nbytes=CHUNK_NBYTES // 2)
    driver = MemoryDriver()
    save_as_ranks(driver, [{"t": torch.arange(60.0 * CHUNK_NBYTES / 4)}])
    manifest, _ = start(read_manifest(driver)).result()
    start(driver.put(MANIFEST_KEY, rechunked(driver, manifest))).result()
    taken, peak = set[int](), 0

    def take(self: buffers.HostPool) -> buffers.HostBuffer:
        nonlocal peak
        buffer = plain_take(self)
        taken.add(buffer.address)
        peak = max(peak, len(taken))
        return buffer

    def give(self: buffers.HostPool, buffer: buffers.HostBuffer) -> None:
        taken.discard(buffer.address)
        plain_give(self, buffer)

    def deliver(self: Scatter, read: int, buffer: buffers.HostBuffer) -> None:
        time.sleep(0.005)
        plain_deliver(self, read, buffer)

    plain_take, plain_give, plain_deliver = (
        buffers.HostPool.take,
        buffers.HostPool.give,
        Scatter.deliver,
    )
    monkeypatch.setattr(buffers.HostPool, "take", take)
    monkeypatch.setattr(buffers.HostPool, "give", give)
    monkeypatch.setattr(Scatter, "deliver", deliver)
    into = [{"t": torch.zeros(60 * CHUNK_NBYTES // 4)} for _ in range(2)]
    found_by_rank = load_as_ranks(
        driver,
        into,
        exchange=True,
        budget_nbytes=6 * CHUNK_NBYTES,
        apart=how == "network",
        limits=limits,
    )
    for found in found_by_rank:
        assert torch.equal(found["t"], torch.arange(60.0 * CHUNK_NBYTES / 4))
    shared_nbytes = limits.slots * CHUNK_NBYTES // 2
    assert peak * CHUNK_NBYTES / 2 + shared_nbytes <= 6 * CHUNK_NBYTES


def test_a_thread_that_serves_is_waited_for_however_often_the_load_is_cancelled() -> None:
    """It may be copying out of a buffer that the load gives back when it has ended."""
    ours, theirs = socket.socketpair()
    copying, may_end = threading.Event(), threading.Event()

    def serve(member: int) -> bool:
        copying.set()
        assert may_end.wait(30)
        return True

    async def run() -> None:
        members = ExchangeGroup(Solo(), "test", [0, 1], 1, "", 0, ExchangeLimits())
        with ThreadPoolExecutor(1) as threads:
            serving = asyncio.ensure_future(
                serve_in_thread(members, threads, {1: Connection(ours)}, serve)
            )
            await asyncio.to_thread(copying.wait, 30)
            for _ in range(2):
                serving.cancel()
                await asyncio.sleep(0.05)
            still_waited_for = not serving.done()
            may_end.set()
            with pytest.raises(asyncio.CancelledError):
                await serving
        assert still_waited_for

    theirs.send(b"x")
    asyncio.run(run())
    ours.close()
    theirs.close()
