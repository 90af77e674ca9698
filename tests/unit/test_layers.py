"""Test what all layers have in common: they forward everything, in the documented order."""

from __future__ import annotations

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
from holdfast.drivers.layers.layer import Layer, bottom, find
from holdfast.drivers.layers.metrics import Meter, MetricsLayer
from holdfast.drivers.layers.retry import RetryLayer, RetryPolicy
from holdfast.drivers.layers.stack import common_options
from holdfast.drivers.layers.throttle import LimitLayer, ThrottleLayer, TokenBucket
from holdfast.drivers.local.driver import LocalDriver
from holdfast.drivers.memory import MemoryDriver
from holdfast.drivers.registry import open_driver

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
    """Return a method that records its arguments."""

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
    """Base of the recorders."""

    def __init__(self, calls: list[tuple[Any, ...]] | None = None) -> None:
        self.uri, self.traits = "recorder://", MemoryDriver().traits
        self.calls = [] if calls is None else calls

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        self.calls.append(("list", prefix))
        yield ObjectInfo("a", 1, 2.0)


def methods(cls: type) -> set[str]:
    """Return the public methods of a class of the contract."""
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
    """Call every method once; return the results."""
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
    """Each method passes its arguments to the driver below, once, and returns its result."""
    plain, below = Recorder(), Recorder()
    expected = run_virtual(use(plain))
    returned = run_virtual(use(LAYERS[name](below)))
    assert {call[0] for call in plain.calls} == methods(Driver) | methods(Upload)
    assert (returned, below.calls) == (expected, plain.calls)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_shows_the_driver_below(name: str) -> None:
    """A layer has the URI, traits and deviations of the driver; only a limit lowers a trait."""
    below = Recorder()
    layer = LAYERS[name](below)
    assert (layer.uri, layer.deviations, layer.remote) == (below.uri, below.deviations, True)
    assert layer.traits.part_nbytes == below.traits.part_nbytes
    assert layer.traits.concurrency == (4 if name == "limit" else below.traits.concurrency)
    assert bottom(layer) is below
    assert find(layer, type(layer)) is layer


def test_without_options_a_local_driver_is_bare(tmp_path: Path) -> None:
    """Without options there are no layers."""
    assert type(open_driver(tmp_path)) is LocalDriver
    assert type(open_driver("memory://")) is MemoryDriver


def test_the_order_is_the_documented_one() -> None:
    """With every option set, the layers are in the order of the package docstring."""
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
    """Only remote storage has retries and a deadline by default."""
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
