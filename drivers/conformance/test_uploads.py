"""Trials of uploads: part order, sizes, holes, aborts, and several uploads to one key."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from holdfast.drivers.conformance.place import Place
from holdfast.drivers.conformance.trials import (
    SEVERAL_STREAMS,
    SMALL_OBJECTS,
    TINY_PARTS,
    UNORDERED_PARTS,
    aligned,
    begun,
    bytes_of,
    parts_of,
    refused,
    store,
    trial,
    write_parts,
)
from holdfast.drivers.contract import Driver, segments
from holdfast.errors import DamagedError, NotFoundError, StorageError


@pytest.mark.parametrize("offset", [0, 1, 512])
@trial()
async def test_parts_from_any_address_make_the_object(
    place: Place, driver: Driver, offset: int
) -> None:
    """Parts of any size, from aligned or unaligned memory, are written concurrently and in random
    order if the traits allow it."""
    traits = place.traits
    sizes = {max(nbytes, traits.part_min_nbytes) for nbytes in (4096, 65536, 70_001, 1 << 20)}
    for part_nbytes in sorted(sizes):
        nbytes = min(part_nbytes * 9, max(3 << 20, 2 * part_nbytes)) + 5
        content = aligned(nbytes, offset)
        content[:] = bytes_of(nbytes, offset)
        upload = await driver.create("data/0", nbytes)
        await write_parts(upload, content, parts_of(nbytes, part_nbytes, traits, offset), traits)
        await upload.commit()
        assert await driver.get("data/0") == content
        assert (await driver.stat("data/0")).nbytes == nbytes


@trial()
async def test_an_object_of_preferred_parts_comes_back(place: Place, driver: Driver) -> None:
    """An object of two preferred parts and a small one reads back correctly, whole and in
    ranges."""
    part_nbytes = place.traits.part_nbytes
    content = bytes_of(2 * part_nbytes + 12_345)
    await store(driver, "large", content)
    into = aligned(len(content))
    await driver.read("large", 0, into)
    assert into == content
    across = aligned(part_nbytes + 2, 3)
    await driver.read("large", part_nbytes - 1, across)
    assert across == content[part_nbytes - 1 : 2 * part_nbytes + 1]


@trial(SMALL_OBJECTS)
async def test_an_object_may_be_as_large_as_the_traits_say(place: Place, driver: Driver) -> None:
    """An object of the maximum size can be stored, as saves of such images rely on it."""
    content = bytes_of(place.traits.object_max_nbytes or 0)
    await store(driver, "largest", content)
    assert (await driver.stat("largest")).nbytes == len(content)
    last = aligned(1)
    await driver.read("largest", len(content) - 1, last)
    assert last == content[-1:]


@trial(SEVERAL_STREAMS)
async def test_segments_are_written_at_once(place: Place, driver: Driver) -> None:
    """As many contiguous segments as the traits name, each in its own order, form the object, and
    leave nothing else behind."""
    traits = place.traits
    content = bytes_of(2 * traits.streams * traits.part_nbytes - 12_345)
    upload = await driver.create("a/x", len(content))

    async def write(start: int, stop: int) -> None:
        for at in range(start, stop, traits.part_nbytes):
            await upload.write(at, memoryview(content)[at : min(at + traits.part_nbytes, stop)])

    async with asyncio.TaskGroup() as group:
        for start, stop in segments(len(content), traits):
            group.create_task(write(start, stop))
    await upload.commit()
    into = aligned(len(content))
    await driver.read("a/x", 0, into)
    assert into == content
    await place.holds("a/x")


@trial()
async def test_every_size_can_be_stored(place: Place, driver: Driver) -> None:
    """Empty objects and sizes around a page and around the minimum direct write can be uploaded and
    put. Passing the declared size to commit makes no difference."""
    edge = 64 << 10
    for nbytes in (0, 1, 4095, 4096, 4097, edge - 1, edge, edge + 4097):
        content = bytes_of(nbytes)
        for end in (None, nbytes):
            upload = await driver.create("upload", nbytes)
            if nbytes:
                await upload.write(0, memoryview(content))
            await upload.commit(end)
            assert await driver.get("upload") == content
        await driver.put("put", content)
        assert await driver.get("put") == content
        assert (await place.looker.stat("upload")).nbytes == nbytes


@trial()
async def test_an_upload_is_invisible_until_it_commits(place: Place, driver: Driver) -> None:
    """Before the commit, get, stat, read, list and an exclusive put see nothing of the upload, from
    any client, even once every byte is written. The commit shows it to everybody at once."""
    nbytes = place.part_nbytes + 1000
    upload = await begun(driver, "a/x", bytes(place.part_nbytes), nbytes)
    for other in (driver, place.open()):
        assert [info.key async for info in other.list()] == []
        into = memoryview(bytearray(1))
        await refused(
            NotFoundError, other.get("a/x"), other.stat("a/x"), other.read("a/x", 0, into)
        )
    if place.probe is not None:
        assert "a/x" not in place.probe.list()
    await driver.put("a/x", b"mine", exclusive=True)
    await upload.write(place.part_nbytes, memoryview(bytes(1000)))
    assert await place.looker.get("a/x") == b"mine"
    await upload.commit()
    assert await place.looker.get("a/x") == bytes(nbytes)
    await place.holds("a/x")


@trial()
async def test_an_aborted_upload_leaves_nothing(place: Place, driver: Driver) -> None:
    """abort drops the written data, may be repeated, and is harmless after a commit. An upload that
    is over accepts no further writes and commits."""
    nbytes = place.part_nbytes + 1000
    upload = await begun(driver, "x", bytes(place.part_nbytes), nbytes)
    await upload.abort()
    await upload.abort()
    await place.holds()
    await refused(
        StorageError, upload.write(place.part_nbytes, memoryview(bytes(1000))), upload.commit()
    )
    upload = await begun(driver, "z", b"z")
    await upload.commit()
    await upload.abort()
    late = (upload.write(0, memoryview(b"y")), upload.commit())
    await refused(StorageError, *late, where=(driver.uri, "z"))
    assert await driver.get("z") == b"z"
    await place.holds("z")


HOLES: list[tuple[list[tuple[int, int]], int, int]] = [
    ([], 0, 100),
    ([(0, 10), (20, 100)], 10, 20),
    ([(0, 99)], 99, 100),
    ([(50, 100), (0, 60)], 50, 60),
]


@trial(UNORDERED_PARTS, TINY_PARTS)
async def test_an_incomplete_upload_does_not_commit(place: Place, driver: Driver) -> None:
    """Holes and overlaps are reported; nothing becomes visible or stays behind, and the old object
    is untouched."""
    await driver.put("x", b"old")
    for parts, start, stop in HOLES:
        upload = await driver.create("x", 100)
        for begin, end in parts:
            await upload.write(begin, memoryview(bytes(end - begin)))
        (error,) = await refused(StorageError, upload.commit(), where=(driver.uri, "x"))
        assert f"{start}:{stop}" in str(error)
        await upload.abort()
        assert await driver.get("x") == b"old"
        await place.holds("x")
        await refused(StorageError, upload.commit())


@pytest.mark.parametrize("preferred", [False, True], ids=["small parts", "preferred parts"])
@trial()
async def test_an_upload_may_end_early(place: Place, driver: Driver, preferred: bool) -> None:
    """An upload whose commit gives a smaller size is invisible before, and then whole, of exactly
    that size: at its beginning, within its first part, after a part, within a later part."""
    part_nbytes = place.traits.part_nbytes if preferred else place.part_nbytes
    for nbytes in (0, 1000, part_nbytes, part_nbytes + 1001):
        content = bytes_of(nbytes)
        await driver.put("x", b"old")
        upload = await driver.create("x", 2 * part_nbytes + 12_345)
        parts = parts_of(nbytes, part_nbytes, place.traits)
        await write_parts(upload, memoryview(content), parts, place.traits)
        assert await driver.get("x") == b"old"
        await upload.commit(nbytes)
        await upload.abort()
        for other in (driver, place.looker):
            assert (await other.stat("x")).nbytes == nbytes
            assert await other.get("x") == content
            await refused(DamagedError, other.read("x", nbytes, memoryview(bytearray(1))))
        await place.holds("x")


@trial()
async def test_an_upload_that_lacks_its_end_does_not_commit(place: Place, driver: Driver) -> None:
    """Without its last part, or any part, an upload fails to commit wherever it is to end, and
    leaves nothing visible or behind."""
    nbytes = place.part_nbytes + 1000
    await driver.put("x", b"old")
    for written, end in itertools.product((0, 1), (None, -1, 1000, 1 << 40)):
        upload = await driver.create("x", nbytes)
        for _ in range(written):
            await upload.write(0, memoryview(bytes(place.part_nbytes)))
        await refused(StorageError, upload.commit(end), where=(driver.uri, "x"))
        await upload.abort()
        assert await driver.get("x") == b"old"
        await place.holds("x")


@trial()
async def test_a_part_outside_the_object_is_refused(place: Place, driver: Driver) -> None:
    """Writes beyond the declared size, and negative sizes, are rejected."""
    await refused(StorageError, driver.create("x", -1))
    for start, nbytes in [(0, 11), (10, 1), (-1, 5), (11, 0)]:
        upload = await driver.create("x", 10)
        part = memoryview(bytes(nbytes))
        await refused(StorageError, upload.write(start, part), where=(driver.uri, "x"))
        await upload.abort()
    await place.holds()


@trial()
async def test_two_uploads_to_one_key_do_not_disturb_each_other(
    place: Place, driver: Driver
) -> None:
    """Two drivers can write to one key in turns; the last commit wins, whole. An abort removes only
    the data of its own upload."""
    part_nbytes = place.part_nbytes
    first = await driver.create("x", 2 * part_nbytes)
    second = await place.open().create("x", part_nbytes + 500)
    for start, nbytes in ((0, part_nbytes), (part_nbytes, 500)):
        await second.write(start, memoryview(b"2" * nbytes))
        await first.write(start, memoryview(b"1" * part_nbytes))
    third = await begun(driver, "x", b"3" * 1000)
    await third.abort()
    await second.commit()
    assert await driver.get("x") == b"2" * (part_nbytes + 500)
    await third.abort()
    await first.commit()
    assert await driver.get("x") == b"1" * 2 * part_nbytes
    await place.holds("x")


@trial()
async def test_a_written_part_belongs_to_the_upload(place: Place, driver: Driver) -> None:
    """Once write has returned, the caller may reuse its memory."""
    part_nbytes = place.part_nbytes
    content = aligned(part_nbytes)
    upload = await driver.create("x", 2 * part_nbytes)
    for part, letter in enumerate((b"a", b"b")):
        content[:] = letter * part_nbytes
        await upload.write(part * part_nbytes, content)
    content[:] = b"c" * part_nbytes
    await upload.commit()
    assert await driver.get("x") == b"a" * part_nbytes + b"b" * part_nbytes
