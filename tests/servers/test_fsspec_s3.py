"""fsspec's S3 file system as storage, on a real server: what an asynchronous file system and a
store that shows objects when they are complete do to the driver."""

from __future__ import annotations

import asyncio
import gc
import uuid
from pathlib import Path

import numpy as np
import pytest
from support.servers.radosgw import Radosgw

import holdfast
from holdfast.drivers.contract import Driver
from holdfast.drivers.registry import driver_class, open_driver
from holdfast.drivers.uri import parse
from holdfast.errors import AccessError, NotFoundError, StorageError

MIB = 1 << 20


@pytest.fixture
def url(radosgw: Radosgw) -> str:
    """The URI of an empty root."""
    return f"fsspec+s3://holdfast/{uuid.uuid4().hex}?endpoint_url={radosgw.endpoint}"


def bare(url: str) -> Driver:
    """The driver for ``url``, without layers."""
    uri = parse(url)
    return driver_class(uri.scheme).open(uri)


def stored(server: Radosgw, url: str) -> dict[str, int]:
    """What the bucket holds below ``url``, as another client sees it; and unfinished uploads there."""
    prefix = parse(url).location.removeprefix("holdfast/")
    client = server.client()
    objects = client.list_objects_v2(Bucket="holdfast", Prefix=prefix).get("Contents", ())
    uploads = client.list_multipart_uploads(Bucket="holdfast").get("Uploads", ())
    found = {o["Key"].removeprefix(prefix + "/"): o["Size"] for o in objects}
    return found | {"unfinished " + u["Key"]: 0 for u in uploads if u["Key"].startswith(prefix)}


def test_objects_of_every_size_come_back(url: str, radosgw: Radosgw) -> None:
    """Empty, small, of one part and of several; read whole, in part, and not beyond the end."""

    async def run() -> None:
        driver = bare(url + "&part_size=5MiB")
        for nbytes in (0, 10, 5 * MIB, 12 * MIB + 3):
            content = np.random.default_rng(nbytes).bytes(nbytes)
            upload = await driver.create(f"data/{nbytes}", nbytes)
            for start in range(0, nbytes, 4 * MIB):
                await upload.write(start, memoryview(content)[start : start + 4 * MIB])
            await upload.commit()
            assert await driver.get(f"data/{nbytes}") == content
            if nbytes > 10:
                into = bytearray(1000)
                await driver.read(f"data/{nbytes}", nbytes - 1000, memoryview(into))
                assert into == content[-1000:]
            with pytest.raises(holdfast.DamagedError):
                await driver.read(f"data/{nbytes}", nbytes, memoryview(bytearray(1)))
        assert {info.key async for info in driver.list("data")} == {
            f"data/{n}" for n in (0, 10, 5 * MIB, 12 * MIB + 3)
        }
        await driver.delete_all("data")
        await driver.close()

    asyncio.run(run())
    assert stored(radosgw, url) == {}


@pytest.mark.parametrize("nbytes", [10, 12 * MIB])
def test_an_upload_that_is_not_committed_leaves_nothing(
    url: str, radosgw: Radosgw, nbytes: int
) -> None:
    """Aborted, or left until the driver is closed and the garbage is collected: no object, and no
    dangling parts."""

    async def run() -> None:
        driver = bare(url + "&part_size=5MiB")
        for end in ("aborted", "left"):
            upload = await driver.create(end, nbytes + 1)
            await upload.write(0, memoryview(bytes(nbytes)))
            if end == "aborted":
                await upload.abort()
        await driver.close()

    asyncio.run(run())
    gc.collect()
    assert stored(radosgw, url) == {}


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
