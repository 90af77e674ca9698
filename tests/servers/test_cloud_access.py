"""Who may do what on emulators of Azure Blob Storage and of Cloud Storage: keys, signatures, and
nobody in particular."""

from __future__ import annotations

import base64
import time
import uuid

import pytest
from support.drivers import asynchronous
from support.servers.azurite import ACCOUNT, Azurite
from support.servers.fake_gcs import FakeGcs

from holdfast.drivers.contract import Driver
from holdfast.drivers.registry import open_driver
from holdfast.errors import AccessError, ExistsError, HoldfastError, UriError

KEY = "AZURE_STORAGE_ACCOUNT_KEY"
NAME = "AZURE_STORAGE_ACCOUNT_NAME"
SAS = "AZURE_STORAGE_SAS_TOKEN"
PUBLIC = "public"


@pytest.fixture
def root(azurite: Azurite) -> str:
    """An empty root on Azurite."""
    return f"az://holdfast/{uuid.uuid4().hex}?endpoint={azurite.endpoint}"


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch, azurite: Azurite) -> pytest.MonkeyPatch:
    """The environment of the test, without the server's key."""
    monkeypatch.delenv(KEY)
    return monkeypatch


def bare(url: str, **options: str) -> Driver:
    """A driver without the layers that users get around it."""
    return open_driver(url, retries=0, op_timeout_s="off", **options)


async def may_read(driver: Driver, content: bytes) -> None:
    """See that ``x`` can be read and listed."""
    assert await driver.get("x") == content
    into = bytearray(3)
    await driver.read("x", 1, memoryview(into))
    assert into == content[1:4]
    assert [info.key async for info in driver.list()] == ["x"]


async def may_write_and_delete(driver: Driver) -> None:
    """See that an object can be put once, uploaded in parts, and deleted."""
    await driver.put("claim", b"ours", exclusive=True)
    with pytest.raises(ExistsError):
        await driver.put("claim", b"theirs", exclusive=True)
    upload = await driver.create("parts", 11 << 20)
    await upload.write(0, memoryview(bytes(11 << 20)))
    await upload.commit()
    assert (await driver.stat("parts")).nbytes == 11 << 20
    await driver.delete_all("parts")
    await driver.delete("claim")


@pytest.mark.nightly(6)
@asynchronous
async def test_the_account_is_named_by_an_option(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its key in the environment; without any name the error says where one can be given."""
    monkeypatch.delenv(NAME)
    driver = bare(root, account=ACCOUNT, part_size="5MiB")
    await may_write_and_delete(driver)
    await driver.close()
    unnamed = bare(root)
    with pytest.raises(UriError, match=NAME):
        await unnamed.get("x")
    await unnamed.close()


@asynchronous
async def test_a_wrong_key_is_an_access_error(root: str, nobody: pytest.MonkeyPatch) -> None:
    """A key of the right form that is another account's, and text that is no key; neither is shown."""
    for key in (base64.b64encode(b"not the key of this account").decode(), "no base64!"):
        nobody.setenv(KEY, key)
        driver = bare(root, deadline="2s")
        with pytest.raises(HoldfastError) as caught:
            await driver.put("x", b"content")
        assert isinstance(caught.value, AccessError | UriError)
        assert key not in str(caught.value)
        await driver.close()


@asynchronous
async def test_a_signature_allows_what_it_names(
    root: str, azurite: Azurite, nobody: pytest.MonkeyPatch
) -> None:
    """A SAS in the environment, for reading and listing: what it does not allow is an AccessError,
    and it is not shown."""
    now_s = time.time()
    container, _, folder = root.removeprefix("az://").partition("?")[0].partition("/")
    azurite.client.put(container, f"{folder}/x", b"content")
    signature = azurite.client.sas(container, "rl", starts_s=now_s - 600, expires_s=now_s + 600)
    nobody.setenv(SAS, signature)
    driver = bare(root)
    await may_read(driver, b"content")
    for refused in (driver.put("y", b"content"), driver.delete("x")):
        with pytest.raises(AccessError) as caught:
            await refused
        assert signature.rpartition("=")[2] not in f"{caught.value} {caught.value.__cause__}"
    assert await driver.get("x") == b"content"
    await driver.close()


@asynchronous
async def test_a_signature_for_all_is_enough_for_a_driver(
    root: str, azurite: Azurite, nobody: pytest.MonkeyPatch
) -> None:
    """Reading, adding, creating, writing, deleting and listing in one container."""
    now_s = time.time()
    nobody.setenv(
        SAS, azurite.client.sas("holdfast", "racwdl", starts_s=now_s - 600, expires_s=now_s + 600)
    )
    driver = bare(root, part_size="5MiB")
    await may_write_and_delete(driver)
    await driver.put("x", b"content")
    await may_read(driver, b"content")
    await driver.close()


@pytest.mark.clocked
@asynchronous
async def test_a_signature_that_has_expired_is_an_access_error(
    root: str, azurite: Azurite, nobody: pytest.MonkeyPatch
) -> None:
    """At once: it is not tried again until the deadline."""
    now_s = time.time()
    nobody.setenv(
        SAS, azurite.client.sas("holdfast", "racwdl", starts_s=now_s - 900, expires_s=now_s - 300)
    )
    driver, began_s = bare(root), time.monotonic()
    with pytest.raises(AccessError):
        await driver.get("x")
    assert time.monotonic() - began_s < 20
    await driver.close()


@asynchronous
async def test_anybody_may_read_what_is_public(
    azurite: Azurite, nobody: pytest.MonkeyPatch
) -> None:
    """``?anonymous=on`` sends no credentials: it reads and lists a public container, and may not
    write to it."""
    container = f"{PUBLIC}-{uuid.uuid4().hex}"
    azurite.client.create_container(container, public=True)
    azurite.client.put(container, "run/x", b"content")
    driver = bare(f"az://{container}/run?endpoint={azurite.endpoint}&anonymous=on")
    await may_read(driver, b"content")
    with pytest.raises(AccessError):
        await driver.put("y", b"content")
    await driver.close()


@asynchronous
async def test_without_credentials_a_private_container_is_closed(
    root: str, azurite: Azurite
) -> None:
    """Reading, listing and writing are refused alike, although a key is in the environment."""
    driver = bare(root, anonymous="on")
    for refused in (driver.get("x"), driver.put("x", b"content"), listed(driver)):
        with pytest.raises(HoldfastError) as caught:
            await refused
        assert not isinstance(caught.value, ExistsError)
    await driver.close()
    owner = bare(root)
    assert await listed(owner) == []
    await owner.close()


async def listed(driver: Driver) -> list[str]:
    """All keys."""
    return [info.key async for info in driver.list()]


@asynchronous
async def test_google_is_asked_without_a_token(
    fake_gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``?anonymous=on`` writes, too, where anybody may: no metadata server is asked for a token
    first."""
    monkeypatch.delenv("GOOGLE_SERVICE_ACCOUNT_KEY")
    driver = bare(
        f"gs://holdfast/{uuid.uuid4().hex}?endpoint={fake_gcs.endpoint}&anonymous=on",
        part_size="5MiB",
    )
    await may_write_and_delete(driver)
    await driver.put("x", b"content")
    await may_read(driver, b"content")
    await driver.close()
