"""``holdfast bench`` on real servers."""

from __future__ import annotations

import asyncio
import json

import pytest
from support.bench_job import bench_by_torchrun

from holdfast.cli import app
from holdfast.drivers.registry import open_driver


async def _keys(uri: str) -> list[str]:
    driver = open_driver(uri)
    try:
        return [info.key async for info in driver.list("")]
    finally:
        await driver.close()


def test_a_server_is_measured(az_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each phase has a time, those of checkpoints a share of their limit, and nothing is left."""
    assert app.run(["bench", az_url, "--size", "16MiB", "--runs", "1", "--json"]) == 1
    phases = {phase["name"]: phase for phase in json.loads(capsys.readouterr().out)["phases"]}
    assert all(phase["seconds"][0] > 0 for phase in phases.values())
    held = {name for name, phase in phases.items() if phase["share"] is not None}
    assert held == {"save", "async save", "overwrite", "load", "verify"}
    assert asyncio.run(_keys(az_url)) == []


@pytest.mark.parametrize("kind", ["s3", "hdfs"])
def test_four_ranks_measure_a_server(kind: str, request: pytest.FixtureRequest) -> None:
    """Under torchrun. Nothing is left."""
    uri: str = request.getfixturevalue(f"{kind}_url")
    phases = {phase["name"]: phase for phase in bench_by_torchrun(uri, 4)["phases"]}
    assert all(len(phases[name]["ranks_s"][0]) == 4 for name in ("save", "load", "reshard"))
    assert all(phases[name]["share"] > 0 for name in ("save", "load", "reshard"))
    assert asyncio.run(_keys(uri)) == []
