"""Trials of reads in pieces: same bytes and errors as read, split as the traits say."""

from __future__ import annotations

import asyncio
import threading
from itertools import pairwise

import pytest

from holdfast.drivers.conformance.place import Place
from holdfast.drivers.conformance.trials import bytes_of, refused, trial
from holdfast.drivers.contract import Driver
from holdfast.drivers.pieces import piece_ends
from holdfast.errors import DamagedError, HoldfastError, NotFoundError, StorageError

NBYTES = (3 << 20) + 77
RANGES = [
    (0, NBYTES),
    (1, NBYTES - 1),
    (4097, 131_072),
    ((1 << 20) - 3, 5),
    (NBYTES - 1, 1),
    (0, 0),
    (NBYTES, 0),
]


def _sizes(driver: Driver, start: int, nbytes: int) -> list[int]:
    """Return the sizes of the pieces of a range, in order."""
    if not nbytes:
        return []
    ends = piece_ends(start, nbytes, driver.traits.piece_nbytes)
    return [stop - begin for begin, stop in pairwise(ends)]


@trial()
async def test_pieces_hold_the_bytes_of_any_range(place: Place) -> None:
    """Reads of odd ranges, also concurrent ones, pass exactly the requested bytes in order, in
    pieces that end at multiples of ``piece_nbytes``, and never on the event loop's thread."""
    driver = place.open()
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


@pytest.mark.parametrize(
    ("start", "nbytes"), [(0, 100_001), (100_000, 1), (90_000, 80_000), (200_000, 70_000)]
)
@trial()
async def test_pieces_past_the_end_are_damage(place: Place, start: int, nbytes: int) -> None:
    """If the object is shorter than expected, the read raises DamagedError with URI and key. It
    never silently passes fewer bytes, or a partial piece."""
    driver = place.open()
    await driver.put("a/x", bytes(100_000))
    taken: list[int] = []
    with pytest.raises(DamagedError) as caught:
        await driver.read_pieces("a/x", start, nbytes, lambda piece: taken.append(len(piece)))
    assert (caught.value.key, caught.value.uri) == ("a/x", driver.uri)
    assert taken == _sizes(driver, start, nbytes)[: len(taken)]


@trial()
async def test_reading_in_pieces_fails_as_a_read_does(place: Place) -> None:
    """A missing object is NotFoundError, even for an empty range; a negative start is an error of
    Holdfast's; a closed driver is StorageError."""
    driver = place.open()
    taken: list[memoryview] = []
    await driver.put("x", b"there")
    await refused(
        NotFoundError,
        driver.read_pieces("missing", 0, 1, taken.append),
        driver.read_pieces("missing", 0, 0, taken.append),
    )
    await refused(HoldfastError, driver.read_pieces("x", -1, 2, taken.append))
    await driver.close()
    await refused(StorageError, driver.read_pieces("x", 0, 1, taken.append))
    assert not taken


@trial()
async def test_nothing_is_taken_after_a_cancellation(place: Place) -> None:
    """Once a cancelled read has ended, no further piece is passed, and the driver stays usable."""
    driver = place.open()
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
