"""Trials of read, fetch and read_pieces: any start and length, memory at any address, ranges past
the end; the same bytes and errors from all three."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable
from itertools import pairwise

import pytest

from holdfast.drivers.conformance.place import Place
from holdfast.drivers.conformance.trials import aligned, bytes_of, refused, trial
from holdfast.drivers.contract import Driver
from holdfast.drivers.pieces import piece_ends
from holdfast.errors import DamagedError, HoldfastError, NotFoundError, StorageError

NBYTES = (3 << 20) + 77
RANGES = [
    (0, NBYTES),
    (1, NBYTES - 1),
    (4096, 200_000),
    (4097, 131_072),
    ((1 << 20) - 3, 5),
    (NBYTES - 1, 1),
    (0, 0),
    (NBYTES, 0),
]


async def _read(driver: Driver, key: str, start: int, nbytes: int) -> None:
    await driver.read(key, start, aligned(nbytes))


async def _read_pieces(driver: Driver, key: str, start: int, nbytes: int) -> None:
    taken: list[int] = []
    try:
        await driver.read_pieces(key, start, nbytes, lambda piece: taken.append(len(piece)))
    except HoldfastError:
        assert taken == _sizes(driver, start, nbytes)[: len(taken)], "a partial piece was passed"
        raise


Way = Callable[[Driver, str, int, int], Awaitable[object]]
WAYS: dict[str, Way] = {
    "read": _read,
    "fetch": lambda driver, *where: driver.fetch(*where),
    "read_pieces": _read_pieces,
}


def _sizes(driver: Driver, start: int, nbytes: int) -> list[int]:
    """Return the sizes of the pieces of a range, in order."""
    if not nbytes:
        return []
    ends = piece_ends(start, nbytes, driver.traits.piece_nbytes)
    return [stop - begin for begin, stop in pairwise(ends)]


@trial()
async def test_any_range_can_be_read(place: Place, driver: Driver) -> None:
    """Reads of odd ranges into unaligned memory return exactly the requested bytes and touch no
    memory outside the buffer. Concurrent fetches return the same, one-dimensional and
    contiguous."""
    content = bytes_of(NBYTES)
    await driver.put("x", content)
    for offset in (0, 1, 4095):
        for start, length in RANGES:
            into = aligned(length + 2, offset)
            into[:] = bytes([0xAA]) * len(into)
            await driver.read("x", start, into[1 : 1 + length])
            assert into[1 : 1 + length] == content[start : start + length], (start, length)
            assert (into[0], into[-1]) == (0xAA, 0xAA)
    found = await asyncio.gather(*(driver.fetch("x", *where) for where in RANGES))
    assert found == [content[start : start + length] for start, length in RANGES]
    assert {(type(data), data.format, data.ndim, data.contiguous) for data in found} == {
        (memoryview, "B", 1, True)
    }


@trial()
async def test_pieces_hold_the_bytes_of_any_range(place: Place, driver: Driver) -> None:
    """Concurrent reads of odd ranges pass exactly the requested bytes in order, in pieces that end
    at multiples of ``piece_nbytes``, and never on the event loop's thread."""
    content = bytes_of(NBYTES)
    await driver.put("x", content)
    threads: set[int] = set()

    async def pieces_of(start: int, nbytes: int) -> list[bytes]:
        taken: list[bytes] = []

        def take(piece: memoryview) -> None:
            threads.add(threading.get_ident())
            taken.append(bytes(piece))

        await driver.read_pieces("x", start, nbytes, take)
        return taken

    found = await asyncio.gather(*(pieces_of(start, nbytes) for start, nbytes in RANGES))
    for (start, nbytes), taken in zip(RANGES, found, strict=True):
        assert b"".join(taken) == content[start : start + nbytes]
        assert [len(piece) for piece in taken] == _sizes(driver, start, nbytes)
    assert threading.get_ident() not in threads


@trial()
async def test_many_small_ranges_are_read_at_once(place: Place, driver: Driver) -> None:
    """Adjacent, overlapping and distant ranges of one object do not interfere, even if there are
    four times as many as the traits recommend."""
    content = bytes_of(1 << 20)
    await driver.put("x", content)
    count = max(100, 4 * place.traits.concurrency)
    ranges = [(n * 7919 % (len(content) - 600), n % 600) for n in range(count)]
    buffers = [bytearray(length) for _, length in ranges]
    async with asyncio.TaskGroup() as group:
        for (start, _), buffer in zip(ranges, buffers, strict=True):
            group.create_task(driver.read("x", start, memoryview(buffer)))
    assert buffers == [content[start : start + length] for start, length in ranges]


@trial()
async def test_fetched_memory_stays_as_it_is(place: Place, driver: Driver) -> None:
    """Fetched memory keeps its content after other reads and fetches, after the object was replaced
    and deleted, and after close()."""
    content = bytes_of(1 << 20)
    other = bytes_of(1 << 20, seed=1)
    await driver.put("x", content)
    held = [await driver.fetch("x", start, len(content) - start) for start in (0, 4096)]
    await driver.put("x", other)
    await driver.put("y", other)
    for key in ("x", "y"):
        await driver.read(key, 0, aligned(len(other)))
        assert await driver.fetch(key, 0, len(other)) == other
    await driver.delete("x")
    await driver.close()
    gc.collect()
    assert held == [content, content[4096:]]


@pytest.mark.parametrize("way", WAYS)
@trial()
async def test_a_read_past_the_end_is_damage(place: Place, driver: Driver, way: str) -> None:
    """If the object is shorter than expected, a read raises DamagedError with URI and key. It never
    silently returns fewer bytes, or passes a partial piece."""
    await driver.put("a/x", bytes(100_000))
    for start, nbytes in [(0, 100_001), (100_000, 1), (90_000, 80_000), (200_000, 70_000)]:
        read = WAYS[way](driver, "a/x", start, nbytes)
        await refused(DamagedError, read, where=(driver.uri, "a/x"))


@pytest.mark.parametrize("way", WAYS)
@trial()
async def test_reading_nothing_still_asks_for_an_object(
    place: Place, driver: Driver, way: str
) -> None:
    """An empty range is valid up to the object's end and DamagedError beyond it; for a missing
    object it is NotFoundError. A negative start is an error of Holdfast's; a closed driver is
    StorageError."""
    read = WAYS[way]
    await driver.put("empty", b"")
    await read(driver, "empty", 0, 0)
    await refused(DamagedError, read(driver, "empty", 3067, 0))
    await refused(NotFoundError, read(driver, "missing", 0, 0), read(driver, "missing", 0, 1))
    await refused(HoldfastError, read(driver, "empty", -1, 2))
    await driver.close()
    await refused(StorageError, read(driver, "empty", 0, 1))


@trial()
async def test_nothing_is_taken_after_a_cancellation(place: Place, driver: Driver) -> None:
    """Once a cancelled read has ended, no further piece is passed, and the driver stays usable."""
    content = bytes_of(NBYTES)
    await driver.put("x", content)
    loop = asyncio.get_running_loop()
    ended = False
    late: list[int] = []

    def take(piece: memoryview) -> None:
        loop.call_soon_threadsafe(reading.cancel)
        if ended:
            late.append(len(piece))

    reading = asyncio.create_task(driver.read_pieces("x", 0, NBYTES, take))
    await asyncio.wait([reading])
    ended = True
    await asyncio.sleep(0.05)
    assert not late
    assert bytes(await driver.fetch("x", 0, NBYTES)) == content
