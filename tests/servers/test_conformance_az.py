"""The conformance kit on an emulator of Azure Blob Storage: Azurite. A file of its own, so that
processes can share the work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.conformance_run import run_conformance

KIT_S = 300


@pytest.mark.timeout(KIT_S + 20)
def test_the_kit_passes(az_url: str, tmp_path: Path) -> None:
    """Every trial that applies passes, and nothing is declared as a deviation."""
    # The probe knows the emulator alone.
    given = "HOLDFAST_TEST_AZ_URL" in os.environ
    probe = () if given else ("--driver-probe", "support.servers.azure_probe:AzureProbe")
    output = run_conformance(f"{az_url}&read_timeout=2m", *probe, cwd=tmp_path, timeout_s=KIT_S)
    assert "deviations      0 declared, 0 cases deviated" in output
