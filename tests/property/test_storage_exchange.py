"""Ranks that read for each other: what each gets, and how often each byte is read, for any mix of layouts."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from support.bits import difference
from support.effort import examples
from support.ranks import load_as_ranks, save_as_ranks
from support.tiny import rechunked

from holdfast.drivers.contract import Buffer
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage import load
from holdfast.storage.committed import read_manifest
from holdfast.storage.format.manifest import MANIFEST_KEY, Manifest
from holdfast.storage.pipeline.engine import start
from holdfast.storage.ranks import meeting, wire


class Counting(MemoryDriver):
    """Remembers what was read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[str, int, int]] = []

    async def read(self, key: str, start: int, into: Buffer) -> None:
        """As ever."""
        self.reads.append((key, start, start + len(into)))
        await super().read(key, start, into)


def checkpoint(states: list[dict[str, Any]]) -> tuple[Counting, Manifest]:
    """One state per rank, in images of many small chunks."""
    driver = Counting()
    save_as_ranks(driver, states)
    manifest, _ = start(read_manifest(driver)).result()
    start(driver.put(MANIFEST_KEY, rechunked(driver, manifest))).result()
    return driver, start(read_manifest(driver)).result()[0]


def times_read(driver: Counting, manifest: Manifest, image: int) -> np.ndarray:
    """How often each byte of an image was read; without the digests at its end."""
    times = np.zeros(int(manifest.images.hashed_nbytes[image]), np.int64)
    for key, low, high in driver.reads:
        if key == manifest.image_key(image):
            times[low:high] += 1
    return times


@pytest.fixture(params=["shared memory", "room for one unit", "network"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How ranks reach each other."""
    if request.param == "room for one unit":  # so that some wait for it
        monkeypatch.setattr(meeting, "SLOTS", 1)
    if request.param == "network":
        hosts = itertools.count()
        monkeypatch.setattr(wire, "host_key", lambda: f"host {next(hosts)}")
        monkeypatch.setattr(load, "store_host", lambda: "127.0.0.1")
    return str(request.param)


SIZES = st.sampled_from([1, 700, 2048, 4096, 9000, 20_000])


@examples(12, HealthCheck.function_scoped_fixture)
@given(
    sizes=st.lists(SIZES, min_size=1, max_size=4),
    saved=st.integers(1, 3),
    wants=st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=2, max_size=4),
)
def test_each_wanted_byte_is_read_once(how: str, sizes: list[int], saved: int, wants: list[set[int]]) -> None:
    """Whichever tensors each rank wants, of its own or in common: it gets them bit for bit, no byte of them is read twice,
    and no byte of what nobody wants is read more than a block is large."""
    state = {f"t{i}": torch.arange(size, dtype=torch.float32) + i for i, size in enumerate(sizes)}
    driver, manifest = checkpoint([state | {"own": torch.full((300,), float(rank))} for rank in range(saved)])
    truth = [{f"t{i}": state[f"t{i}"] for i in want if i < len(sizes)} for want in wants]
    truth[0] |= {name: state[name] for name in state}  # somebody has a place for each
    own = [{"own": torch.full((300,), float(rank % saved))} for rank in range(len(wants))]
    expected = [mine | shared for mine, shared in zip(own, truth, strict=True)]
    driver.reads.clear()
    into = [{name: torch.full_like(t, -1) for name, t in rank.items()} for rank in expected]
    for wanted, found in zip(expected, load_as_ranks(driver, into, exchange=True), strict=True):
        assert difference(wanted, found) is None
    for image in range(len(manifest.images)):
        assert times_read(driver, manifest, image).max(initial=0) <= 1


def test_ranks_read_for_themselves_when_told_so(how: str) -> None:
    """With exchange=False each reads all: that is what the count above would show."""
    state = {"t": torch.arange(9000.0)}
    driver, manifest = checkpoint([state])
    driver.reads.clear()
    for found in load_as_ranks(driver, [{"t": torch.zeros(9000)} for _ in range(3)]):
        assert difference(state, found) is None
    assert times_read(driver, manifest, 0).max() == 3
