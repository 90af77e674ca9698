"""Trials of further keys for one object, for drivers whose traits say that they can."""

from __future__ import annotations

from functools import partial

from holdfast.drivers.conformance.place import Place
from holdfast.drivers.conformance.test_cancellation import Interrupt, at_every_await, found
from holdfast.drivers.conformance.test_copies import SOURCE, holds
from holdfast.drivers.conformance.trials import LINKS, bytes_of, refused, store, trial
from holdfast.drivers.contract import Driver
from holdfast.drivers.memory import MemoryDriver
from holdfast.errors import ExistsError, HoldfastError, NotFoundError, StorageError

CONTENT = bytes_of(100_000)


@trial(LINKS)
async def test_an_object_stays_until_its_last_key_is_deleted(place: Place, driver: Driver) -> None:
    """Each key shows the object, whatever happens to the others, also to a driver that has read it
    by a key that is gone. A driver on another root may lend it; one of other storage may not."""
    other = place.below().open()
    assert driver.links_from(other)
    assert driver.links_from(driver)
    assert not driver.links_from(MemoryDriver())
    await refused(StorageError, driver.link("to", MemoryDriver(), "from"), where=(driver.uri, "to"))
    await store(other, SOURCE, CONTENT)
    await driver.link("to/1", other, SOURCE)
    await driver.link("to/1", other, SOURCE)
    await driver.link("to/2", driver, "to/1")
    for key in ("to/1", "to/2"):
        for looker in (driver, place.looker):
            await holds(looker, key, CONTENT)
    await holds(other, SOURCE, CONTENT)
    await other.delete(SOURCE)
    await refused(NotFoundError, other.stat(SOURCE), where=(other.uri, SOURCE))
    await store(driver, "to/2", CONTENT[:10])
    await holds(driver, "to/1", CONTENT)
    await holds(driver, "to/2", CONTENT[:10])
    await place.looker.delete("to/1")
    into = bytearray(10)
    await refused(NotFoundError, driver.read("to/1", 0, memoryview(into)))
    await other.close()
    await place.holds("to/2")


@trial(LINKS)
async def test_a_link_that_cannot_be_made_changes_nothing(place: Place, driver: Driver) -> None:
    """The error names the missing object, or the key that is taken."""
    await store(driver, SOURCE, CONTENT)
    await store(driver, "taken", CONTENT)
    missing = driver.link("to", driver, "missing")
    await refused(NotFoundError, missing, where=(driver.uri, "missing"))
    taken = driver.link("taken", driver, SOURCE)
    await refused(ExistsError, taken, where=(driver.uri, "taken"))
    for key in ("../to", "/to", "a/../to"):
        await refused(HoldfastError, driver.link(key, driver, SOURCE))
    await holds(driver, "taken", CONTENT)
    await place.holds(SOURCE, "taken")


@partial(at_every_await, needs=[LINKS])
async def test_a_cancelled_link_is_made_or_not(
    place: Place, driver: Driver, interrupt: Interrupt, key: str
) -> None:
    """It can be made again, and the object stays as it is."""
    if await found(driver, "d/source") is None:
        await store(driver, "d/source", CONTENT)
    await interrupt(driver.link(key, driver, "d/source"))
    await driver.link(key, driver, "d/source")
    await holds(driver, key, CONTENT)
    await driver.delete(key)
    await holds(driver, "d/source", CONTENT)
    await place.holds("d/source")
