"""Test the common behaviour of all layers, and each of them except retry, in virtual time."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
from collections.abc import AsyncIterator
from dataclasses import fields
from typing import Any

import pytest
from support.clock import in_virtual_time, run_virtual
from support.drivers import stored
from support.flaky import Flaky, Step

import holdfast.drivers.layers
from holdfast.core.spans import Recorder, recording
from holdfast.drivers.contract import Driver, ObjectInfo, Upload
from holdfast.drivers.layers.faults import FaultPlan, FaultsLayer, fault_plan
from holdfast.drivers.layers.hedge import SAMPLES_MIN, HedgeLayer, Slowness
from holdfast.drivers.layers.host_cache import HostCache
from holdfast.drivers.layers.layer import Layer, bottom
from holdfast.drivers.layers.metrics import Meter, MetricsLayer, meter_of, snapshots
from holdfast.drivers.layers.retry import RetryLayer, RetryPolicy
from holdfast.drivers.layers.stack import common_options
from holdfast.drivers.layers.throttle import (
    BURST_S,
    LimitLayer,
    ThrottleLayer,
    TokenBucket,
    shared_bucket,
)
from holdfast.drivers.local.driver import LocalDriver
from holdfast.drivers.memory import MemoryDriver
from holdfast.drivers.registry import open_driver
from holdfast.errors import BusyError, NotFoundError, StorageDownError

pytestmark = pytest.mark.clocked

SLOW = 1000.0
USUAL: list[Step] = [0.02] * 5 + [0.01] * 95
"""Reads after which the slowest five in a hundred are known to take 0.02 s."""


def now_s() -> float:
    """Return the loop's time."""
    return asyncio.get_running_loop().time()


# limit


@in_virtual_time
async def test_an_abort_needs_no_slot() -> None:
    """An upload can be aborted while another operation hangs and occupies the only slot."""
    below = Flaky([None, SLOW])
    driver = LimitLayer(below, 1)
    upload = await driver.create("u", 2)
    hanging = asyncio.ensure_future(driver.put("p", b""))
    await asyncio.sleep(1)
    await upload.abort()
    ended_s = now_s()
    await hanging
    assert ended_s == 1.0


# throttle


@in_virtual_time
async def test_the_bytes_of_a_get_count_when_they_are_there() -> None:
    """The operation after a get waits for the bytes of the get."""
    storage = MemoryDriver()
    await storage.put("k", bytes(1000))
    driver = ThrottleLayer(storage, TokenBucket(100))
    assert len(await driver.get("k")) == 1000
    assert now_s() == 0
    await driver.read("k", 0, memoryview(bytearray(1)))
    assert now_s() == pytest.approx(10 - BURST_S)


@pytest.mark.heavy
def test_drivers_with_the_same_rate_share_one_bucket() -> None:
    """Saves in flight share one bucket for each rate; a child process has buckets of its own."""
    a, b, c = (open_driver(f"memory://?max_bytes_per_s={r}") for r in ("7MB", "7000000", "8MB"))
    assert a.bucket is b.bucket is shared_bucket(7_000_000)
    assert c.bucket is not a.bucket
    child = os.fork()
    if child == 0:
        os._exit(int(shared_bucket(7_000_000) is a.bucket))
    assert os.waitpid(child, 0)[1] == 0


# hedge


async def calibrated() -> tuple[Flaky, HedgeLayer]:
    """Return a hedging driver after 100 fast reads, and the driver below."""
    below = Flaky(USUAL)
    await below.inner.put("k", bytes(range(16)))
    driver = HedgeLayer(below, 5)
    for _ in range(100):
        await driver.read("k", 0, memoryview(bytearray(16)))
    below.tried = []
    return below, driver


async def hedged(script: list[Step], way: str = "read") -> tuple[Flaky, float, bytes]:
    """Read 16 bytes. Return the driver below, the time taken and the bytes read."""
    below, driver = await calibrated()
    below.script = iter(script)
    began_s, into = now_s(), bytearray(16)
    if way == "read":
        await driver.read("k", 0, memoryview(into))
    else:
        into[:] = await driver.fetch("k", 0, 16)
    return below, now_s() - began_s, bytes(into)


@pytest.mark.parametrize("way", ["read", "fetch"])
def test_a_slow_read_gets_a_second_one_and_the_faster_is_used(way: str) -> None:
    """The faster read wins, the loser is cancelled, and the second one counts as a hedge."""
    recorder = Recorder()
    with recording(recorder), recorder.span("read"):
        below, took_s, data = run_virtual(hedged([SLOW, 0.02], way))
    assert (len(below.tried), below.cancelled, data) == (2, 1, bytes(range(16)))
    assert took_s == pytest.approx(0.04)
    stage = recorder.summary().stages["read"]
    assert (stage.count, stage.hedges, stage.retries) == (1, 1, 0)


def test_the_first_may_still_win() -> None:
    """The second read is cancelled if the first one succeeds."""
    below, took_s, data = run_virtual(hedged([0.03, SLOW]))
    assert (len(below.tried), below.cancelled, data) == (2, 1, bytes(range(16)))
    assert took_s == pytest.approx(0.03)


@in_virtual_time
async def test_a_loser_that_writes_late_does_no_harm() -> None:
    """The layer waits for a loser that scribbles on its buffer late; the winner's bytes count."""

    class Stubborn(Flaky):
        async def read(self, key, start, into):  # type: ignore[no-untyped-def]
            self.tried.append(("read", now_s()))
            if len(self.tried) != 101:
                await asyncio.sleep(0.02 if len(self.tried) < 6 else 0.01)
                return await self.inner.read(key, start, into)
            try:
                await asyncio.sleep(SLOW)
            except asyncio.CancelledError:
                await asyncio.sleep(3)
                into[:] = b"\xff" * len(into)
                raise

    below = Stubborn()
    await below.inner.put("k", bytes(range(16)))
    driver = HedgeLayer(below, 5)
    for _ in range(101):
        await driver.read("k", 0, memoryview(into := bytearray(16)))
    assert now_s() > 3
    assert bytes(into) == bytes(range(16))


def test_a_failure_of_one_is_made_good_by_the_other() -> None:
    """A hedged read fails only if both reads fail, and then raises the error of the first."""
    assert run_virtual(hedged([0.03, StorageDownError("cut")]))[2] == bytes(range(16))
    with pytest.raises(StorageDownError, match="first"):
        run_virtual(hedged([(5.0, StorageDownError("first")), (1.0, StorageDownError("second"))]))


def test_a_quick_failure_is_not_hedged() -> None:
    """A read that quickly finds no object is not repeated."""
    below = run_virtual(hedged([None]))[0]
    assert len(below.tried) == 1
    with pytest.raises(NotFoundError):
        run_virtual(hedged([NotFoundError("gone")]))


def test_nothing_is_hedged_before_enough_is_known() -> None:
    """A read is hedged after enough samples of its size, since small ones are always faster."""
    slowness = Slowness(10)
    for n in range(SAMPLES_MIN):
        assert slowness.threshold_s(4096) is None
        slowness.saw(4096, float(n))
    assert slowness.threshold_s(4096) == 28.0
    assert slowness.threshold_s(16 << 20) is None


@in_virtual_time
async def test_a_cancelled_read_leaves_nobody_behind() -> None:
    """A cancelled read cancels both of its reads and waits for them."""
    below, driver = await calibrated()
    below.script = iter([SLOW, SLOW])
    task = asyncio.ensure_future(driver.read("k", 0, memoryview(bytearray(16))))
    await asyncio.sleep(5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(asyncio.all_tasks()) == 1
    assert below.cancelled == 2


# metrics


def test_metrics_count_what_reached_the_storage() -> None:
    """The layer counts operations, bytes, errors by class and durations; a snapshot is a copy."""

    async def run() -> Meter:
        meter = Meter()
        below = Flaky([0.001, 0.002, 1.0, StorageDownError("x"), None, None, SLOW])
        driver = MetricsLayer(below, meter)
        await driver.put("k", b"abc")
        assert await driver.get("k") == b"abc"
        await driver.read("k", 0, memoryview(bytearray(2)))
        for key in ("k", "gone"):
            with pytest.raises((StorageDownError, NotFoundError)):
                await driver.stat(key)
        assert [i.key async for i in driver.list()] == ["k"]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(driver.delete("k"), 8)
        return meter

    meter = run_virtual(run())
    seen = meter.snapshot()
    meter.count("put", 9, 1.0, None)
    told = {n: (m.count, m.nbytes, dict(m.errors)) for n, m in seen.operations.items()}
    assert told == {
        "put": (1, 3, {}), "get": (1, 3, {}), "read": (1, 2, {}), "list": (2, 0, {}),
        "stat": (2, 0, {"StorageDownError": 1, "NotFoundError": 1}), "delete": (1, 0, {"CancelledError": 1}),
    }  # fmt: skip
    assert seen.operations["read"].seconds == pytest.approx(1.0)
    assert 0.99 <= seen.operations["read"].quantile_s(0.5) <= 2.0
    assert 8.0 <= seen.operations["delete"].quantile_s(1.0) <= 16.0
    assert meter.snapshot().operations["put"].count == 2


def test_metrics_of_a_store_outlive_its_drivers() -> None:
    """The metrics of all drivers of a store add up under its scheme and bucket."""

    async def run() -> None:
        for step in (1, 2):
            driver = open_driver(f"memory://metered/run/step-{step}?metrics=on")
            await driver.put("k", b"abc")
            await driver.close()

    asyncio.run(run())
    assert snapshots()["memory://metered"].operations["put"].nbytes == 6
    assert meter_of("memory://metered").snapshot() == snapshots()["memory://metered"]


# faults


async def outcomes(plan: FaultPlan, operations: int = 300) -> list[str]:
    """Return the outcome of each put, and for a failed one whether its object exists."""
    storage = MemoryDriver()
    driver = FaultsLayer(storage, plan)
    seen = []
    for n in range(operations):
        try:
            await driver.put(f"k{n}", b"x")
            seen.append("done")
        except StorageDownError as error:
            seen.append(f"{error.message}, {[i.key async for i in storage.list(f'k{n}')]}")
    return seen


def test_faults_come_from_a_seed() -> None:
    """A seed determines the faults. The rate of one kind does not move the faults of another."""
    plan = FaultPlan(7, error=0.1, unsure=0.1)
    first = run_virtual(outcomes(plan))
    assert first == run_virtual(outcomes(plan))
    assert first != run_virtual(outcomes(FaultPlan(8, error=0.1, unsure=0.1)))
    assert 10 < sum("not started" in s for s in first) < 60
    assert 10 < sum("answer was lost" in s for s in first) < 60
    for n, text in enumerate(first):  # an operation that was not started did nothing
        assert text == "done" or text.endswith("[]" if "not started" in text else f"['k{n}']")
    without = run_virtual(outcomes(FaultPlan(7, error=0.1, unsure=0.0)))
    begins = [
        next(n for n, text in enumerate(seen) if "not started" in text) for seen in (first, without)
    ]
    assert begins[0] == begins[1]


@pytest.mark.parametrize("kind", ["busy", "delay", "short", "lost", "flip"])
def test_each_fault_does_what_it_says(kind: str) -> None:
    """Each fault asks for a pause, delays, cuts a read, leaves zeros or changes one bit."""

    async def run() -> Any:
        storage, data = MemoryDriver(), bytes(range(1, 101))
        driver = FaultsLayer(storage, FaultPlan(3, **{kind: 1.0}, delay_s=5.0))  # type: ignore[arg-type]
        if kind == "busy":
            with pytest.raises(BusyError) as busy:
                await driver.stat("k")
            return busy.value.retry_after_s == 1.0
        if kind == "lost":
            await stored(driver, "k", data)
            return await storage.get("k") == bytes(100)
        await storage.put("k", data)
        into = bytearray(100)
        if kind == "short":
            for call in (driver.read("k", 0, memoryview(into)), driver.fetch("k", 0, 100)):
                with pytest.raises(StorageDownError, match="cut after 50 bytes"):
                    await call
            return bytes(into) == data[:50] + bytes(50)
        await driver.read("k", 0, memoryview(into))
        if kind == "delay":
            return (bytes(into), now_s()) == (data, 5.0)
        others = into, await driver.get("k"), await driver.fetch("k", 0, 100)
        return [
            sum((a ^ b).bit_count() for a, b in zip(data, other, strict=True)) for other in others
        ] == [1, 1, 1]

    assert run_virtual(run()) is True


class _Order(Layer):
    """Layer that records the length of each write, in order of arrival."""

    def __init__(self, inner: Driver) -> None:
        super().__init__(inner)
        self.lengths: list[int] = []

    async def around(self, operation: Any, call: Any) -> Any:
        if operation.name == "write":
            self.lengths.append(operation.nbytes)
        return await call()


@in_virtual_time
async def test_parts_that_are_late_do_not_overtake_each_other() -> None:
    """A delayed write starts on time and ends late, since some drivers need parts in order."""
    below = _Order(MemoryDriver())
    driver = FaultsLayer(below, FaultPlan(3, delay=0.5, delay_s=5.0))
    upload = await driver.create("x", sum(range(20)))
    starts = [sum(range(n)) for n in range(20)]
    await asyncio.gather(
        *(upload.write(start, memoryview(bytes(n))) for n, start in enumerate(starts) if n)
    )
    await upload.commit()
    assert below.lengths == list(range(1, 20))


@pytest.mark.parametrize(
    "text",
    ["", "seed", "seed:x", "error:2", "error:-1", "eror:0.1", "error:0.1,error:0.2", "error:0.1,"],
)
def test_a_plan_with_a_typo_is_refused(text: str) -> None:
    """An invalid plan is an error that lists the faults."""
    with pytest.raises(ValueError, match="seed, error, unsure, busy, delay"):
        fault_plan(text)


def test_a_plan_is_what_its_text_says() -> None:
    """Every fault can be planned as text."""
    planned = FaultPlan(7, error=0.5, delay=1.0, delay_s=90.0)
    assert fault_plan("seed:7,error:0.5,delay:1,delay_s:90") == planned
    assert all(fault_plan(f"{f.name}:1") == FaultPlan(**{f.name: 1}) for f in fields(FaultPlan))
    assert isinstance(open_driver("memory://?faults=error:0.1"), Layer)


# all layers

LAYERS = {
    "layer": Layer,
    "faults": lambda d: FaultsLayer(d, FaultPlan()),
    "metrics": lambda d: MetricsLayer(d, Meter()),
    "limit": lambda d: LimitLayer(d, 4),
    "throttle": lambda d: ThrottleLayer(d, TokenBucket(1 << 40)),
    "retry": lambda d: RetryLayer(d, RetryPolicy(3, 60.0)),
    "hedge": lambda d: HedgeLayer(d, 5),
    "host cache": lambda d: HostCache(d, "/nowhere", immutable=lambda key: False),
}
EVERYTHING = "faults=seed:1&metrics=on&max_concurrency=4&max_bytes_per_s=1TB&retries=3&op_timeout_s=60&hedge_percent=5"


RESULTS = {
    "fetch": memoryview(b"fe"),
    "get": b"got",
    "watch": b"new",
    "stat": ObjectInfo("s", 3, 4.0),
}


def recorded(name: str) -> Any:
    """Return a method that records its arguments."""

    def told(argument: Any) -> Any:
        return "a function" if callable(argument) else argument

    async def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        self.calls.append((name, *map(told, arguments), keywords))
        if name in ("create", "compose"):
            return RecordedUpload(self.calls)
        if name == "read_pieces":
            arguments[3](memoryview(bytes(arguments[2])))
        return RESULTS.get(name)

    return call


class Recorded:
    """Base of the recorders."""

    def __init__(self, calls: list[tuple[Any, ...]] | None = None) -> None:
        self.uri, self.traits = "recorder://", MemoryDriver().traits
        self.calls = [] if calls is None else calls

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        self.calls.append(("list", prefix))
        yield ObjectInfo("a", 1, 2.0)

    def copies_from(self, source: Driver) -> bool:
        self.calls.append(("copies_from", source))
        return True

    def links_from(self, source: Driver) -> bool:
        self.calls.append(("links_from", source))
        return True


def methods(cls: type) -> set[str]:
    """Return the public methods of a class of the contract."""
    return {name for name, _ in inspect.getmembers(cls, inspect.isfunction) if name[0] != "_"}


CALLS = {
    name: recorded(name)
    for name in (methods(Driver) | methods(Upload)) - {"list", "copies_from", "links_from"}
}
RecordingDriver: Any = type(
    "RecordingDriver", (Recorded, Driver), {**CALLS, "deviations": {"trial": "why"}}
)
RecordedUpload: Any = type("RecordedUpload", (Recorded, Upload), CALLS)


SOURCE = MemoryDriver()


async def use(driver: Driver) -> list[Any]:
    """Call every method once; return the results."""
    upload = await driver.create("up", 3)
    await upload.write(0, memoryview(b"abc"))
    composed = await driver.compose("co", 3)
    await composed.copy(0, SOURCE, "from", 5, 3)
    taken = []
    returned = [
        driver.copies_from(SOURCE), driver.links_from(SOURCE), await driver.link("li", SOURCE, "from"),
        await upload.commit(2), await upload.abort(), await driver.read("r", 5, memoryview(bytearray(2))),
        await driver.watch("w", b"known", 0.0), await driver.fetch("f", 5, 2), await driver.read_pieces("rp", 5, 2, taken.append), taken, await driver.get("g"),
        await driver.put("p", b"1", exclusive=True), await driver.stat("s"), [info async for info in driver.list("l")],
        await driver.delete("d"), await driver.delete_all("da"), await driver.sweep("sw"),
    ]  # fmt: skip
    await driver.close()
    return returned


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_forwards_every_method(name: str) -> None:
    """Each method passes its arguments to the driver below, once, and returns its result."""
    plain, below = RecordingDriver(), RecordingDriver()
    expected = run_virtual(use(plain))
    returned = run_virtual(use(LAYERS[name](below)))
    assert {call[0] for call in plain.calls} == methods(Driver) | methods(Upload)
    assert (returned, below.calls) == (expected, plain.calls)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_shows_the_driver_below(name: str) -> None:
    """A layer has the URI, traits and deviations of the driver; only a limit lowers a trait."""
    below = RecordingDriver()
    layer = LAYERS[name](below)
    assert (layer.uri, layer.deviations, layer.remote) == (below.uri, below.deviations, True)
    assert layer.traits.part_nbytes == below.traits.part_nbytes
    assert layer.traits.concurrency == (4 if name == "limit" else below.traits.concurrency)
    assert bottom(layer) is below


def test_the_order_is_the_documented_one() -> None:
    """With every option set, the layers are in the order of the package docstring."""
    order, driver = [], open_driver(f"memory://?{EVERYTHING}")
    while isinstance(driver, Layer):
        order.append(type(driver).__name__.removesuffix("Layer").lower())
        driver = driver.inner
    text = holdfast.drivers.layers.__doc__ or ""
    documented = re.findall(r"^    (\w+) +(?:above|below|next|lowest)", text, re.MULTILINE)
    assert order == documented == ["hedge", "retry", "throttle", "limit", "metrics", "faults"]


def test_every_layer_can_be_asked_for_alone() -> None:
    """One option brings one layer; a deadline alone brings the retry layer, without retries."""
    for option, kind in {
        "retries=1": RetryLayer, "op_timeout_s=5": RetryLayer, "max_concurrency=1": LimitLayer, "metrics=on": MetricsLayer,
        "max_bytes_per_s=1": ThrottleLayer, "hedge_percent=1": HedgeLayer, "faults=error:1": FaultsLayer,
    }.items():  # fmt: skip
        driver = open_driver(f"memory://?{option}")
        assert type(driver) is kind
        assert type(bottom(driver)) is MemoryDriver
    off = "retries=0&op_timeout_s=off&max_concurrency=off&metrics=off"
    assert type(open_driver(f"memory://?{off}")) is MemoryDriver


def test_remote_drivers_are_retried_by_default() -> None:
    """Only remote storage has retries and a deadline by default."""
    remote, local = common_options(remote=True), common_options(remote=False)
    pairs = {name: (remote[name].default, local[name].default) for name in local}
    differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    assert differing == {"retries": (10, 0), "op_timeout_s": (120.0, None)}
    assert (Driver.remote, LocalDriver.remote, MemoryDriver.remote) == (True, False, False)
