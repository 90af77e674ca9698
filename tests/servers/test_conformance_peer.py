"""The conformance kit on ``peer://``, and the server that it reads from. What it stores gets there
without the driver, which is for reading only."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.conformance_run import run_conformance

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

KIT_S = 300


@pytest.mark.timeout(KIT_S + 20)
def test_the_kit_passes(tmp_path: Path) -> None:
    """Every trial that applies passes, and nothing is declared as a deviation."""
    package = tmp_path / "packages/shown-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: shown\nVersion: 1\n")
    (package / "entry_points.txt").write_text(
        "[holdfast.drivers]\nshown = support.servers.peer_store:ShownDriver\n"
    )
    probe = ("--driver-probe", "support.servers.peer_store:ShownProbe")
    output = run_conformance(
        "shown://kit/root", *probe, cwd=tmp_path, path=[package.parent], timeout_s=KIT_S
    )
    assert "deviations      0 declared, 0 cases deviated" in output
