"""Saves while a real S3 server, or the way to it, fails: they finish, or end with a clear error
within their deadline; nothing torn can be loaded, and after the next save nothing is left."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.servers.proxy import FaultProxy, Faults
from support.servers.radosgw import Radosgw, find_ceph

import holdfast
from holdfast.drivers.contract import Driver
from holdfast.drivers.layers.metrics import snapshots
from holdfast.drivers.objects.s3 import S3Driver
from holdfast.drivers.registry import open_driver
from holdfast.drivers.uri import parse
from holdfast.errors import (
    AccessError,
    BusyError,
    DeadlineError,
    FullError,
    HoldfastError,
    StorageDownError,
    StorageError,
)

pytestmark = pytest.mark.clocked

MIB = 1 << 20
SHORT = "&timeout=3s&deadline=4s&retries=1&op_timeout_s=15"
"""Options of a save that is to fail soon."""
FAIL_S = 40.0
"""By when it has failed."""


@pytest.fixture
def proxy(radosgw: Radosgw) -> Iterator[FaultProxy]:
    """The way to the server."""
    with FaultProxy(("127.0.0.1", radosgw.port)) as proxy:
        yield proxy


@pytest.fixture
def root(request: pytest.FixtureRequest) -> str:
    """A folder of the bucket that no other test uses."""
    return request.node.name.replace("[", "-").replace("]", "")


@pytest.fixture(scope="module")
def states() -> tuple[dict[str, Any], dict[str, Any]]:
    """Two of 96 MB, which differ everywhere."""
    torch.manual_seed(0)
    return {"x": torch.randn(24_000_000), "step": 1}, {"x": torch.randn(24_000_000), "step": 2}


def url(endpoint: str, root: str, options: str = "") -> str:
    """The root by way of an endpoint."""
    return f"s3://holdfast/{root}?endpoint={endpoint}&part_size=5MiB{options}"


def holds(uri: str, state: dict[str, Any]) -> bool:
    """Whether exactly this state is loaded from there."""
    found = holdfast.load(uri)
    return torch.equal(found["x"], state["x"]) and found["step"] == state["step"]


def leftovers(server: Radosgw, root: str) -> list[str]:
    """What is in the bucket of a checkpoint besides the current one, seen by another client;
    unfinished uploads too."""
    client = server.client()
    keys = [
        found["Key"]
        for found in client.list_objects_v2(Bucket="holdfast", Prefix=f"{root}/").get(
            "Contents", ()
        )
    ]
    unfinished = client.list_multipart_uploads(Bucket="holdfast", Prefix=f"{root}/").get(
        "Uploads", ()
    )
    (current,) = {
        key.split("/")[2] for key in keys if key.endswith(".safetensors") and "/data/" in key
    }
    known = {f"{root}/manifest.safetensors"} | {
        f"{root}/data/{current}/{name}" for name in ("fate", "0.safetensors", "telemetry.jsonl.gz")
    }
    return sorted({*keys} - known) + [f"unfinished: {found['Key']}" for found in unfinished]


def parts_left(server: Radosgw, root: str) -> list[int]:
    """The sizes of all parts of unfinished uploads, which cost money."""
    client = server.client()
    unfinished = client.list_multipart_uploads(Bucket="holdfast", Prefix=f"{root}/").get(
        "Uploads", ()
    )
    parts = [
        client.list_parts(Bucket="holdfast", Key=u["Key"], UploadId=u["UploadId"]).get("Parts", ())
        for u in unfinished
    ]
    return [part["Size"] for some in parts for part in some]


@pytest.mark.nightly(5)
def test_a_server_that_restarts_is_waited_for(
    radosgw: Radosgw, proxy: FaultProxy, root: str, states: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    """Killed in the middle of the parts and started again: the save goes on, and is whole."""
    proxy.faults = Faults(up_nbytes_per_s=4 * MIB)
    handle = holdfast.async_save(url(proxy.endpoint, root), states[0])
    time.sleep(1.0)
    assert not handle.done()
    radosgw.kill_gateway()
    proxy.faults = Faults()
    time.sleep(1.0)
    radosgw.start_gateway()
    handle.wait(60)
    assert holds(url(radosgw.endpoint, root), states[0])
    assert leftovers(radosgw, root) == []


@pytest.mark.drill
def test_a_server_that_stays_away_fails_the_save(
    radosgw: Radosgw, proxy: FaultProxy, root: str, states: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    """In time, saying so; the checkpoint before is whole, and the save after collects what was
    left."""
    holdfast.save(url(radosgw.endpoint, root), states[0])
    proxy.faults = Faults(up_nbytes_per_s=4 * MIB)
    handle = holdfast.async_save(url(proxy.endpoint, root, SHORT), states[1])
    time.sleep(1.0)
    radosgw.kill_gateway()
    began_s = time.monotonic()
    try:
        with pytest.raises(StorageDownError):
            handle.wait(60)
        assert time.monotonic() - began_s < FAIL_S
    finally:
        radosgw.start_gateway()
    assert holds(url(radosgw.endpoint, root), states[0])
    assert leftovers(radosgw, root) != []
    holdfast.save(url(radosgw.endpoint, root), states[1])
    assert holds(url(radosgw.endpoint, root), states[1])
    assert leftovers(radosgw, root) == []


@pytest.mark.nightly(4)
def test_connections_that_are_cut_are_made_again(
    radosgw: Radosgw, proxy: FaultProxy, root: str, states: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    """In the midst of parts, again and again: nothing is left. But where the answer to the first
    request is cut off, the store has begun an upload that nobody knows of; it holds no part, and
    the next save drops it."""
    proxy.faults = Faults(up_nbytes_per_s=20 * MIB)
    handle = holdfast.async_save(url(proxy.endpoint, root), states[0])
    for _ in range(6):
        time.sleep(0.15)
        proxy.cut_all()
    proxy.faults = Faults()
    handle.wait(90)
    assert proxy.cuts > 6
    assert holds(url(radosgw.endpoint, root), states[0])
    assert [left for left in leftovers(radosgw, root) if not left.startswith("unfinished: ")] == []
    assert parts_left(radosgw, root) == []
    holdfast.save(url(radosgw.endpoint, root), states[1])
    assert leftovers(radosgw, root) == []


@pytest.mark.nightly(4)
def test_an_upload_whose_beginning_nobody_heard_of_is_dropped_by_the_next_save(
    radosgw: Radosgw, root: str, states: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    """It is of the attempt that became the checkpoint, and goes with that."""
    holdfast.save(url(radosgw.endpoint, root), states[0])
    with holdfast.open(url(radosgw.endpoint, root)) as c:
        key = f"{root}/data/{c.attempt}/0.safetensors"
    radosgw.client().create_multipart_upload(Bucket="holdfast", Key=key)
    assert leftovers(radosgw, root) == [f"unfinished: {key}"]
    holdfast.save(url(radosgw.endpoint, root), states[1])
    assert leftovers(radosgw, root) == []
    assert holds(url(radosgw.endpoint, root), states[1])


def lost_answer_to(key: str) -> re.Pattern[bytes]:
    """A put of an object of this name."""
    return re.compile(rb"PUT /holdfast/[^ ?]*/" + re.escape(key.encode()) + rb"[ ?]")


COMPLETED = re.compile(rb"POST /holdfast/[^ ]*uploadId=")
LOSING = {
    "announcement": lost_answer_to("attempt.json"),
    "upload": COMPLETED,
    "claim": lost_answer_to("fate"),
    "manifest": lost_answer_to("manifest.safetensors"),
}


@pytest.mark.nightly(10)
@pytest.mark.parametrize("losing", LOSING)
def test_a_save_survives_that_one_answer_is_lost(
    radosgw: Radosgw,
    proxy: FaultProxy,
    root: str,
    states: tuple[dict[str, Any], dict[str, Any]],
    losing: str,
) -> None:
    """The store has the object, and the connection is cut before it says so: of the announcement,
    an upload that was just completed, the claim or the manifest. It is asked again, and what is
    there then is known for the save's own."""
    uri = url(proxy.endpoint, root)
    holdfast.save(uri, {"x": torch.zeros(10), "step": 0})
    proxy.losing = LOSING[losing]
    holdfast.save(uri, states[1])
    assert proxy.losing is None
    assert holds(uri, states[1])
    assert leftovers(radosgw, root) == []


def test_a_pruning_survives_that_the_answer_to_its_sign_is_lost(
    radosgw: Radosgw, proxy: FaultProxy, root: str
) -> None:
    """It goes on, rather than take its own sign for that of another pruning."""
    uri = f"s3://holdfast/{root}"
    for step in (1, 2):
        state = {"x": torch.zeros(10), "step": step}
        holdfast.save(f"{uri}/step-{step}?endpoint={proxy.endpoint}", state)
    proxy.losing = lost_answer_to("data/pruning")
    report = holdfast.prune(f"{uri}?endpoint={proxy.endpoint}", keep_last=1)
    assert proxy.losing is None
    assert (len(report.checkpoints), report.kept) == (1, ("step-2",))
    found = radosgw.client().list_objects_v2(Bucket="holdfast", Prefix=f"{root}/")["Contents"]
    assert {entry["Key"].split("/")[1] for entry in found} == {"step-2"}


@pytest.mark.drill
def test_a_slow_line_is_only_slow(
    radosgw: Radosgw, proxy: FaultProxy, root: str, states: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    """Parts of several requests share it, and each passes within its time."""
    proxy.faults = Faults(up_nbytes_per_s=3 * MIB)
    began_s = time.monotonic()
    holdfast.save(url(proxy.endpoint, root, "&concurrency=8"), states[0])
    assert time.monotonic() - began_s > 3
    assert holds(url(radosgw.endpoint, root), states[0])


@pytest.mark.drill
def test_a_line_that_goes_dead_fails_the_save(
    radosgw: Radosgw, proxy: FaultProxy, root: str, states: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    """No answer and no refusal, in the middle of the parts: the deadline tells, and nothing stays
    after the next save."""
    holdfast.save(url(radosgw.endpoint, root), states[0])
    proxy.faults = Faults(up_nbytes_per_s=4 * MIB)
    handle = holdfast.async_save(url(proxy.endpoint, root, SHORT), states[1])
    time.sleep(1.0)
    proxy.faults = Faults(mute=True)
    began_s = time.monotonic()
    with pytest.raises(StorageDownError):
        handle.wait(60)
    assert time.monotonic() - began_s < FAIL_S
    assert holds(url(radosgw.endpoint, root), states[0])
    holdfast.save(url(radosgw.endpoint, root), states[1])
    assert holds(url(radosgw.endpoint, root), states[1])
    assert leftovers(radosgw, root) == []


@pytest.mark.drill
def test_a_full_disk_fails_the_save(
    radosgw: Radosgw, proxy: FaultProxy, root: str, states: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    """A cluster that has no room left does not refuse: its writes hang, in the middle of the parts.
    The deadline tells; the checkpoint before can be read, and with more room the next save works
    and tidies up."""
    uri = url(radosgw.endpoint, root)
    holdfast.save(uri, states[0])
    proxy.faults = Faults(up_nbytes_per_s=2 * MIB)
    options = "&concurrency=2&timeout=8s&deadline=4s&retries=1&op_timeout_s=20"
    handle = holdfast.async_save(url(proxy.endpoint, root, options), states[1], timeout_s=60)
    try:
        radosgw.count_as_full(*[1e-6] * 3)
        began_s = time.monotonic()
        with pytest.raises((StorageDownError, FullError, DeadlineError)):
            handle.wait(60 + 2 * FAIL_S)
        assert time.monotonic() - began_s < 60 + FAIL_S
        assert holds(uri, states[0])
    finally:
        radosgw.count_as_full(0.97, 0.98, 0.99)
    holdfast.save(uri, states[1])
    assert holds(uri, states[1])
    assert leftovers(radosgw, root) == []


@pytest.mark.drill
def test_a_load_survives_cuts(
    radosgw: Radosgw, proxy: FaultProxy, root: str, states: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    """Reads are made again, and what arrives is verified."""
    holdfast.save(url(radosgw.endpoint, root), states[0])
    stop = threading.Event()

    def cut() -> None:
        while not stop.wait(0.1):
            proxy.cut_all()

    cutting = threading.Thread(target=cut)
    cutting.start()
    threading.Timer(1.0, stop.set).start()
    try:
        assert holds(url(proxy.endpoint, root), states[0])
    finally:
        stop.set()
        cutting.join()


def test_wrong_credentials_fail_at_once(
    radosgw: Radosgw,
    root: str,
    states: tuple[dict[str, Any], dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before anything is copied to the server, and without trying again."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wr0ng")
    began_s = time.monotonic()
    with pytest.raises(AccessError, match="secret key"):
        holdfast.save(url(radosgw.endpoint, root), states[0])
    with pytest.raises(AccessError, match="secret key"):
        holdfast.load(url(radosgw.endpoint, root))
    assert time.monotonic() - began_s < 10


def test_a_missing_bucket_is_no_empty_one(
    radosgw: Radosgw, states: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    """Neither saving nor loading takes it for a place where nothing was saved yet."""
    uri = f"s3://no-such-bucket/x?endpoint={radosgw.endpoint}"
    for call in (lambda: holdfast.save(uri, states[0]), lambda: holdfast.load(uri)):
        with pytest.raises(HoldfastError, match="does not exist") as caught:
            call()
        assert type(caught.value) is StorageError


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Radosgw]:
    """A server that takes three requests at a time, and keeps quotas to the byte."""
    if find_ceph() is None:
        pytest.skip("radosgw is not installed: make test-servers")
    throttled = "rgw_scheduler_type = throttler\nrgw_max_concurrent_requests = 3"
    quotas = (
        "rgw_bucket_quota_ttl = 0\nrgw_user_quota_bucket_sync_interval = "
        "1\nrgw_user_quota_sync_interval = 1"
    )
    server = Radosgw(tmp_path_factory.mktemp("strict"), extra=f"{throttled}\n{quotas}")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment().items():
            patch.setenv(name, value)
        server.start()
        try:
            server.client().create_bucket(Bucket="holdfast")
            yield server
        finally:
            server.stop()


async def burst(uri: str) -> list[BaseException | None]:
    """What becomes of many requests at once, none of which is tried again."""
    driver = S3Driver.open(parse(uri))
    results = await asyncio.gather(
        *(driver.put(f"{n}", bytes(MIB)) for n in range(64)), return_exceptions=True
    )
    await driver.close()
    return results


@pytest.mark.drill
def test_a_server_that_asks_for_patience_gets_it(
    strict: Radosgw, root: str, states: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    """More requests than it wants: it answers some with 503, which is BusyError; tried again, all
    is stored in the end."""
    refused = {
        type(result)
        for result in asyncio.run(burst(url(strict.endpoint, f"{root}-burst", "&deadline=0")))
    }
    assert refused - {type(None)} == {BusyError}
    holdfast.save(url(strict.endpoint, root, "&concurrency=32"), states[0])
    assert holds(url(strict.endpoint, root, "&concurrency=32"), states[0])
    assert leftovers(strict, root) == []


@pytest.mark.drill
def test_a_quota_that_is_used_up_fails_the_save(
    strict: Radosgw, root: str, states: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    """With the error that says so; the checkpoint before is whole, and with more room the next save
    works and tidies up."""
    uri = url(strict.endpoint, root, "&concurrency=2")
    holdfast.save(uri, states[0])
    quota = ("--uid=test", "--quota-scope=bucket")
    strict.rgw_admin("quota", "set", *quota, f"--max-size={140 * MIB}")
    strict.rgw_admin("quota", "enable", *quota)
    strict.kill_gateway()
    strict.start_gateway()
    try:
        with pytest.raises(FullError, match="QuotaExceeded"):
            holdfast.save(uri, states[1])
    finally:
        strict.rgw_admin("quota", "disable", *quota)
        strict.kill_gateway()
        strict.start_gateway()
    assert holds(uri, states[0])
    holdfast.save(uri, states[1])
    assert holds(uri, states[1])
    assert leftovers(strict, root) == []


# Layers over a real server


STORE = "s3://holdfast"


@pytest.fixture
def layered(request: pytest.FixtureRequest, proxy: FaultProxy) -> str:
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


def test_a_server_that_is_busy_is_asked_again(proxy: FaultProxy, layered: str) -> None:
    """503: BusyError, which is temporary. Later, with pauses that grow, and no more often than it
    takes."""
    driver, bare = open_driver(layered, metrics=True), open_driver(layered, retries=0)
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
    proxy: FaultProxy, layered: str, rng: np.random.Generator
) -> None:
    """Whatever it is doing when it is sent away: parts are repeated by the client, all else by the
    layer."""
    state, uri = (
        {"w": rng.standard_normal(6 << 20), "step": 1},
        layered.replace("&deadline=0", "&part_size=5MiB"),
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


def test_requests_whose_connection_is_cut_are_made_again(proxy: FaultProxy, layered: str) -> None:
    """In the middle of what is sent. Without the layer it is an error."""
    driver, bare, content = (
        open_driver(layered, metrics=True),
        open_driver(layered, retries=0),
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
    proxy: FaultProxy, layered: str, rng: np.random.Generator
) -> None:
    """By a second one on another connection; what arrives is right, and the first is not waited
    for."""
    driver, content, stall_s = open_driver(layered, hedge_percent=10), rng.bytes(MIB), 20.0

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
