"""The base of drivers of asynchronous clients: what it does for all of them is what the contract
asks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.asynchronous import DictDriver
from support.conformance_run import run_conformance

from holdfast.drivers.uri import parse
from holdfast.errors import StorageError

ENTRY_POINTS = "[holdfast.drivers]\ndict = support.asynchronous:DictDriver\n"


@pytest.mark.timeout(240)  # on a busy machine
def test_a_driver_of_an_asynchronous_client_keeps_the_contract(tmp_path: Path) -> None:
    """Nothing is in such a driver but its client's calls, and every trial that applies passes."""
    site = tmp_path / "site/dict-1.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: dict\nVersion: 1\n")
    (site / "entry_points.txt").write_text(ENTRY_POINTS)
    output = run_conformance("dict://here", cwd=tmp_path, path=[site.parent])
    assert "deviations      0 declared, 0 cases deviated" in output


def test_close_drops_what_is_unfinished_though_the_client_fails(no_leaks: None) -> None:
    """An upload that cannot be dropped keeps neither the others nor the connection."""

    async def main() -> None:
        driver = DictDriver(parse("dict://close"))
        driver.stuck = {"b"}
        for key in ("a", "b", "c"):
            await driver.create(key, 3)
        await driver.close()
        assert sorted(driver.dropped) == ["a", "c"]
        with pytest.raises(StorageError, match="closed"):
            await driver.get("a")

    asyncio.run(main())
