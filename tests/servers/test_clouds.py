"""Checkpoints, large objects and access on emulators of Azure Blob Storage and of Cloud Storage."""

from __future__ import annotations

import random
import time
import uuid
from pathlib import Path

import pytest
import torch
from support.bits import difference
from support.drivers import asynchronous, keys
from support.servers.azurite import Azurite
from support.servers.fake_gcs import FakeGcs

import holdfast
from holdfast.cli import app
from holdfast.drivers.contract import Driver
from holdfast.drivers.registry import open_driver
from holdfast.drivers.uri import Uri, join, parse
from holdfast.errors import AccessError, DamagedError, ExistsError, HoldfastError

MIB = 1 << 20


@pytest.fixture(params=["az", "gs"])
def root(request: pytest.FixtureRequest) -> Uri:
    """An empty root on an emulator."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return parse(url)


def bare(root: Uri | str, **options: str) -> Driver:
    """A driver without the layers that users get around it."""
    return open_driver(str(root), retries=0, op_timeout_s="off", **options)


@pytest.mark.nightly(14)
def test_a_checkpoint_goes_there_and_back(root: Uri, tmp_path: Path) -> None:
    """A checkpoint is saved, replaced, read in part, copied both ways, verified and pruned."""
    first = {"x": torch.randn(5 << 20), "small": [torch.arange(9), "text"], "step": 1}
    second = {"x": torch.randn(5 << 20), "small": [torch.arange(7), "other"], "step": 1}
    one, two = str(join(root, "run/step-1")), str(join(root, "run/step-2"))
    for state in (first, second):
        holdfast.save(one, state)
        assert difference(state, holdfast.load(one)) is None
    with holdfast.open(one) as checkpoint:
        assert torch.equal(checkpoint.read("x", rows=slice(9, 19)), second["x"][9:19])

    holdfast.copy(one, tmp_path / "copy")
    assert difference(second, holdfast.load(tmp_path / "copy")) is None
    holdfast.copy(tmp_path / "copy", two)
    assert app.run(["verify", two]) == 0
    paths = [found.path for found in holdfast.list_checkpoints(str(root))]
    assert paths == ["run/step-1", "run/step-2"]
    holdfast.save(str(join(root, "run/step-3")), {"step": 3})
    assert len(holdfast.prune(str(join(root, "run")), keep_last=1).checkpoints) == 2
    assert [found.path for found in holdfast.list_checkpoints(str(root))] == ["run/step-3"]


@asynchronous
async def test_an_object_of_many_parts_is_read_by_ranges(root: Uri, seed: int) -> None:
    """It is invisible before the commit; then all its ranges are right, and one beyond is damage."""
    driver = bare(root, part_size="5MiB")
    content = random.Random(seed).randbytes(17 * MIB + 123)
    upload = await driver.create("a/x", len(content))
    for start in range(0, len(content), 5 * MIB):
        await upload.write(start, memoryview(content)[start : start + 5 * MIB])
    assert await keys(driver) == []
    await upload.commit()
    for start, nbytes in ((5 * MIB - 7, 14), (len(content) - 5, 5), (0, len(content))):
        into = bytearray(nbytes)
        await driver.read("a/x", start, memoryview(into))
        assert into == content[start : start + nbytes]
    with pytest.raises(DamagedError):
        await driver.read("a/x", len(content) - 5, memoryview(bytearray(6)))
    await driver.close()


# Who may do what


@pytest.fixture
def azure(azurite: Azurite, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty root on Azurite, without the account's key in the environment."""
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    return f"az://holdfast/{uuid.uuid4().hex}?endpoint={azurite.endpoint}"


async def may_write_and_read(driver: Driver) -> None:
    """See that objects can be put once, uploaded in parts, read, listed and deleted."""
    await driver.put("x", b"content", exclusive=True)
    with pytest.raises(ExistsError):
        await driver.put("x", b"another", exclusive=True)
    upload = await driver.create("parts", 11 << 20)
    await upload.write(0, memoryview(bytes(11 << 20)))
    await upload.commit()
    assert await keys(driver) == ["parts", "x"]
    await driver.delete_all("parts")
    assert await driver.get("x") == b"content"


@asynchronous
async def test_a_signature_allows_what_it_names(
    azure: str, azurite: Azurite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A SAS for all is enough for a driver; beyond a narrow or an expired one comes an access error.

    No error shows the signature.
    """
    now_s = time.time()

    def sign(permissions: str, expires_s: float) -> None:
        signature = azurite.client.sas(
            permissions,
            starts_s=now_s - 900,
            expires_s=now_s + expires_s,
            container="holdfast",
        )
        monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", signature)

    drivers = [bare(azure, part_size="5MiB") for _ in range(3)]
    everything, reading, expired = drivers
    sign("racwdl", 600)
    await may_write_and_read(everything)
    sign("rl", 600)
    assert await reading.get("x") == b"content"
    sign("racwdl", -300)
    for refused in (reading.put("y", b"content"), reading.delete("x"), expired.get("x")):
        with pytest.raises(AccessError) as caught:
            await refused
        assert "sig=" not in f"{caught.value} {caught.value.__cause__}"
    for driver in drivers:
        await driver.close()


@asynchronous
async def test_a_wrong_key_is_an_access_error(azure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key of another account is refused without being shown."""
    key = "bm90IHRoZSBrZXkgb2YgdGhpcyBhY2NvdW50"
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", key)
    driver = bare(azure, deadline="2s")
    with pytest.raises(AccessError) as caught:
        await driver.put("x", b"content")
    assert key not in str(caught.value)
    await driver.close()


@asynchronous
async def test_anybody_may_read_what_is_public(azure: str, azurite: Azurite) -> None:
    """``?anonymous=on`` reads a public container without credentials, and may not write to it.

    A private container is closed to it.
    """
    container = f"public-{uuid.uuid4().hex}"
    azurite.client.create_container(container, public=True)
    azurite.client.put(container, "run/x", b"content")
    driver = bare(f"az://{container}/run?endpoint={azurite.endpoint}&anonymous=on")
    assert await driver.get("x") == b"content"
    assert await keys(driver) == ["x"]
    with pytest.raises(AccessError):
        await driver.put("y", b"content")
    await driver.close()
    private = bare(azure, anonymous="on")
    for refused in (private.get("x"), private.put("x", b"content"), keys(private)):
        with pytest.raises(HoldfastError):
            await refused
    await private.close()


@asynchronous
async def test_google_is_asked_without_a_token(
    fake_gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``?anonymous=on`` writes where anybody may, and asks no metadata server for a token."""
    monkeypatch.delenv("GOOGLE_SERVICE_ACCOUNT_KEY")
    at = f"gs://holdfast/{uuid.uuid4().hex}?endpoint={fake_gcs.endpoint}&anonymous=on"
    driver = bare(at, part_size="5MiB")
    await may_write_and_read(driver)
    await driver.close()
