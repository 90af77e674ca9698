"""fsspec's own file systems on real servers: sftp of OpenSSH, and s3fs."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from support.servers.radosgw import Radosgw
from support.servers.sshd import Sshd

import holdfast
from holdfast.drivers.registry import open_driver
from holdfast.drivers.uri import parse
from holdfast.errors import AccessError, NotFoundError, StorageDownError, StorageError


def files(uri: str) -> list[str]:
    """What lies at a URI, by the names alone."""
    folder = Path(urlsplit(uri).path)
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_checkpoint_is_saved_loaded_and_replaced(sftp_url: str, rng: np.random.Generator) -> None:
    """Bit for bit; the second save replaces the first, and leaves nothing else."""
    for step in (1, 2):
        state = {"w": rng.standard_normal((300, 1000)), "step": step}
        holdfast.save(sftp_url, state)
        back = holdfast.load(sftp_url)
        assert back["step"] == step
        assert (back["w"] == state["w"]).all()
    names = ["0.safetensors", "fate", "manifest.safetensors", "telemetry.jsonl.gz"]
    assert files(sftp_url) == names


def test_a_key_that_the_server_does_not_know_is_an_access_error(
    sftp_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has no key of the account is told that the server does not let them in, at once."""
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(AccessError, match="uthentication"):
        holdfast.save(sftp_url, {"w": np.ones(10)})
    assert files(sftp_url) == []


def test_a_server_that_is_gone_is_an_error_of_the_storage(sftp_url: str, sshd: Sshd) -> None:
    """Nobody listens: the error says so, and the next save, to the server that is back, succeeds."""
    sshd.kill()
    try:
        with pytest.raises(StorageDownError):
            holdfast.save(sftp_url + "&retries=1", {"w": np.ones(10)})
    finally:
        sshd.listen()
    holdfast.save(sftp_url, {"w": np.ones(10)})
    assert (holdfast.load(sftp_url)["w"] == 1).all()


# s3fs


@pytest.fixture
def url(radosgw: Radosgw) -> str:
    """The URI of an empty root."""
    return f"fsspec+s3://holdfast/{uuid.uuid4().hex}?endpoint_url={radosgw.endpoint}"


def stored(server: Radosgw, url: str) -> dict[str, int]:
    """What the bucket holds below ``url``, as another client sees it; and unfinished uploads there."""
    prefix = parse(url).location.removeprefix("holdfast/")
    client = server.client()
    objects = client.list_objects_v2(Bucket="holdfast", Prefix=prefix).get("Contents", ())
    uploads = client.list_multipart_uploads(Bucket="holdfast").get("Uploads", ())
    found = {o["Key"].removeprefix(prefix + "/"): o["Size"] for o in objects}
    return found | {"unfinished " + u["Key"]: 0 for u in uploads if u["Key"].startswith(prefix)}


def test_a_checkpoint_goes_to_s3fs_and_is_replaced(
    url: str, radosgw: Radosgw, rng: np.random.Generator
) -> None:
    """Bit for bit, with the layers that users get; the second save replaces the first, and leaves
    nothing else."""
    for step in (1, 2):
        state = {"w": rng.standard_normal((3000, 1000)), "step": step}
        holdfast.save(url, state)
        back = holdfast.load(url)
        assert back["step"] == step
        assert (back["w"] == state["w"]).all()
    names = sorted(Path(key).name for key in stored(radosgw, url))
    assert names == ["0.safetensors", "fate", "manifest.safetensors", "telemetry.jsonl.gz"]


def test_errors_say_what_is_wrong(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No such object, no such bucket, wrong credentials: each an error that a handler can tell
    apart."""

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
