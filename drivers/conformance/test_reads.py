"""Trials of reads: any start and length, memory at any address, and ranges past the end."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.drivers.conformance.place import Place
from holdfast.drivers.conformance.trials import aligned, bytes_of, refused, trial
from holdfast.errors import DamagedError, NotFoundError

NBYTES = (1 << 20) + 77
RANGES = [
    (0, NBYTES),
    (1, NBYTES - 1),
    (4096, 200_000),
    (4097, 131_072),
    (5, 3),
    (NBYTES - 1, 1),
    (0, 0),
    (NBYTES, 0),
]


@pytest.mark.parametrize("offset", [0, 1, 4095])
@trial()
async def test_any_range_can_be_read(place: Place, offset: int) -> None:
    """Reads of odd ranges into unaligned memory return exactly the requested bytes and touch no
    memory outside the buffer."""
    driver = place.open()
    content = bytes_of(NBYTES)
    await driver.put("x", content)
    for start, length in RANGES:
        into = aligned(length + 2, offset)
        into[:] = bytes([0xAA]) * len(into)
        await driver.read("x", start, into[1 : 1 + length])
        assert into[1 : 1 + length] == content[start : start + length], (start, length)
        assert (into[0], into[-1]) == (0xAA, 0xAA)


@trial()
async def test_many_small_ranges_are_read_at_once(place: Place) -> None:
    """Adjacent, overlapping and distant ranges of one object do not interfere."""
    driver = place.open()
    content = bytes_of(NBYTES)
    await driver.put("x", content)
    ranges = [(n * 7919 % (NBYTES - 600), n % 600) for n in range(100)]
    buffers = [bytearray(length) for _, length in ranges]
    async with asyncio.TaskGroup() as group:
        for (start, _), buffer in zip(ranges, buffers, strict=True):
            group.create_task(driver.read("x", start, memoryview(buffer)))
    assert buffers == [content[start : start + length] for start, length in ranges]


@pytest.mark.parametrize(
    ("start", "nbytes"), [(0, 100_001), (100_000, 1), (90_000, 80_000), (200_000, 70_000)]
)
@trial()
async def test_a_read_past_the_end_is_damage(place: Place, start: int, nbytes: int) -> None:
    """If the object is shorter than expected, read raises DamagedError with URI and key, and never
    silently returns fewer bytes."""
    driver = place.open()
    await driver.put("a/x", bytes(100_000))
    with pytest.raises(DamagedError) as caught:
        await driver.read("a/x", start, aligned(nbytes))
    assert (caught.value.key, caught.value.uri) == ("a/x", driver.uri)


@trial()
async def test_an_object_that_became_shorter_is_damage(place: Place) -> None:
    """A reader that expects the old size gets an error, even from a driver that has read the old
    object."""
    driver = place.open()
    other = place.open()
    await driver.put("x", bytes_of(100_000))
    await driver.read("x", 0, aligned(100_000))
    await other.put("x", b"short")
    with pytest.raises(DamagedError):
        await driver.read("x", 0, aligned(100_000))


@trial()
async def test_reading_nothing_still_asks_for_an_object(place: Place) -> None:
    """An empty range is valid up to the object's end and DamagedError beyond it; for a missing
    object it is NotFoundError."""
    driver = place.open()
    await driver.put("empty", b"")
    await driver.read("empty", 0, memoryview(bytearray(0)))
    await refused(DamagedError, driver.read("empty", 3067, memoryview(bytearray(0))))
    with pytest.raises(NotFoundError):
        await driver.read("missing", 0, memoryview(bytearray(0)))
