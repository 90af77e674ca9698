"""Trials of cancellation: every call is cancelled at each await, immediately and a moment later.
Nothing may be torn or left behind, and everything stays usable."""

from __future__ import annotations

import asyncio

from holdfast.drivers.conformance.interrupt import Interrupt, at_every_await
from holdfast.drivers.conformance.place import Place
from holdfast.drivers.conformance.trials import aligned, bytes_of, trial
from holdfast.drivers.contract import Driver
from holdfast.errors import ExistsError, NotFoundError

CONTENT = bytes_of(100_000)


async def found(driver: Driver, key: str) -> bytes | None:
    """Return the object's content, or None if it does not exist."""
    try:
        return await driver.get(key)
    except NotFoundError:
        return None


async def leaves_nothing(place: Place) -> None:
    """Assert that after delete_all nothing uses space any more."""
    driver = place.open()
    await driver.delete_all("d")
    await place.holds()


@trial()
async def test_a_cancelled_put_is_whole_or_absent(place: Place) -> None:
    """The old or the new object is there, whole, and the driver stays usable."""
    driver = place.open()

    async def attempt(interrupt: Interrupt, key: str) -> None:
        await driver.put(key, b"old")
        cancelled = await interrupt(driver.put(key, CONTENT))
        assert await driver.get(key) in ((b"old", CONTENT) if cancelled else (CONTENT,))
        await driver.put(key, b"next")
        assert await driver.get(key) == b"next"

    await at_every_await(attempt)
    await leaves_nothing(place)


@trial()
async def test_a_cancelled_exclusive_put_took_the_key_or_not(place: Place) -> None:
    """Either the whole object exists and a second put is rejected, or the key is free."""
    driver = place.open()

    async def attempt(interrupt: Interrupt, key: str) -> None:
        cancelled = await interrupt(driver.put(key, CONTENT, exclusive=True))
        there = await found(driver, key)
        assert there in ((None, CONTENT) if cancelled else (CONTENT,))
        try:
            await driver.put(key, b"second", exclusive=True)
        except ExistsError:
            assert there == CONTENT
        else:
            assert there is None

    await at_every_await(attempt)
    await leaves_nothing(place)


@trial()
async def test_a_cancelled_read_leaves_the_buffer_alone(place: Place) -> None:
    """Once the call has returned, the driver no longer writes to the caller's memory."""
    driver = place.open()
    await driver.put("d/x", CONTENT)

    async def attempt(interrupt: Interrupt, key: str) -> None:
        into = aligned(90_000)
        cancelled = await interrupt(driver.read("d/x", 1, into))
        if not cancelled:
            assert into == CONTENT[1:90_001]
        into[:] = b"\xaa" * len(into)
        await asyncio.sleep(0.02)
        assert into == b"\xaa" * len(into)
        assert await driver.get("d/x") == CONTENT

    await at_every_await(attempt)
    await leaves_nothing(place)


@trial()
async def test_cancelled_looks_change_nothing(place: Place) -> None:
    """get, stat and list can be cancelled anywhere and repeated."""
    driver = place.open()
    await driver.put("d/x", CONTENT)

    async def listed() -> list[str]:
        return [info.key async for info in driver.list("d")]

    for look in (lambda: driver.get("d/x"), lambda: driver.stat("d/x"), listed):

        async def attempt(interrupt: Interrupt, key: str, look=look) -> None:  # type: ignore[no-untyped-def]
            await interrupt(look())
            assert await listed() == ["d/x"]
            assert (await driver.stat("d/x")).nbytes == len(CONTENT)
            assert await driver.get("d/x") == CONTENT

        await at_every_await(attempt)
    await leaves_nothing(place)


@trial()
async def test_a_cancelled_create_shows_nothing(place: Place) -> None:
    """Nothing is visible, the key can be used, and delete_all removes any leftovers."""
    driver = place.open()

    async def attempt(interrupt: Interrupt, key: str) -> None:
        await interrupt(driver.create(key, len(CONTENT)))
        assert await found(driver, key) is None
        upload = await driver.create(key, len(CONTENT))
        await upload.write(0, memoryview(CONTENT))
        await upload.commit()
        assert await driver.get(key) == CONTENT
        await driver.delete(key)

    await at_every_await(attempt)
    await leaves_nothing(place)


@trial()
async def test_a_cancelled_write_can_only_be_aborted(place: Place) -> None:
    """The caller may reuse its memory at once, abort leaves nothing behind, and other uploads to
    the key still work."""
    driver = place.open()
    part_nbytes = place.part_nbytes

    async def attempt(interrupt: Interrupt, key: str) -> None:
        upload = await driver.create(key, 2 * part_nbytes)
        content = aligned(part_nbytes)
        await upload.write(0, content)
        await interrupt(upload.write(part_nbytes, content))
        content[:] = b"\xaa" * part_nbytes
        await upload.abort()
        assert await found(driver, key) is None
        if place.probe is not None:
            assert place.probe.list() == []

    await at_every_await(attempt)
    await leaves_nothing(place)


@trial()
async def test_a_cancelled_commit_is_whole_or_absent(place: Place) -> None:
    """The old or the new object is there, whole; abort is safe afterwards and leaves nothing
    unfinished."""
    driver = place.open()

    async def attempt(interrupt: Interrupt, key: str) -> None:
        await driver.put(key, b"old")
        upload = await driver.create(key, len(CONTENT))
        await upload.write(0, memoryview(CONTENT))
        cancelled = await interrupt(upload.commit())
        await upload.abort()
        assert await driver.get(key) in ((b"old", CONTENT) if cancelled else (CONTENT,))
        await place.holds(key)
        await driver.delete(key)

    await at_every_await(attempt)
    await leaves_nothing(place)


@trial()
async def test_a_cancelled_abort_can_be_made_again(place: Place) -> None:
    """The second abort leaves nothing behind."""
    driver = place.open()

    async def attempt(interrupt: Interrupt, key: str) -> None:
        upload = await driver.create(key, len(CONTENT))
        await upload.write(0, memoryview(CONTENT))
        await interrupt(upload.abort())
        await upload.abort()
        await place.holds()

    await at_every_await(attempt)
    await leaves_nothing(place)


@trial()
async def test_cancelled_deletions_can_be_made_again(place: Place) -> None:
    """delete, delete_all and sweep, cancelled anywhere, spare unrelated objects and complete when
    repeated."""
    driver = place.open()
    await driver.put("kept", b"kept")

    async def attempt(interrupt: Interrupt, key: str) -> None:
        for n in range(3):
            await driver.put(f"{key}/{n}", b"x")
        for delete in (driver.sweep, driver.delete_all):
            await interrupt(delete(key))
            await delete(key)
            assert await place.keys() == (
                ["kept"]
                if delete == driver.delete_all
                else [f"{key}/{n}" for n in range(3)] + ["kept"]
            )
        await driver.put(f"{key}/x", b"x")
        await interrupt(driver.delete(f"{key}/x"))
        await driver.delete(f"{key}/x")
        await place.holds("kept")

    await at_every_await(attempt)


@trial()
async def test_a_cancelled_close_can_be_made_again(place: Place) -> None:
    """The second close releases everything, as checked at the end of every trial."""

    async def attempt(interrupt: Interrupt, key: str) -> None:
        driver = place.open()
        await driver.put(key, CONTENT)
        upload = await driver.create(key, 10)
        await upload.write(0, memoryview(bytes(10)))
        await interrupt(driver.close())
        await driver.close()
        assert await place.looker.get(key) == CONTENT
        await place.looker.delete(key)

    await at_every_await(attempt)
    await leaves_nothing(place)
