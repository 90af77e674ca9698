"""Layers around the driver of a real S3 server: what they ask of it, seen on the way to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import numpy as np
import pytest
from support.servers.proxy import FaultProxy, Faults
from support.servers.radosgw import Radosgw

import holdfast
from holdfast.drivers.contract import Driver
from holdfast.drivers.layers.metrics import snapshots
from holdfast.drivers.registry import open_driver
from holdfast.errors import BusyError, StorageDownError

pytestmark = pytest.mark.clocked

MIB = 1 << 20
STORE = "s3://holdfast"


@pytest.fixture
def proxy(radosgw: Radosgw) -> Iterator[FaultProxy]:
    """The way to the server."""
    with FaultProxy(("127.0.0.1", radosgw.port)) as proxy:
        yield proxy


@pytest.fixture
def root(request: pytest.FixtureRequest, proxy: FaultProxy) -> str:
    """A folder of the bucket that no other test uses, by way of the proxy. A request is made once:
    layers repeat it."""
    return f"{STORE}/{request.node.name}?endpoint={proxy.endpoint}&deadline=0"


def errors(operation: str) -> dict[str, int]:
    """How many requests of this kind have failed so far, by the class of their error."""
    seen = snapshots().get(STORE)
    return dict(seen.operations[operation].errors) if seen and operation in seen.operations else {}


async def closing(driver: Driver, work: object) -> None:
    """Await what was done with a driver, and close it."""
    try:
        await work  # type: ignore[misc]
    finally:
        await driver.close()


def test_a_server_that_is_busy_is_asked_again(proxy: FaultProxy, root: str) -> None:
    """503: BusyError, which is temporary. Later, with pauses that grow, and no more often than it
    takes."""
    driver, bare = open_driver(root, metrics=True), open_driver(root, retries=0)
    before = errors("put").get("BusyError", 0)

    async def put() -> None:
        proxy.busy = 1
        with pytest.raises(BusyError, match="SlowDown"):
            await bare.put("x", b"early")
        await bare.close()
        proxy.busy = 4
        await driver.put("x", b"late")
        assert proxy.busy == 0
        assert await driver.get("x") == b"late"

    asyncio.run(closing(driver, put()))
    assert errors("put")["BusyError"] == before + 4


def test_a_save_passes_a_busy_server(
    proxy: FaultProxy, root: str, rng: np.random.Generator
) -> None:
    """Whatever it is doing when it is sent away: parts are repeated by the client, all else by the
    layer."""
    state, uri = (
        {"w": rng.standard_normal(6 << 20), "step": 1},
        root.replace("&deadline=0", "&part_size=5MiB"),
    )
    proxy.faults = Faults(up_nbytes_per_s=30 * MIB)
    handle = holdfast.async_save(uri, state)
    for _ in range(5):
        time.sleep(0.2)
        proxy.busy = 2
        proxy.cut_all()
    proxy.faults = Faults()
    handle.wait(90)
    assert proxy.busy == 0
    assert (holdfast.load(uri)["w"] == state["w"]).all()


def test_requests_whose_connection_is_cut_are_made_again(proxy: FaultProxy, root: str) -> None:
    """In the middle of what is sent. Without the layer it is an error."""
    driver, bare, content = (
        open_driver(root, metrics=True),
        open_driver(root, retries=0),
        bytes(4 * MIB),
    )
    before = errors("put").get("StorageDownError", 0)

    async def put() -> None:
        proxy.faults = Faults(cut_after_nbytes=MIB)
        with pytest.raises(StorageDownError):
            await bare.put("x", content)
        await bare.close()
        putting = asyncio.create_task(driver.put("x", content))
        while errors("put").get("StorageDownError", 0) < before + 2:
            await asyncio.sleep(0.01)
        proxy.faults = Faults()
        await putting
        assert await driver.get("x") == content

    asyncio.run(closing(driver, put()))


def test_a_read_that_is_stuck_is_overtaken(
    proxy: FaultProxy, root: str, rng: np.random.Generator
) -> None:
    """By a second one on another connection; what arrives is right, and the first is not waited
    for."""
    driver, content, stall_s = open_driver(root, hedge_percent=10), rng.bytes(MIB), 20.0

    async def read(start: int) -> None:
        into = bytearray(64 << 10)
        await driver.read("x", start, memoryview(into))
        assert into == content[start : start + len(into)]

    async def reads() -> None:
        await driver.put("x", content)
        for n in range(32):  # so it learns what is slow, and may ask twice
            await read(1000 * n)
        proxy.stall_s = stall_s
        began_s = time.monotonic()
        await read(12345)
        assert proxy.stall_s == 0
        assert time.monotonic() - began_s < stall_s / 2

    asyncio.run(closing(driver, reads()))
