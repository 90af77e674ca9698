"""The conformance kit on real servers; probes outside the driver confirm its findings."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.conformance_run import run_conformance
from support.servers.radosgw import Radosgw, find_ceph
from support.servers.seaweedfs import Seaweedfs, find_seaweedfs
from support.servers.small_parts import RADOSGW

KIT_S = 900
pytestmark = pytest.mark.timeout(KIT_S + 20)

S3_PROBE = ("--driver-probe", "support.servers.s3_probe:S3Probe")
NONE_DEVIATED = "deviations      0 declared, 0 cases deviated"


@pytest.mark.nightly(49)
def test_the_kit_passes_on_s3(s3_url: str, tmp_path: Path) -> None:
    """Every trial that applies passes, and nothing is declared as a deviation."""
    assert NONE_DEVIATED in run_conformance(s3_url, *S3_PROBE, cwd=tmp_path, timeout_s=KIT_S)


@pytest.mark.nightly(61)
def test_the_kit_passes_on_hdfs(hdfs_url: str, tmp_path: Path) -> None:
    """Every trial that applies passes; one deviation is declared."""
    probe = ("--driver-probe", "support.servers.hdfs_probe:HdfsProbe")
    output = run_conformance(hdfs_url, *probe, cwd=tmp_path, timeout_s=KIT_S)
    assert "deviations      1 declared" in output


@pytest.mark.drill
def test_the_kit_passes_on_s3_through_fsspec(s3_url: str, tmp_path: Path) -> None:
    """The kit passes through fsspec, and s3fs leaves nothing open."""
    uri = "fsspec+" + s3_url.replace("endpoint=", "endpoint_url=")
    assert NONE_DEVIATED in run_conformance(uri, *S3_PROBE, cwd=tmp_path, timeout_s=KIT_S)


@pytest.mark.drill
def test_the_kit_passes_on_sftp_through_fsspec(sftp_url: str, tmp_path: Path) -> None:
    """The kit passes on SFTP, where each operation is a single one of OpenSSH."""
    probe = ("--driver-probe", "support.servers.sftp_probe:SftpProbe")
    assert NONE_DEVIATED in run_conformance(sftp_url, *probe, cwd=tmp_path, timeout_s=KIT_S)


@pytest.mark.drill
@pytest.mark.parametrize("kind", ["parts", "seaweedfs"])
def test_the_kit_passes_on_other_servers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kit passes on a third S3 server, and with small objects as multipart uploads.

    These uploads are cancelled, aborted, forgotten and raced.
    """
    if (find_ceph if kind == "parts" else find_seaweedfs)() is None:
        pytest.skip(f"the server for {kind} is not installed: make test-servers")
    options = S3_PROBE
    server: Radosgw | Seaweedfs
    if kind == "parts":
        server = Radosgw(tmp_path / "server", extra=RADOSGW)
        options += ("-p", "support.servers.small_parts")
    else:
        server = Seaweedfs(tmp_path)
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    try:
        server.start()
        if kind == "parts":
            server.client().create_bucket(Bucket="holdfast")
            uri = f"s3://holdfast?endpoint={server.endpoint}"
        else:
            uri = server.uri
        output = run_conformance(uri, *options, cwd=tmp_path, timeout_s=KIT_S)
    finally:
        server.stop()
    assert ("part_nbytes=65536" in output) == (kind == "parts")
    assert NONE_DEVIATED in output
