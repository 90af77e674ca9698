"""Trials of leftovers: handles, threads, tasks and unfinished objects, after close() and after a
process died."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from holdfast.drivers.conformance.children import child_of, sees_children
from holdfast.drivers.conformance.place import Place, held_now
from holdfast.drivers.conformance.trials import aligned, begun, bytes_of, refused, store, trial
from holdfast.drivers.contract import Driver
from holdfast.errors import NotFoundError, StorageError


async def use(place: Place) -> None:
    """Use a driver in every way that may leave something behind, including failures, and close
    it."""
    driver = place.open()
    nbytes = place.part_nbytes + 1000
    await store(driver, "a/x", bytes_of(nbytes))
    await driver.read("a/x", 0, aligned(nbytes))
    for call in (driver.get("missing"), driver.read("a/x", nbytes, aligned(100))):
        with contextlib.suppress(Exception):
            await call
    forgotten = await begun(driver, "a/y", aligned(place.part_nbytes), nbytes)
    aborted = await begun(driver, "a/z", aligned(place.part_nbytes), nbytes)
    await aborted.abort()
    listing = driver.list()
    await anext(listing)
    write = asyncio.create_task(forgotten.write(place.part_nbytes, aligned(1000)))
    await asyncio.sleep(0)
    write.cancel()
    await asyncio.wait([write])
    await listing.aclose()  # type: ignore[attr-defined]  # an async generator in every driver
    await driver.close()


@trial()
async def test_nothing_outlives_close(place: Place) -> None:
    """Descriptors, threads and tasks do not accumulate when drivers are repeatedly opened, used and
    closed."""
    await use(place)
    held = held_now()
    for _ in range(3):
        await use(place)
    assert held.outlived_by() == []
    assert asyncio.all_tasks() == {asyncio.current_task()}


@trial()
async def test_close_drops_unfinished_uploads(place: Place, driver: Driver) -> None:
    """Uploads that were neither committed nor aborted use no space after close(), and using them is
    an error. No call fails if a task is still cleaning up meanwhile."""
    nbytes = place.part_nbytes + 1000
    upload = await begun(driver, "x", aligned(place.part_nbytes), nbytes)
    other = await driver.create("y", nbytes)
    await asyncio.gather(other.abort(), other.abort(), driver.close())
    await place.holds()
    await refused(StorageError, upload.write(place.part_nbytes, aligned(1000)))
    await upload.abort()


@trial()
async def test_a_process_that_dies_leaves_nothing_visible(place: Place, driver: Driver) -> None:
    """A process killed during an upload leaves no object, a usable key, and nothing after
    delete_all."""
    await child_of(place, "die-writing", "a/x", dies=True)
    assert await place.keys() == []
    await refused(NotFoundError, driver.get("a/x"))
    await driver.sweep("a")
    assert await place.keys() == []
    await store(driver, "a/x", b"written by the next client")
    assert await driver.get("a/x") == b"written by the next client"
    await driver.delete_all("a")
    await place.holds()


@trial()
async def test_a_process_that_dies_leaves_what_it_stored(place: Place, driver: Driver) -> None:
    """After a kill right after commit and put returned, both objects are there, whole."""
    if not await sees_children(place):
        pytest.skip("not applicable: other processes do not see this storage")
    await child_of(place, "die-committed", "a/x", dies=True)
    assert await driver.get("a/x") == b"c" * 100_000
    assert await driver.get("a/x-put") == b"p" * 1000
    await place.holds("a/x", "a/x-put")
