"""Access to emulators of Azure Blob Storage and of Cloud Storage."""

from __future__ import annotations

import time
import uuid

import pytest
from support.drivers import asynchronous, bare, keys, stored
from support.servers.azurite import Azurite
from support.servers.fake_gcs import FakeGcs

from holdfast.drivers.contract import Driver
from holdfast.errors import AccessError, ExistsError, HoldfastError


@pytest.fixture
def azure(azurite: Azurite, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return an empty root on Azurite, without the account's key in the environment."""
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    return f"az://holdfast/{uuid.uuid4().hex}?endpoint={azurite.endpoint}"


async def may_write_and_read(driver: Driver) -> None:
    """Check that objects can be put once, uploaded in parts, read, listed and deleted."""
    await driver.put("x", b"content", exclusive=True)
    with pytest.raises(ExistsError):
        await driver.put("x", b"another", exclusive=True)
    await stored(driver, "parts", bytes(11 << 20))
    assert await keys(driver) == ["parts", "x"]
    await driver.delete_all("parts")
    assert await driver.get("x") == b"content"


@asynchronous
async def test_a_signature_allows_what_it_names(
    azure: str, azurite: Azurite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A SAS allows exactly its permissions until it expires. Errors beyond it do not show it."""
    now_s = time.time()

    def sign(permissions: str, expires_s: float) -> None:
        times = {"starts_s": now_s - 900, "expires_s": now_s + expires_s}
        signature = azurite.client.sas(permissions, **times, container="holdfast")
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
    """``?anonymous=on`` reads a public container, writes to none, and reads no private one."""
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
