"""The conformance kit on emulators of Azure Blob Storage and Cloud Storage, and on ``peer://``. A
file of its own, so that processes can share the work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.conformance_run import run_conformance

KIT_S = 300
pytestmark = pytest.mark.timeout(KIT_S + 20)


@pytest.mark.nightly(90)
@pytest.mark.parametrize(
    ("cloud", "probe"), [("az", "azure_probe:AzureProbe"), ("gs", "gcs_probe:GcsProbe")]
)
def test_the_kit_passes(
    cloud: str, probe: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Every trial that applies passes, and nothing is declared as a deviation."""
    uri = request.getfixturevalue(f"{cloud}_url")
    given = f"HOLDFAST_TEST_{cloud.upper()}_URL" in os.environ  # the probe knows the emulator alone
    probes = () if given else ("--driver-probe", f"support.servers.{probe}")
    uri += "&read_timeout=2m" if cloud == "az" else ""
    output = run_conformance(uri, *probes, cwd=tmp_path, timeout_s=KIT_S)
    assert "deviations      0 declared, 0 cases deviated" in output


@pytest.mark.nightly(16)
def test_the_kit_passes_on_a_peer(tmp_path: Path) -> None:
    """And on the server that it reads from. What it stores gets there without the driver, which is
    for reading only."""
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
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
