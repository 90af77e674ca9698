"""The object store driver on a real S3 server, beyond the conformance trials of all drivers."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import time
from typing import Any

import pytest
from support.drivers import asynchronous, bare, keys, reads
from support.servers.proxy import FaultProxy, Faults
from support.servers.radosgw import Radosgw

from holdfast.drivers.checks.course import check
from holdfast.drivers.contract import Driver
from holdfast.drivers.uri import parse
from holdfast.errors import AccessError, ExistsError, StorageDownError, StorageError

pytestmark = pytest.mark.clocked

MIB = 1 << 20


def unfinished(server: Radosgw) -> list[str]:
    """Return the keys of all unfinished uploads in the bucket, as another client sees them."""
    listed = server.client().list_multipart_uploads(Bucket="holdfast")
    return [found["Key"] for found in listed.get("Uploads", ())]


def through(proxy: FaultProxy, url: str, **options: str) -> Driver:
    """Return a driver for ``url`` through the proxy."""
    return bare(url, endpoint=proxy.endpoint, **options)


def test_radosgw_is_fit(s3_url: str) -> None:
    """radosgw passes the check, which finds and drops an unfinished upload, and leaves nothing."""
    report = asyncio.run(check(parse(s3_url)))
    assert {finding.outcome for finding in report.findings} == {"kept"}
    unfinished = next(found for found in report.findings if found.name == "unfinished")
    assert unfinished.detail.endswith("found and dropped")
    assert report.left is None
    assert asyncio.run(keys(bare(s3_url))) == []


@asynchronous
async def test_memory_is_read_until_its_part_is_stored_and_no_longer(
    radosgw: Radosgw, s3_url: str, seed: int
) -> None:
    """A write returns once its part is stored; later changes of its memory do not matter."""
    with FaultProxy(("127.0.0.1", radosgw.port)) as proxy:
        driver = through(proxy, s3_url, part_size="5MiB")
        proxy.faults = Faults(up_nbytes_per_s=10 * MIB)
        content = random.Random(seed).randbytes(20 * MIB)
        memory = bytearray(content)
        upload = await driver.create("x", len(memory))
        began_s = time.monotonic()

        async def write(start: int) -> float:
            await upload.write(start, memoryview(memory)[start : start + 5 * MIB])
            took_s = time.monotonic() - began_s
            memory[start : start + 5 * MIB] = bytes(5 * MIB)
            return took_s

        took_s = await asyncio.gather(*map(write, range(0, 20 * MIB, 5 * MIB)))
        assert min(took_s) > 0.45  # the connection needs half a second for a part
        await upload.commit()
        assert await driver.get("x") == content
        await driver.close()


@asynchronous
async def test_sweeping_spares_what_is_younger_than_an_hour(radosgw: Radosgw, s3_url: str) -> None:
    """Another process may still write it. Deleting its whole folder removes it in any case."""
    driver, other = bare(s3_url, part_size="5MiB"), bare(s3_url, part_size="5MiB")
    before = unfinished(radosgw)
    upload = await other.create("data/x", 10 * MIB)
    await driver.sweep("data")
    assert len(unfinished(radosgw)) == len(before) + 1
    await driver.delete_all("dat")
    assert len(unfinished(radosgw)) == len(before) + 1
    await driver.delete_all("data")
    assert unfinished(radosgw) == before
    with pytest.raises(StorageError):
        await asyncio.gather(upload.write(0, memoryview(bytes(10 * MIB))), upload.commit())
    await driver.close()
    await other.close()


@asynchronous
async def test_a_store_without_conditional_puts_is_declared(s3_url: str) -> None:
    """With conditional=off a taken key is still refused, but the traits promise no more."""
    driver = bare(s3_url, conditional="off")
    assert not driver.traits.exclusive_is_atomic
    await driver.put("x", b"1", exclusive=True)
    with pytest.raises(ExistsError):
        await driver.put("x", b"2", exclusive=True)
    assert await driver.get("x") == b"1"
    await driver.close()


@asynchronous
async def test_a_missing_bucket_is_not_a_missing_object(radosgw: Radosgw) -> None:
    """Every operation reports that, even if the answer has no body."""
    driver = bare(f"s3://no-such-bucket/x?endpoint={radosgw.endpoint}")
    changing = (driver.put("x", b""), driver.create("x", 20 * MIB), driver.delete_all("x"))
    for call in (*reads(driver, "x"), *changing, keys(driver)):
        with pytest.raises(StorageError, match="does not exist") as caught:
            await call
        assert type(caught.value) is StorageError
    await driver.close()


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("AWS_SECRET_ACCESS_KEY", "wr0ng", "secret key"),
        ("AWS_ACCESS_KEY_ID", "wr0ng", "access key"),
        ("AWS_ACCESS_KEY_ID", None, "AWS_ACCESS_KEY_ID"),
    ],
)
def test_wrong_credentials_are_explained(
    s3_url: str, monkeypatch: pytest.MonkeyPatch, name: str, value: str | None, why: str
) -> None:
    """The error says which half is wrong or missing, and shows neither."""
    if value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    driver = bare(s3_url)
    with pytest.raises(AccessError, match=why) as caught:
        asyncio.run(driver.get("x"))
    shown = f"{caught.value} {caught.value.__cause__}"
    assert "wr0ng" not in shown
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in shown
    asyncio.run(driver.close())


@pytest.mark.nightly(5)
@pytest.mark.parametrize("faults", [Faults(mute=True), Faults(refuse=True)])
@asynchronous
async def test_a_store_that_does_not_answer_is_given_up(
    radosgw: Radosgw, s3_url: str, faults: Faults
) -> None:
    """Every operation ends by its deadline with a temporary error."""
    with FaultProxy(("127.0.0.1", radosgw.port)) as proxy:
        driver = through(proxy, s3_url, timeout="1s", deadline="1s")
        proxy.faults = faults
        calls = [*reads(driver, "x"), driver.put("x", b""), driver.delete("x")]
        calls += [driver.create("x", 20 * MIB), keys(driver), driver.sweep("x")]
        began_s = time.monotonic()
        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(result, StorageDownError), result
            assert result.temporary
        assert time.monotonic() - began_s < 9
        proxy.faults = Faults()
        await driver.put("y", b"again")  # the empty object may still arrive at x
        assert await driver.get("y") == b"again"
        await driver.close()


def _use(url: str, results: Any) -> None:
    try:
        asyncio.run(bare(url).get("x"))
    except StorageError as error:
        results.put(str(error))


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_forked_child_is_told_instead_of_hanging(s3_url: str) -> None:
    """It has none of the client's threads. The error says so at once, and what to do."""
    driver = bare(s3_url)
    asyncio.run(driver.put("x", b""))
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_use, args=(s3_url, results))
    child.start()
    assert "spawn" in results.get(timeout=20)
    child.join(20)
    assert child.exitcode == 0
    asyncio.run(driver.close())
