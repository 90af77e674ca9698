"""The conformance kit on an emulator of S3: moto. A file of its own, so that processes can share
the work."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.conformance_run import run_conformance

KIT_S = 300


@pytest.mark.drill  # real servers of S3 prove more
@pytest.mark.timeout(KIT_S + 20)
def test_the_kit_passes(moto_url: str, tmp_path: Path) -> None:
    """Every trial that applies passes, and nothing is declared as a deviation."""
    output = run_conformance(
        moto_url,
        "--driver-probe",
        "support.servers.s3_probe:S3Probe",
        cwd=tmp_path,
        timeout_s=KIT_S,
    )
    assert "deviations      0 declared, 0 cases deviated" in output
