"""fsspec's S3 file system as storage, on a real server: what an asynchronous file system and a
store that shows objects when they are complete do to the driver."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import numpy as np
import pytest
from support.servers.radosgw import Radosgw

import holdfast
from holdfast.drivers.registry import open_driver
from holdfast.drivers.uri import parse
from holdfast.errors import AccessError, NotFoundError, StorageError


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


def test_a_checkpoint_is_saved_loaded_and_replaced(
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
