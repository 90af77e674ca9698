"""The conformance kit, run as its users run it, on real servers; what it finds is also looked for
around the driver."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.conformance_run import run_conformance
from support.servers.radosgw import Radosgw, find_ceph
from support.servers.small_parts import RADOSGW

KIT_S = 300


@pytest.mark.timeout(KIT_S + 20)
def test_the_kit_passes_on_s3(s3_url: str, tmp_path: Path) -> None:
    """Every trial that applies passes, and nothing is declared as a deviation."""
    output = run_conformance(
        s3_url, "--driver-probe", "support.servers.s3_probe:S3Probe", cwd=tmp_path, timeout_s=KIT_S
    )
    assert "deviations      0 declared, 0 cases deviated" in output


@pytest.mark.timeout(KIT_S + 20)
def test_the_kit_passes_on_hdfs(hdfs_url: str, tmp_path: Path) -> None:
    """Every trial that applies passes; one deviation is declared."""
    output = run_conformance(
        hdfs_url,
        "--driver-probe",
        "support.servers.hdfs_probe:HdfsProbe",
        cwd=tmp_path,
        timeout_s=KIT_S,
    )
    assert "deviations      1 declared" in output


@pytest.mark.drill
@pytest.mark.timeout(2 * KIT_S + 20)
def test_the_kit_passes_on_s3_through_fsspec(s3_url: str, tmp_path: Path) -> None:
    """Every trial that applies passes, and nothing is declared as a deviation: s3fs leaves nothing
    open, either."""
    uri = "fsspec+" + s3_url.replace("endpoint=", "endpoint_url=")
    output = run_conformance(
        uri, "--driver-probe", "support.servers.s3_probe:S3Probe", cwd=tmp_path, timeout_s=2 * KIT_S
    )
    assert "deviations      0 declared, 0 cases deviated" in output


@pytest.mark.drill
@pytest.mark.timeout(3 * KIT_S + 20)
def test_the_kit_passes_on_sftp_through_fsspec(sftp_url: str, tmp_path: Path) -> None:
    """Every trial that applies passes, and nothing is declared as a deviation; each operation is
    one of OpenSSH's."""
    probe = "support.servers.sftp_probe:SftpProbe"
    output = run_conformance(sftp_url, "--driver-probe", probe, cwd=tmp_path, timeout_s=3 * KIT_S)
    assert "deviations      0 declared, 0 cases deviated" in output


@pytest.mark.drill
@pytest.mark.timeout(2 * KIT_S + 20)
def test_the_kit_passes_on_s3_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the kit's objects, which are small, are multipart uploads: cancelled, aborted,
    forgotten, raced."""
    if find_ceph() is None:
        pytest.skip("radosgw is not installed: make test-servers")
    server = Radosgw(tmp_path / "server", extra=RADOSGW)
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    server.start()
    try:
        server.client().create_bucket(Bucket="holdfast")
        options = (
            "--driver-probe",
            "support.servers.s3_probe:S3Probe",
            "-p",
            "support.servers.small_parts",
        )
        uri = f"s3://holdfast?endpoint={server.endpoint}"
        output = run_conformance(uri, *options, cwd=tmp_path, timeout_s=2 * KIT_S)
    finally:
        server.stop()
    assert "part_nbytes=65536" in output
    assert "deviations      0 declared, 0 cases deviated" in output
