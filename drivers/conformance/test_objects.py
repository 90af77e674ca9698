"""Trials of small objects: put, get, stat, delete, exclusive put, traits."""

from __future__ import annotations

import asyncio
import dataclasses
import time
import tracemalloc

import pytest

from holdfast.drivers import contract
from holdfast.drivers.conformance.place import Place
from holdfast.drivers.conformance.trials import PROBE, aligned, bytes_of, refused, store, trial
from holdfast.drivers.contract import Driver
from holdfast.drivers.uri import redact
from holdfast.errors import DamagedError, ExistsError, NotFoundError


@trial()
async def test_traits_make_sense(place: Place) -> None:
    """Sizes and counts are positive, parts of the preferred size are aligned, and traits are
    immutable. Opening and closing a driver leaves no trace, and its URI is safe to print."""
    driver = place.open()
    traits = driver.traits
    assert redact(driver.uri) == driver.uri
    await driver.close()
    await place.holds()
    assert (
        min(traits.part_nbytes, traits.part_min_nbytes, traits.align_nbytes, traits.concurrency)
        >= 1
    )
    assert traits.part_nbytes % traits.align_nbytes == 0
    assert traits.part_min_nbytes <= traits.part_nbytes
    assert traits.coalesce_nbytes >= 0
    assert traits.object_max_nbytes is None or traits.object_max_nbytes >= 1
    assert traits.part_order in ("any", "ascending", "serial")
    if traits.copies is not None:
        assert min(traits.copies.min_nbytes, traits.copies.align_nbytes) >= 1
    assert place.open().traits == traits
    with pytest.raises(dataclasses.FrozenInstanceError):
        traits.concurrency = 1  # type: ignore[misc]  # that is the point


@trial()
async def test_an_object_comes_back(place: Place, driver: Driver) -> None:
    """An object that was put can be read, found by stat and list, and is gone after a delete.
    Deleting what is not there is no error."""
    await driver.put("a/b", b"content")
    assert await driver.get("a/b") == b"content"
    info = await driver.stat("a/b")
    assert (info.key, info.nbytes) == ("a/b", 7)
    assert abs(info.modified_s - time.time()) < 3600  # servers' clocks differ
    assert [(info.key, info.nbytes)] == [(found.key, found.nbytes) async for found in driver.list()]
    await place.holds("a/b")
    await driver.delete("a/b")
    await refused(NotFoundError, driver.get("a/b"))
    for delete in (driver.delete, driver.delete_all, driver.sweep):
        await delete("a/b")
    await place.holds()


@trial(PROBE)
async def test_stored_bytes_are_what_was_written(place: Place, driver: Driver) -> None:
    """Once put or commit has returned, the probe finds exactly the written bytes. An object stored
    by other means can be read, whole and in ranges, with its size."""
    assert place.probe is not None
    small = bytes_of(1000)
    large = bytes_of(2 * place.part_nbytes + 1001)
    await driver.put("a/put", small)
    assert place.probe.read("a/put") == small
    await store(driver, "a/upload", large)
    assert place.probe.read("a/upload") == large
    await place.holds("a/put", "a/upload")
    content = bytes_of(100_003)
    place.probe.write("a/x", content)
    into = aligned(50_000, 1)
    assert await driver.get("a/x") == content
    assert (await driver.stat("a/x")).nbytes == 100_003
    await driver.read("a/x", 1, into)
    assert into == content[1:50_001]
    place.probe.write("a/x", content[::-1])
    assert await driver.get("a/x") == content[::-1]


@trial()
async def test_what_is_not_small_is_not_got(
    place: Place, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """get raises DamagedError for an object above the limit, without reading it first. The limit is
    lowered here for callers of ``check_small``. read and stat have no limit."""
    nbytes = 8 << 20
    content = bytes_of(nbytes)
    into = aligned(1)
    await store(driver, "a/x", content)
    monkeypatch.setattr(contract, "SMALL_NBYTES_MAX", nbytes - 1)
    tracemalloc.start()
    try:
        await refused(DamagedError, driver.get("a/x"), where=(driver.uri, "a/x"))
        peak_nbytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_nbytes < nbytes // 2, "it was read first"
    assert (await driver.stat("a/x")).nbytes == nbytes
    await driver.read("a/x", nbytes - 1, into)
    assert into == content[-1:]
    monkeypatch.setattr(contract, "SMALL_NBYTES_MAX", nbytes)
    assert await driver.get("a/x") == content


@trial()
async def test_a_replaced_or_deleted_object_is_not_read_again(place: Place, driver: Driver) -> None:
    """A read after another driver replaced the object, by put or upload, returns the new one, and
    nothing of a longer one, whose size it may not expect; after a delete it finds nothing."""
    other = place.open()
    into = memoryview(bytearray(3))
    for content in (b"old" * 30_000, b"new", b"upl", b"put"):
        await (store(driver, "x", content) if content == b"upl" else driver.put("x", content))
        await other.read("x", 0, into)
        assert into == content[:3]
        await refused(DamagedError, other.read("x", 0, aligned(90_001)))
        assert await other.get("x") == content
    await driver.delete("x")
    await refused(NotFoundError, other.read("x", 0, into), other.stat("x"))


@trial()
async def test_a_watch_returns_what_is_new(place: Place, driver: Driver) -> None:
    """A watch returns an object that appears, and content that another driver put, but not known
    content that was put again. It ends without news at its timeout, also after a delete, and soon
    when it is cancelled."""
    other = place.open()
    assert await driver.watch("a/x", None, 0) is None
    appearing = asyncio.create_task(driver.watch("a/x", None, 60))
    await asyncio.sleep(0.2)
    await other.put("a/x", b"first")
    assert await appearing == b"first"
    changing = asyncio.create_task(driver.watch("a/x", b"first", 60))
    await asyncio.sleep(0.2)
    await other.put("a/x", b"first")
    await other.put("a/x", b"second")
    assert await changing == b"second"
    assert await driver.watch("a/x", b"first", 0) == b"second"
    assert await driver.watch("a/x", b"second", 0.3) is None
    await other.delete("a/x")
    cancelled = asyncio.create_task(driver.watch("a/x", b"second", 60))
    await asyncio.sleep(0.2)
    began_s = time.monotonic()
    cancelled.cancel()
    await asyncio.wait([cancelled])
    assert cancelled.cancelled()
    assert time.monotonic() - began_s < 5


@trial()
async def test_an_exclusive_put_to_a_taken_key_changes_nothing(
    place: Place, driver: Driver
) -> None:
    """An exclusive put raises ExistsError with the key and leaves the object unchanged. After a
    delete the key is free."""
    await store(driver, "a/x", b"first")
    second = place.open().put("a/x", b"second", exclusive=True)
    await refused(ExistsError, second, where=(driver.uri, "a/x"))
    assert await driver.get("a/x") == b"first"
    await driver.put("a/x", b"third")
    assert await driver.get("a/x") == b"third"
    await place.holds("a/x")
    await driver.delete("a/x")
    await driver.put("a/x", b"fourth", exclusive=True)
    assert await driver.get("a/x") == b"fourth"
    await place.holds("a/x")
