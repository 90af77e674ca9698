"""``holdfast bench`` on real servers."""

from __future__ import annotations

import pytest
from support.commands import run_json
from support.drivers import keys, used
from support.servers.proxy import FaultProxy
from support.servers.radosgw import Radosgw

import holdfast
from holdfast.bench.simulated.forecast import forecast
from holdfast.bench.workloads.materialised import materialise
from holdfast.bench.workloads.sized import sized
from holdfast.drivers.uri import parse


@pytest.mark.nightly(10)
def test_a_server_is_measured(az_url: str) -> None:
    """Phases of checkpoints have a share of the client's rate, and nothing is left."""
    found = run_json("bench", az_url, "--size", "4MiB", "--runs", "1", status=1)
    assert {limit.partition(",")[0] for limit in found["limits"].values()} == {"obstore"}
    phases = {phase["name"]: phase for phase in found["phases"]}
    assert all(phase["seconds"][0] > 0 for phase in phases.values())
    held = {name for name, phase in phases.items() if phase["share"] is not None}
    assert held == {"save", "async save", "overwrite", "load", "verify"}
    assert used(az_url, keys) == []


@pytest.mark.nightly(16)
def test_a_peer_saves_to_a_server_and_is_checked(s3_url: str) -> None:
    """DCP saves through s3fs, next to our own phases."""
    pytest.importorskip("s3fs")
    arguments = ["bench", s3_url, "--size", "4MiB", "--runs", "1", "--peer", "dcp"]
    found = run_json(*arguments, status=1)
    shares = {phase["name"]: phase["share"] for phase in found["phases"]}
    assert shares["save: DCP, s3fs"] > 0
    assert shares["load: DCP, s3fs"] > 0
    assert found["invalid"]["load: DCP, s3fs"][-1] == "only 1 rounds"  # and too short, where it is
    assert used(s3_url, keys) == []


@pytest.mark.nightly(5)
@pytest.mark.parametrize("mib", [8, 70])
def test_requests_are_as_many_as_forecast(mib: int, radosgw: Radosgw) -> None:
    """A save and a load send exactly as many requests for image and manifest as forecast."""
    workload = sized(mib << 20)
    state = materialise(workload.specs(0, 1), 0, 1)
    with FaultProxy(("127.0.0.1", radosgw.port)) as proxy:
        uri = f"s3://holdfast/forecast-{mib}?endpoint={proxy.endpoint}"
        found = forecast(workload, parse(uri), 1, 1)
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
