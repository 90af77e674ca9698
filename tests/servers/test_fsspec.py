"""fsspec's own file systems on servers, sftp and s3fs."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.conformance_run import run_conformance
from support.servers.radosgw import Radosgw

import holdfast
from holdfast.drivers.registry import open_driver
from holdfast.drivers.uri import parse
from holdfast.errors import AccessError, NotFoundError, StorageDownError, StorageError

if TYPE_CHECKING:
    from support.servers.sftp import SftpServer


@pytest.fixture
def sftp_url(sftp: SftpServer) -> str:
    """Return the URI of an empty root on an SFTP server."""
    pytest.importorskip("paramiko")
    options = f"port={sftp.port}&username={sftp.username}"
    return f"fsspec+sftp://{sftp.host}{sftp.root}/{uuid.uuid4().hex}?{options}"


@pytest.mark.drill
@pytest.mark.timeout(920)
def test_the_kit_passes_on_sftp(sftp_url: str, tmp_path: Path) -> None:
    """The conformance kit passes on SFTP without a deviation."""
    probe = ("--driver-probe", "support.servers.sftp:SftpProbe")
    output = run_conformance(sftp_url, *probe, cwd=tmp_path, timeout_s=900)
    assert "deviations      0 declared, 0 cases deviated" in output


def test_errors_of_an_sftp_server_are_ours(
    sftp_url: str, sftp: SftpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown key is an access error, a server that is gone is down, and then back again."""
    state = {"w": np.ones(10)}
    with monkeypatch.context() as patch:
        patch.setenv("HOME", str(tmp_path))
        with pytest.raises(AccessError, match="uthentication"):
            holdfast.save(sftp_url, state)
    sftp.kill()
    try:
        with pytest.raises(StorageDownError):
            holdfast.save(sftp_url + "&retries=1", state)
    finally:
        sftp.listen()
    holdfast.save(sftp_url, state)
    assert (holdfast.load(sftp_url)["w"] == 1).all()


# s3fs


@pytest.fixture
def url(radosgw: Radosgw) -> str:
    """Return the URI of an empty root."""
    return f"fsspec+s3://holdfast/{uuid.uuid4().hex}?endpoint_url={radosgw.endpoint}"


def test_a_checkpoint_goes_to_s3fs_and_is_replaced(
    url: str, radosgw: Radosgw, rng: np.random.Generator
) -> None:
    """The second save replaces the first and leaves nothing else, not even unfinished uploads."""
    for step in (1, 2):
        state = {"w": rng.standard_normal((3000, 1000)), "step": step}
        holdfast.save(url, state)
        back = holdfast.load(url)
        assert back["step"] == step
        assert (back["w"] == state["w"]).all()
    prefix = parse(url).location.removeprefix("holdfast/")
    client = radosgw.client()
    objects = client.list_objects_v2(Bucket="holdfast", Prefix=prefix)["Contents"]
    names = sorted(Path(found["Key"]).name for found in objects)
    assert names == ["0.safetensors", "fate", "manifest.safetensors", "telemetry.jsonl.gz"]
    assert "Uploads" not in client.list_multipart_uploads(Bucket="holdfast", Prefix=prefix)


def test_errors_of_s3fs_are_ours(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing object or bucket and wrong credentials raise errors that a handler can tell apart."""

    async def run(url: str, kind: type[StorageError]) -> None:
        driver = open_driver(url, retries=0)
        try:
            with pytest.raises(kind):
                await driver.get("x")
        finally:
            await driver.close()

    asyncio.run(run(url, NotFoundError))
    asyncio.run(run(url.replace("//holdfast/", "//nonesuch/"), NotFoundError))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    asyncio.run(run(url, AccessError))
