"""``holdfast bench`` on real servers."""

from __future__ import annotations

import asyncio
import json

import pytest

from holdfast.cli import app
from holdfast.drivers.registry import open_driver


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
    """Each phase has a time, those of checkpoints a share of their limit, which is that of a client
    that is not ours; and nothing is left."""
    uri: str = request.getfixturevalue(f"{kind}_url")
    assert app.run(["bench", uri, "--size", "16MiB", "--runs", "1", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    client = "hdfs-native" if kind == "hdfs" else "obstore"
    assert {name: each.split(",")[0] for name, each in found["limits"].items()} == {
        "write limit": client,
        "read limit": client,
    }
    phases = found["phases"]
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


def test_a_peer_saves_to_a_server_and_is_checked(
    s3_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """DCP through s3fs, beside our own phases, with its share of the client's rate."""
    pytest.importorskip("s3fs")
    arguments = ["bench", s3_url, "--size", "4MiB", "--runs", "1", "--json", "--peer", "dcp"]
    assert app.run(arguments) == 1
    found = json.loads(capsys.readouterr().out)
    shares = {phase["name"]: phase["share"] for phase in found["phases"]}
    assert shares["save: DCP, s3fs"] > 0
    assert shares["load: DCP, s3fs"] > 0
    assert found["invalid"]["load: DCP, s3fs"] == ["only 1 rounds"]
    assert asyncio.run(_keys(s3_url)) == []
