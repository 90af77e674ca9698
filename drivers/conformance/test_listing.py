"""Trials of list, delete_all and sweep: prefixes match whole names, and nothing outside the prefix
is touched."""

from __future__ import annotations

import asyncio
import contextlib

from holdfast.drivers.conformance.place import Place
from holdfast.drivers.conformance.trials import begun, bytes_of, trial
from holdfast.drivers.contract import Driver
from holdfast.errors import StorageError

TREE = ["a/b/1", "a/b/2", "a/bc", "ab", "c/d/e/f", "c/.hidden"]
LISTED = [
    ("", sorted(TREE)),
    ("a", ["a/b/1", "a/b/2", "a/bc"]),
    ("a/b", ["a/b/1", "a/b/2"]),
    ("a/b/1", ["a/b/1"]),
    ("ab", ["ab"]),
    ("c", ["c/.hidden", "c/d/e/f"]),
    ("b", []),
    ("ab/x", []),
    ("x/y/z", []),
]


@trial()
async def test_a_listing_goes_by_whole_names(place: Place, driver: Driver) -> None:
    """A prefix matches whole path parts, a missing prefix is empty, and sizes are correct."""
    for key in TREE:
        await driver.put(key, key.encode())
    for prefix, expected in LISTED:
        found = [(info.key, info.nbytes) async for info in driver.list(prefix)]
        assert sorted(found) == [(key, len(key)) for key in expected], prefix


@trial()
async def test_a_listing_of_many_objects_is_complete(place: Place, driver: Driver) -> None:
    """A listing longer than one server response contains every object once."""
    keys = [f"n/{n:04d}" for n in range(1100)]
    limit = asyncio.Semaphore(place.traits.concurrency)

    async def put(key: str) -> None:
        async with limit:
            await driver.put(key, b"x")

    await asyncio.gather(*(put(key) for key in keys))
    assert sorted([info.key async for info in driver.list("n")]) == keys
    await driver.delete_all("n")
    assert await place.keys() == []


@trial()
async def test_a_listing_may_be_left_early_and_disturbed(place: Place, driver: Driver) -> None:
    """Objects may vanish during a listing, and it need not be read to its end."""
    for n in range(50):
        await driver.put(f"d{n % 5}/{n}", b"")
    listing = driver.list()
    await anext(listing)
    await driver.delete_all("d3")
    async for info in listing:
        await driver.delete(info.key)
    early = driver.list()
    async for _ in early:
        break
    await early.aclose()  # type: ignore[attr-defined]  # an async generator in every driver
    assert len(await place.keys()) <= 1


@trial()
async def test_a_listing_while_objects_come_and_go_shows_what_stays(
    place: Place, driver: Driver
) -> None:
    """Objects that exist throughout are listed exactly once, unfinished ones never, and sizes are
    never partial."""
    writer = place.open()
    stay = [f"a/stay/{n}" for n in range(20)]
    for key in stay:
        await driver.put(key, b"stays")
    done = asyncio.Event()

    async def come_and_go(lane: int) -> None:
        for n in range(8):
            upload = await begun(writer, f"a/come/{lane}-{n}", bytes(70_000))
            await (upload.commit() if n % 2 else upload.abort())
            await writer.put(f"a/put/{lane}", bytes(70_000))
            await writer.delete(f"a/put/{lane}")

    async def look() -> None:
        while not done.is_set():
            found = [(info.key, info.nbytes) async for info in driver.list("a")]
            assert sorted(key for key, _ in found if key in stay) == sorted(stay)
            others = [(key, nbytes) for key, nbytes in found if key not in stay]
            assert all(
                key.startswith(("a/come/", "a/put/")) and nbytes == 70_000 for key, nbytes in others
            )
            assert not any(int(key[-1]) % 2 == 0 for key, _ in others if key.startswith("a/come/"))
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        looking = group.create_task(look())
        await asyncio.gather(*(come_and_go(lane) for lane in range(4)))
        done.set()
        await looking


@trial()
async def test_deleting_all_takes_what_lies_below_and_no_more(place: Place, driver: Driver) -> None:
    """Objects and unfinished uploads below the prefix are removed; neighbours with longer names
    stay; repeating it is harmless."""
    for key in TREE:
        await driver.put(key, b"")
    for _ in range(2):
        await driver.delete_all("a/b")
        await place.holds("a/bc", "ab", "c/.hidden", "c/d/e/f")
    await driver.delete_all("ab")
    await driver.delete_all("nowhere/at/all")
    await place.holds("a/bc", "c/.hidden", "c/d/e/f")
    await driver.put("a/b/1", b"again")
    assert await place.open().get("a/b/1") == b"again"


@trial()
async def test_deleting_all_takes_unfinished_uploads(place: Place, driver: Driver) -> None:
    """Data of unfinished uploads below the prefix is removed. Whatever happens to such an upload,
    it never shows a partial object."""
    content = bytes_of(100_000)
    upload = await begun(driver, "a/b/unfinished", content)
    await driver.delete_all("a/b")
    await place.holds()
    with contextlib.suppress(StorageError):
        await upload.commit()
        assert await driver.get("a/b/unfinished") == content
    await upload.abort()
    await driver.delete_all("a/b")
    await place.holds()


@trial()
async def test_a_sweep_harms_nobody_alive(place: Place, driver: Driver) -> None:
    """Objects stay, and live uploads of this and another driver continue and commit."""
    other = place.open()
    nbytes = place.part_nbytes + 1000
    await driver.put("a/x", b"object")
    uploads = [await d.create(f"a/{n}/y", nbytes) for n, d in enumerate((driver, other))]
    uploads.append(await other.create("a/x", nbytes))
    content = memoryview(bytes_of(nbytes))
    for sweeper in (driver, other, place.open()):
        for prefix in ("a", "a/x", "a/1"):
            await sweeper.sweep(prefix)
    for upload in uploads:
        await upload.write(0, content[: place.part_nbytes])
    await place.open().sweep("a")
    for upload in uploads:
        await upload.write(place.part_nbytes, content[place.part_nbytes :])
        await place.open().sweep("a")
        await upload.commit()
    for key in ("a/0/y", "a/1/y", "a/x"):
        assert await driver.get(key) == content
    for prefix in ("a", "a/x", "nowhere"):
        await driver.sweep(prefix)
    await place.holds("a/0/y", "a/1/y", "a/x")
