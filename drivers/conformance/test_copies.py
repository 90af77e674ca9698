"""Trials of copies within the storage, for drivers whose traits say that they can."""

from __future__ import annotations

import random
from functools import partial

from holdfast.core.aio import side_by_side
from holdfast.core.units import round_up
from holdfast.drivers.conformance.place import Place
from holdfast.drivers.conformance.test_cancellation import Interrupt, at_every_await, found
from holdfast.drivers.conformance.trials import COPIES, aligned, bytes_of, refused, store, trial
from holdfast.drivers.contract import Driver, Upload
from holdfast.drivers.memory import MemoryDriver
from holdfast.errors import DamagedError, NotFoundError, StorageError

SOURCE = "from/here"


def unit_of(place: Place) -> int:
    """Return the smallest size, in bytes, of copies and of writes between them here."""
    copies = place.traits.copies
    assert copies is not None
    return round_up(max(copies.min_nbytes, place.part_nbytes), copies.align_nbytes)


async def holds(driver: Driver, key: str, content: bytes) -> None:
    """Assert that the object has this content."""
    assert (await driver.stat(key)).nbytes == len(content)
    into = aligned(len(content))
    await driver.read(key, 0, into)
    assert into == content


async def copied(place: Place, driver: Driver, key: str, nbytes: int) -> tuple[Upload, bytes]:
    """Return an upload of ``nbytes`` that begins with a copy of one unit, and the source, which is
    stored first."""
    unit = unit_of(place)
    content = bytes_of(2 * unit)
    await store(driver, SOURCE, content)
    upload = await driver.compose(key, nbytes)
    await upload.copy(0, driver, SOURCE, unit, unit)
    return upload, content


@trial(COPIES)
async def test_copies_and_writes_make_the_object(place: Place, driver: Driver) -> None:
    """Ranges of one object, from anywhere in it, and written bytes form another object, in any
    order and at once if the traits allow it. The source stays as it is, and nothing is left."""
    unit = unit_of(place)
    content, written = bytes_of(3 * unit), bytes_of(6 * unit + 1000, seed=1)
    await store(driver, SOURCE, content)
    copies = [(unit, 2 * unit, unit), (2 * unit, 0, 2 * unit), (5 * unit, unit, unit)]
    upload = await driver.compose("to", len(written))
    calls = [(at, upload.copy(at, driver, SOURCE, start, n)) for at, start, n in copies]
    for start, stop in ((0, unit), (4 * unit, 5 * unit), (6 * unit, len(written))):
        calls.append((start, upload.write(start, memoryview(written)[start:stop])))
    calls.sort(key=lambda call: call[0])
    if place.traits.part_order == "any":
        random.Random(0).shuffle(calls)
    if place.traits.part_order == "serial":
        for _, call in calls:
            await call
    else:
        await side_by_side(*(call for _, call in calls))
    await upload.commit()
    expected = bytearray(written)
    for at, start, nbytes in copies:
        expected[at : at + nbytes] = content[start : start + nbytes]
    for other in (driver, place.looker):
        await holds(other, "to", bytes(expected))
        await holds(other, SOURCE, content)
    await place.holds(SOURCE, "to")


@trial(COPIES)
async def test_a_whole_object_is_copied_from_another_root(place: Place, driver: Driver) -> None:
    """The source may belong to another driver, on another root of the same storage. A driver of
    other storage is not accepted."""
    unit = unit_of(place)
    other = place.below().open()
    assert driver.copies_from(other)
    assert driver.copies_from(driver)
    assert not driver.copies_from(MemoryDriver())
    content = bytes_of(2 * unit)
    await store(other, SOURCE, content)
    upload = await driver.compose("to", 2 * unit)
    await upload.copy(0, other, SOURCE, 0, 2 * unit)
    await upload.commit()
    await holds(driver, "to", content)
    await other.close()
    await holds(driver, "to", content)


@trial(COPIES)
async def test_bytes_that_cannot_be_copied_can_be_written(place: Place, driver: Driver) -> None:
    """A missing source, and one that is too short, are named by the error. The same bytes are then
    written, even after later ones."""
    unit = unit_of(place)
    content = bytes_of(2 * unit)
    await driver.put("short", bytes(100))
    await store(driver, SOURCE, content)
    for key, start, kind in (
        ("missing", 0, NotFoundError), ("short", 0, DamagedError), (SOURCE, 2 * unit, DamagedError)
    ):  # fmt: skip
        upload = await driver.compose("to", 3 * unit)
        copy = upload.copy(0, driver, key, start, unit)
        await refused(kind, copy, where=(driver.uri, key))
        if place.traits.part_order != "serial":
            await upload.copy(unit, driver, SOURCE, unit, unit)
        await upload.write(0, memoryview(content)[:unit])
        if place.traits.part_order == "serial":
            await upload.copy(unit, driver, SOURCE, unit, unit)
        await upload.write(2 * unit, memoryview(content)[:unit])
        await upload.commit()
        await holds(driver, "to", content + content[:unit])
    await place.holds(SOURCE, "short", "to")


@trial(COPIES)
async def test_a_copy_counts_as_a_write(place: Place, driver: Driver) -> None:
    """An upload that copies bytes twice, outside of the object or not at all does not commit, and
    leaves the old object."""
    unit = unit_of(place)
    await driver.put("to", b"old")
    await store(driver, SOURCE, bytes_of(2 * unit))

    async def composed(*starts: int) -> None:
        upload = await driver.compose("to", 2 * unit)
        try:
            for start in starts:
                await upload.copy(start, driver, SOURCE, 0, unit)
            await upload.commit()
        finally:
            await upload.abort()

    for starts in ((0,), (unit,), (0, 0, unit), (0, unit, unit), (0, 2 * unit), (-unit, 0)):
        await refused(StorageError, composed(*starts), where=(driver.uri, "to"))
        assert await driver.get("to") == b"old"
        await place.holds(SOURCE, "to")
    await composed(0, unit)
    await place.holds(SOURCE, "to")


@trial(COPIES)
async def test_copied_bytes_stay_without_their_source(place: Place, driver: Driver) -> None:
    """The source may be replaced and deleted as soon as the copy has returned, before and after the
    commit. The upload may end early."""
    unit = unit_of(place)
    upload, content = await copied(place, driver, "to", 3 * unit)
    await driver.put(SOURCE, b"another")
    await driver.delete_all("from")
    await upload.write(unit, memoryview(content)[:1000])
    await upload.commit(unit + 1000)
    await holds(driver, "to", content[unit:] + content[:1000])
    upload = await driver.compose("again", unit)
    await upload.copy(0, driver, "to", 0, unit)
    await upload.commit()
    await driver.delete("to")
    await holds(place.looker, "again", content[unit:])
    await place.holds("again")


@trial(COPIES)
async def test_an_aborted_composition_leaves_nothing(place: Place, driver: Driver) -> None:
    """Copies are invisible until the commit, and use no space after an abort or close(). An upload
    that is over copies nothing."""
    unit = unit_of(place)
    for end in ("abort", "close"):
        upload, content = await copied(place, driver, "to", 2 * unit)
        await refused(NotFoundError, place.looker.stat("to"))
        await upload.write(unit, memoryview(content)[unit:])
        if end == "close":
            await driver.close()
        await upload.abort()
        await place.holds(SOURCE)
        await refused(StorageError, upload.copy(0, driver, SOURCE, 0, unit), upload.commit())


@partial(at_every_await, needs=[COPIES])
async def test_a_cancelled_copy_can_only_be_aborted(
    place: Place, driver: Driver, interrupt: Interrupt, key: str
) -> None:
    """After abort nothing is left, and other uploads to the key still work."""
    unit = unit_of(place)
    if await found(driver, "d/source") is None:
        await store(driver, "d/source", bytes_of(unit))
    upload = await driver.compose(key, unit)
    await interrupt(upload.copy(0, driver, "d/source", 0, unit))
    await upload.abort()
    await place.holds("d/source")
