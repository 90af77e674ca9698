"""What all layers have in common: they forward everything, and stand in the order that is
documented."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.clock import run_virtual

import holdfast.drivers.layers
from holdfast.drivers.contract import Driver, ObjectInfo, Upload
from holdfast.drivers.layers.faults import FaultPlan, FaultsLayer
from holdfast.drivers.layers.hedge import HedgeLayer
from holdfast.drivers.layers.layer import Layer, LayeredUpload, bottom, find
from holdfast.drivers.layers.metrics import Meter, MetricsLayer
from holdfast.drivers.layers.retry import RetryLayer, RetryPolicy
from holdfast.drivers.layers.stack import common_options
from holdfast.drivers.layers.throttle import LimitLayer, ThrottleLayer, TokenBucket
from holdfast.drivers.local.driver import LocalDriver
from holdfast.drivers.memory import MemoryDriver
from holdfast.drivers.registry import open_driver
from holdfast.errors import NotFoundError

pytestmark = pytest.mark.clocked

LAYERS = {
    "layer": Layer,
    "faults": lambda d: FaultsLayer(d, FaultPlan()),
    "metrics": lambda d: MetricsLayer(d, Meter()),
    "limit": lambda d: LimitLayer(d, 4),
    "throttle": lambda d: ThrottleLayer(d, TokenBucket(1 << 40)),
    "retry": lambda d: RetryLayer(d, RetryPolicy(3, 60.0)),
    "hedge": lambda d: HedgeLayer(d, 5),
}
EVERYTHING = "faults=seed:1&metrics=on&max_concurrency=4&max_bytes_per_s=1TB&retries=3&op_timeout_s=60&hedge_percent=5"


RESULTS = {"fetch": memoryview(b"fe"), "get": b"got", "stat": ObjectInfo("s", 3, 4.0)}


def recorded(name: str) -> Any:
    """A method that writes down what reaches it."""

    def told(argument: Any) -> Any:
        return "a function" if callable(argument) else argument

    async def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        self.calls.append((name, *map(told, arguments), keywords))
        if name == "create":
            return RecordedUpload(self.calls)
        if name == "read_pieces":
            arguments[3](memoryview(bytes(arguments[2])))
        return RESULTS.get(name)

    return call


class Recorded:
    """What the recorders have in common."""

    def __init__(self, calls: list[tuple[Any, ...]] | None = None) -> None:
        self.uri, self.traits = "recorder://", MemoryDriver().traits
        self.calls = [] if calls is None else calls

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        self.calls.append(("list", prefix))
        yield ObjectInfo("a", 1, 2.0)


def methods(cls: type) -> set[str]:
    """The public methods of a class of the contract."""
    return {
        name
        for name, member in inspect.getmembers(cls, inspect.isfunction)
        if not name.startswith("_")
    }


Recorder: Any = type(
    "Recorder",
    (Recorded, Driver),
    {name: recorded(name) for name in methods(Driver) - {"list"}}
    | {"deviations": {"trial": "why"}},
)
RecordedUpload: Any = type(
    "RecordedUpload", (Recorded, Upload), {name: recorded(name) for name in methods(Upload)}
)


async def use(driver: Driver) -> list[Any]:
    """Call every method once; return what they returned."""
    upload = await driver.create("up", 3)
    await upload.write(0, memoryview(b"abc"))
    taken = []
    returned = [
        await upload.commit(2), await upload.abort(), await driver.read("r", 5, memoryview(bytearray(2))),
        await driver.fetch("f", 5, 2), await driver.read_pieces("rp", 5, 2, taken.append), taken, await driver.get("g"),
        await driver.put("p", b"1", exclusive=True), await driver.stat("s"), [info async for info in driver.list("l")],
        await driver.delete("d"), await driver.delete_all("da"), await driver.sweep("sw"),
    ]  # fmt: skip
    await driver.close()
    return returned


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_forwards_every_method(name: str) -> None:
    """Each method of Driver and Upload reaches the driver below, once, with what it was given, and
    its result returns."""
    plain, below = Recorder(), Recorder()
    expected = run_virtual(use(plain))
    returned = run_virtual(use(LAYERS[name](below)))
    assert {call[0] for call in plain.calls} == methods(Driver) | methods(Upload)
    assert (returned, below.calls) == (expected, plain.calls)


def test_the_base_overrides_every_method_of_the_contract() -> None:
    """A method that is added to the contract, even with a default, is forwarded or this fails."""
    assert methods(Driver) - set(vars(Layer)) == set()
    assert methods(Upload) - set(vars(LayeredUpload)) == set()


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_shows_the_driver_below(name: str) -> None:
    """Its URI, traits, deviations and whether it is remote are those of the driver; only a limit
    lowers the concurrency."""
    below = Recorder()
    layer = LAYERS[name](below)
    assert (layer.uri, layer.deviations, layer.remote) == (below.uri, below.deviations, True)
    assert layer.traits.part_nbytes == below.traits.part_nbytes
    assert layer.traits.concurrency == (4 if name == "limit" else below.traits.concurrency)
    assert bottom(layer) is below
    assert find(layer, type(layer)) is layer


@pytest.mark.parametrize("name", LAYERS)
def test_an_error_passes_unchanged(name: str) -> None:
    """What the driver raises arrives, with key and URI; no layer wraps it."""
    with pytest.raises(NotFoundError) as caught:
        run_virtual(LAYERS[name](MemoryDriver("gone")).get("k"))
    assert (caught.value.key, caught.value.uri) == ("k", "memory://gone")


def test_without_options_a_local_driver_is_bare(tmp_path: Path) -> None:
    """No layer costs anything that does nothing."""
    assert type(open_driver(tmp_path)) is LocalDriver
    assert type(open_driver("memory://")) is MemoryDriver


def test_the_order_is_the_documented_one() -> None:
    """With every option set, the layers stand as the package docstring lists them."""
    order, driver = [], open_driver(f"memory://?{EVERYTHING}")
    while isinstance(driver, Layer):
        order.append(type(driver).__name__.removesuffix("Layer").lower())
        driver = driver.inner
    documented = re.findall(
        r"^    (\w+) +(?:above|below|next|lowest)",
        holdfast.drivers.layers.__doc__ or "",
        re.MULTILINE,
    )
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
    assert (
        type(open_driver("memory://?retries=0&op_timeout_s=off&max_concurrency=off&metrics=off"))
        is MemoryDriver
    )


def test_remote_drivers_are_retried_by_default() -> None:
    """Storage behind a network gets retries and a deadline, unless told otherwise; storage of this
    host does not."""
    defaults = {
        remote: {n: o.default for n, o in common_options(remote=remote).items()}
        for remote in (True, False)
    }
    assert {
        n: (defaults[True][n], d) for n, d in defaults[False].items() if d != defaults[True][n]
    } == {
        "retries": (10, 0),
        "op_timeout_s": (120.0, None),
    }
    assert (Driver.remote, LocalDriver.remote, MemoryDriver.remote) == (True, False, False)


def test_a_whole_stack_saves_and_loads(tmp_path: Path) -> None:
    """All layers together leave what is stored as it is."""

    async def roundtrip() -> bytes:
        driver = open_driver(f"{tmp_path.as_uri()}?{EVERYTHING}")
        try:
            upload = await driver.create("a/b", 5)
            await upload.write(0, memoryview(b"hello"))
            await upload.commit()
            into = bytearray(5)
            await driver.read("a/b", 0, memoryview(into))
            assert [info.key async for info in driver.list()] == ["a/b"]
            return bytes(into)
        finally:
            await driver.close()

    assert asyncio.run(roundtrip()) == b"hello"
