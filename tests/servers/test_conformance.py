"""The conformance kit on real servers; probes outside the driver confirm its findings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.conformance_run import run_conformance
from support.given import install
from support.servers.radosgw import Radosgw, find_ceph
from support.servers.small_parts import RADOSGW

KIT_S = 900
pytestmark = pytest.mark.timeout(KIT_S + 20)

S3_PROBE = "s3_probe:S3Probe"
NONE_DEVIATED = "deviations      0 declared, 0 cases deviated"


def kit(uri: str, probe: str, folder: Path, *options: str, path: tuple[Path, ...] = ()) -> str:
    """Run the kit and return its output."""
    probed = ("--driver-probe", f"support.servers.{probe}")
    return run_conformance(uri, *probed, *options, cwd=folder, path=path, timeout_s=KIT_S)


@pytest.mark.nightly(61)
@pytest.mark.parametrize(
    ("scheme", "probe", "deviations"),
    [
        ("s3", S3_PROBE, NONE_DEVIATED),
        ("hdfs", "hdfs_probe:HdfsProbe", "deviations      1 declared"),
        ("az", "azure_client:AzureProbe", NONE_DEVIATED),
        ("gs", "fake_gcs:GcsProbe", NONE_DEVIATED),
    ],
)
def test_the_kit_passes(
    scheme: str, probe: str, deviations: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Every trial that applies passes, with no more deviations than declared."""
    uri = request.getfixturevalue(f"{scheme}_url")
    if scheme in ("az", "gs") and f"HOLDFAST_TEST_{scheme.upper()}_URL" in os.environ:
        pytest.skip("the probe knows the emulator alone")
    uri += "&read_timeout=2m" if scheme == "az" else ""
    assert deviations in kit(uri, probe, tmp_path)


@pytest.mark.nightly(16)
def test_the_kit_passes_on_a_peer(tmp_path: Path) -> None:
    """The kit passes on the read-only peer driver, and on the server that it reads from."""
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    packages = install(tmp_path / "packages", "shown = support.servers.peer_store:ShownDriver")
    probe = "peer_store:ShownProbe"
    assert NONE_DEVIATED in kit("shown://kit/root", probe, tmp_path, path=(packages,))


@pytest.mark.drill
def test_the_kit_passes_on_s3_through_fsspec(s3_url: str, tmp_path: Path) -> None:
    """The kit passes through fsspec, and s3fs leaves nothing open."""
    uri = "fsspec+" + s3_url.replace("endpoint=", "endpoint_url=")
    assert NONE_DEVIATED in kit(uri, S3_PROBE, tmp_path)


@pytest.mark.drill
def test_the_kit_passes_with_small_objects_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small objects as multipart uploads are cancelled, aborted, forgotten and raced."""
    if find_ceph() is None:
        pytest.skip("radosgw is not installed: make test-servers")
    server = Radosgw(tmp_path / "server", extra=RADOSGW)
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    try:
        server.start()
        output = kit(server.uri, S3_PROBE, tmp_path, "-p", "support.servers.small_parts")
    finally:
        server.stop()
    assert "part_nbytes=65536" in output
    assert NONE_DEVIATED in output
