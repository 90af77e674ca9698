"""The conformance kit on a third S3 server: SeaweedFS."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.conformance_run import run_conformance
from support.servers.seaweedfs import Seaweedfs, find_seaweedfs

KIT_S = 400


@pytest.mark.drill  # radosgw proves it in every run
@pytest.mark.timeout(KIT_S + 20)
def test_the_kit_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every trial that applies passes, and nothing is declared as a deviation."""
    if find_seaweedfs() is None:
        pytest.skip("SeaweedFS is not installed: make test-servers")
    server = Seaweedfs(tmp_path)
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    try:
        server.start()
        probe = ("--driver-probe", "support.servers.s3_probe:S3Probe")
        output = run_conformance(server.uri, *probe, cwd=tmp_path, timeout_s=KIT_S)
    finally:
        server.stop()
    assert "deviations      0 declared, 0 cases deviated" in output
