"""``holdfast bench`` on real servers."""

from __future__ import annotations

import asyncio
import json

import pytest
from support.servers.proxy import FaultProxy
from support.servers.radosgw import Radosgw

import holdfast
from holdfast.bench.simulated.forecast import forecast
from holdfast.bench.simulated.rates import Limits, Rates
from holdfast.bench.workloads.materialised import materialise
from holdfast.bench.workloads.sized import Sized
from holdfast.cli import app
from holdfast.drivers.registry import open_driver
from holdfast.drivers.uri import parse


async def _keys(uri: str) -> list[str]:
    driver = open_driver(uri)
    try:
        return [info.key async for info in driver.list("")]
    finally:
        await driver.close()


@pytest.mark.parametrize("kind", ["s3", "hdfs", "az"])
def test_a_server_is_measured(
    kind: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each phase has a time, those of checkpoints a share of their limit, and nothing is left."""
    uri: str = request.getfixturevalue(f"{kind}_url")
    assert app.run(["bench", uri, "--size", "16MiB", "--runs", "1", "--json"]) == 1
    phases = json.loads(capsys.readouterr().out)["phases"]
    assert len(phases) == 7
    assert all(phase["seconds"][0] > 0 for phase in phases)
    assert [phase["share"] is not None for phase in phases] == [
        False,
        True,
        True,
        False,
        True,
        True,
        False,
    ]
    assert asyncio.run(_keys(uri)) == []


@pytest.mark.parametrize("mib", [8, 70])
def test_requests_are_as_many_as_forecast(mib: int, radosgw: Radosgw) -> None:
    """Of image and manifest: one put, or one that begins, parts, and one that ends; then looks at
    what is stored, and the reads of a load."""
    workload = Sized(mib << 20)
    state = materialise(workload.specs(0, 1), 0, 1)
    with FaultProxy(("127.0.0.1", radosgw.port)) as proxy:
        uri = f"s3://holdfast/forecast-{mib}?endpoint={proxy.endpoint}"
        found = forecast(workload, parse(uri), 1, 1, Rates.alike(Limits()), None)
        holdfast.save(uri, state)
        of_files = [asked for asked in proxy.asked if "0.safetensors" in asked]
        puts = [asked for asked in of_files if asked.startswith(("PUT", "POST"))]
        assert len(puts) + 1 == found.save_requests.puts
        looks = [asked for asked in of_files if asked.startswith("HEAD")]
        assert len(looks) == found.save_requests.gets
        proxy.asked.clear()
        holdfast.load(uri, into=state)
        gets = [asked for asked in proxy.asked if asked.startswith("GET")]
        assert len(gets) == len(proxy.asked) == found.load_requests.gets
