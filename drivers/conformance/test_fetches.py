"""Trials of fetch: same bytes and errors as read, in memory that stays unchanged while it is
referenced."""

from __future__ import annotations

import asyncio
import gc

import pytest

from holdfast.drivers.conformance.place import Place
from holdfast.drivers.conformance.trials import aligned, bytes_of, refused, trial
from holdfast.errors import DamagedError, HoldfastError, NotFoundError, StorageError

NBYTES = (1 << 20) + 77
RANGES = [
    (0, NBYTES),
    (1, NBYTES - 1),
    (4097, 131_072),
    (5, 3),
    (NBYTES - 1, 1),
    (0, 0),
    (NBYTES, 0),
]


@trial()
async def test_any_range_can_be_fetched(place: Place) -> None:
    """Fetches of odd ranges, also concurrent ones, return exactly the requested bytes,
    one-dimensional and contiguous."""
    driver = place.open()
    content = bytes_of(NBYTES)
    await driver.put("x", content)
    found = await asyncio.gather(*(driver.fetch("x", start, nbytes) for start, nbytes in RANGES))
    assert [bytes(data) for data in found] == [
        content[start : start + nbytes] for start, nbytes in RANGES
    ]
    assert {(type(data), data.format, data.ndim, data.contiguous) for data in found} == {
        (memoryview, "B", 1, True)
    }


@trial()
async def test_fetched_memory_stays_as_it_is(place: Place) -> None:
    """Fetched memory keeps its content after other reads and fetches, after the object was replaced
    and deleted, and after close()."""
    driver = place.open()
    content = bytes_of(NBYTES)
    other = bytes_of(NBYTES, seed=1)
    await driver.put("x", content)
    held = [await driver.fetch("x", start, NBYTES - start) for start in (0, 4096)]
    await driver.put("x", other)
    await driver.put("y", other)
    for key in ("x", "y"):
        await driver.read(key, 0, aligned(NBYTES))
        assert await driver.fetch(key, 0, NBYTES) == other
    await driver.delete("x")
    await driver.close()
    gc.collect()
    assert held == [content, content[4096:]]


@pytest.mark.parametrize(
    ("start", "nbytes"),
    [(0, 100_001), (100_000, 1), (90_000, 80_000), (200_000, 70_000), (3067, 0)],
)
@trial()
async def test_a_fetch_past_the_end_is_damage(place: Place, start: int, nbytes: int) -> None:
    """If the object is shorter than expected, fetch raises DamagedError with URI and key, and never
    silently returns fewer bytes."""
    driver = place.open()
    await driver.put("a/x", bytes(100_000 if nbytes else 0))
    with pytest.raises(DamagedError) as caught:
        await driver.fetch("a/x", start, nbytes)
    assert (caught.value.key, caught.value.uri) == ("a/x", driver.uri)


@trial()
async def test_a_fetch_fails_as_a_read_does(place: Place) -> None:
    """A missing object is NotFoundError, even for an empty range; a negative start is an error of
    Holdfast's; a closed driver is StorageError."""
    driver = place.open()
    await driver.put("x", b"there")
    await refused(NotFoundError, driver.fetch("missing", 0, 1), driver.fetch("missing", 0, 0))
    await refused(HoldfastError, driver.fetch("x", -1, 2))
    await driver.close()
    await refused(StorageError, driver.fetch("x", 0, 1))
