"""Ranks that read for each other: each byte once, within the budget, whatever happens."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from support.bits import difference
from support.drivers import Counting
from support.effort import examples
from support.ranks import Replaced, load_as_ranks, save_as_ranks
from support.tiny import CHUNK_NBYTES, rechunked

from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.exchange.connection import Connection
from holdfast.storage.exchange.group import ExchangeGroup, ExchangeLimits, serve_in_thread
from holdfast.storage.format.manifest import MANIFEST_KEY, Manifest
from holdfast.storage.pipeline.image_reader import ImageReader
from holdfast.storage.pipeline.mapping import image_driver
from holdfast.storage.protocol.current import read_manifest
from holdfast.storage.ranks.team import Team
from holdfast.storage.runtime import buffers
from holdfast.storage.runtime.engine import start
from holdfast.storage.state.filling.scatter import Scatter


def checkpoint(states: list[dict[str, Any]]) -> tuple[Counting, Manifest]:
    """Save one state per rank, in images of many small chunks."""
    driver = Counting()
    save_as_ranks(driver, states)
    manifest, _ = start(read_manifest(driver)).result()
    start(driver.put(MANIFEST_KEY, rechunked(driver, manifest))).result()
    return driver, start(read_manifest(driver)).result()[0]


def times_read(driver: Counting, manifest: Manifest, image: int) -> np.ndarray:
    """Return how often each byte of an image was read, without the digests at its end."""
    times = np.zeros(int(manifest.images.hashed_nbytes[image]), np.int64)
    for key, low, high in driver.reads:
        if key == manifest.image_key(image):
            times[low:high] += 1
    return times


REACHED: dict[str, dict[str, Any]] = {
    "shared memory": {},
    "room for one unit": {"limits": ExchangeLimits(slots=1)},  # so that some wait for it
    "network": {"apart": True},
}


@pytest.fixture(params=REACHED)
def how(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the arguments of ``load_as_ranks`` that select how ranks exchange bytes."""
    return REACHED[str(request.param)]


SIZES = st.sampled_from([1, 700, 2048, 4096, 9000, 20_000])


@pytest.mark.nightly(5)
@examples(12, HealthCheck.function_scoped_fixture)
@given(
    sizes=st.lists(SIZES, min_size=1, max_size=4),
    saved=st.integers(1, 3),
    wants=st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=2, max_size=4),
)
def test_each_wanted_byte_is_read_once(
    how: dict[str, Any], sizes: list[int], saved: int, wants: list[set[int]]
) -> None:
    """Each rank wants any tensors, its own or common ones."""
    state = {f"t{i}": torch.arange(size, dtype=torch.float32) + i for i, size in enumerate(sizes)}
    driver, manifest = checkpoint(
        [state | {"own": torch.full((300,), float(rank))} for rank in range(saved)]
    )
    truth = [{f"t{i}": state[f"t{i}"] for i in want if i < len(sizes)} for want in wants]
    truth[0] |= {name: state[name] for name in state}  # somebody has a place for each
    own = [{"own": torch.full((300,), float(rank % saved))} for rank in range(len(wants))]
    expected = [mine | shared for mine, shared in zip(own, truth, strict=True)]
    driver.reads.clear()
    into = [{name: torch.full_like(t, -1) for name, t in rank.items()} for rank in expected]
    for wanted, found in zip(
        expected, load_as_ranks(driver, into, exchange=True, **how), strict=True
    ):
        assert difference(wanted, found) is None
    for image in range(len(manifest.images)):
        assert times_read(driver, manifest, image).max(initial=0) <= 1


def test_ranks_read_for_themselves_when_told_so(how: dict[str, Any]) -> None:
    """Without the exchange each rank reads every byte."""
    state = {"t": torch.arange(9000.0)}
    driver, manifest = checkpoint([state])
    driver.reads.clear()
    for found in load_as_ranks(driver, [{"t": torch.zeros(9000)} for _ in range(3)], **how):
        assert difference(state, found) is None
    assert times_read(driver, manifest, 0).max() == 3


def test_copies_that_a_driver_holds_are_within_the_budget() -> None:
    """A compressed chunk lies in memory twice while it is read, as it is stored and unpacked."""
    driver = MemoryDriver()
    save_as_ranks(driver, [{"t": torch.arange(9000.0)}])
    manifest, _ = start(read_manifest(driver)).result()
    driver.traits = dataclasses.replace(driver.traits, hands_over=True)
    packed = image_driver(driver, dataclasses.replace(manifest, compression="lz4"))
    budget_nbytes = 8 * manifest.chunk_nbytes
    assert ImageReader(driver, manifest, budget_nbytes).jobs(100) == 8
    assert ImageReader(packed, manifest, budget_nbytes).jobs(100) == 4


def state(value: float) -> dict[str, Any]:
    """Return a tensor of one unit: one rank reads it for all."""
    return {"t": torch.full((100_000,), value)}


def test_a_rank_whose_mate_left_since_the_checkpoint_was_replaced_starts_over() -> None:
    """Both ranks load the new checkpoint."""
    limits = ExchangeLimits(failure_report_s=0.2)
    driver = Replaced(state(1.0), state(2.0))
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
        members = ExchangeGroup(Team(), "test", [0, 1], 1, "", 0, ExchangeLimits())
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
