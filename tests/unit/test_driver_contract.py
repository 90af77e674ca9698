"""What every driver must do: one suite, run on memory, on a disk, on tmpfs, and through the page cache.

Read-back of what must not be there goes around the driver: for files, the folder itself is looked at.
"""

from __future__ import annotations

import asyncio
import functools
import mmap
import random
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from holdfast.drivers.contract import Driver, check_key
from holdfast.drivers.registry import open_driver
from holdfast.errors import DamagedError, ExistsError, NotFoundError, StorageError, UriError

SHM = Path("/dev/shm")


@dataclass
class Place:
    """A root, and the drivers that were opened on it."""

    uri: str
    folder: Path | None
    opened: list[Driver] = field(default_factory=list)

    def open(self) -> Driver:
        """Another driver on the same root."""
        self.opened.append(open_driver(self.uri))
        return self.opened[-1]

    def leftovers(self) -> list[str]:
        """Every file below the root, temporary ones included, without asking a driver."""
        if self.folder is None:
            return []
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if not path.is_dir())


@pytest.fixture(params=["memory", "disk", "buffered", "tmpfs"])
def place(request: pytest.FixtureRequest, tmp_path: Path, no_leaks: None) -> Iterator[Place]:
    """A root of each kind. Drivers are closed afterwards, and must then have let go of everything."""
    if request.param == "memory":
        place = Place(f"memory://{request.node.nodeid.replace('?', '').replace('#', '')}", None)
    elif request.param == "tmpfs":
        if not SHM.is_dir():
            pytest.skip("no /dev/shm here")
        folder = Path(tempfile.mkdtemp(prefix="holdfast-", dir=SHM))
        place = Place(f"file://{folder}/root", folder / "root")
    else:
        options = "?direct=off" if request.param == "buffered" else ""
        place = Place(f"file://{tmp_path}/root{options}", tmp_path / "root")
    yield place
    for driver in place.opened:
        asyncio.run(driver.close())
    if request.param == "tmpfs":
        shutil.rmtree(folder)


@pytest.fixture
def driver(place: Place) -> Driver:
    """One driver on the place."""
    return place.open()


def asynchronous(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a coroutine function as a test, for at most a minute."""
    return functools.wraps(test)(lambda *args, **kwargs: asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60)))


async def keys(driver: Driver, prefix: str = "") -> list[str]:
    """The keys at or below ``prefix``, sorted."""
    return sorted([info.key async for info in driver.list(prefix)])


async def store(driver: Driver, key: str, content: bytes) -> None:
    """One object by an upload in one part."""
    upload = await driver.create(key, len(content))
    await upload.write(0, memoryview(content))
    await upload.commit()


def memory(nbytes: int, offset: int) -> memoryview:
    """``nbytes`` of memory whose address is ``offset`` bytes past a page."""
    return memoryview(mmap.mmap(-1, nbytes + offset + 1))[offset : offset + nbytes]


def parts_of(nbytes: int, part_nbytes: int, seed: int) -> list[tuple[int, int]]:
    """(start, stop) of the parts of an object, in a random order."""
    parts = [(start, min(start + part_nbytes, nbytes)) for start in range(0, nbytes, part_nbytes)]
    random.Random(seed).shuffle(parts)
    return parts


@asynchronous
async def test_an_object_comes_back(driver: Driver) -> None:
    """What was put is got, found by stat and list, and gone once deleted."""
    await driver.put("a/b", b"content")
    assert await driver.get("a/b") == b"content"
    info = await driver.stat("a/b")
    assert (info.key, info.nbytes) == ("a/b", 7)
    assert abs(info.modified_s - time.time()) < 60
    assert [info] == [found async for found in driver.list()]
    await driver.delete("a/b")
    assert await keys(driver) == []
    with pytest.raises(NotFoundError):
        await driver.get("a/b")


@pytest.mark.parametrize("part_nbytes", [4096, 65536, 70_001, 1 << 20])
@pytest.mark.parametrize("offset", [0, 1, 512])
@asynchronous
async def test_parts_arrive_in_any_order_and_from_any_address(
    driver: Driver, part_nbytes: int, offset: int, seed: int
) -> None:
    """Parts of any size, from aligned memory or not, written at once and in any order, make the object."""
    nbytes = min(part_nbytes * 9, 3 << 20) + 5
    content = memory(nbytes, offset)
    content[:] = random.Random(seed).randbytes(nbytes)
    upload = await driver.create("data/0", nbytes)
    async with asyncio.TaskGroup() as group:
        for start, stop in parts_of(nbytes, part_nbytes, seed):
            group.create_task(upload.write(start, content[start:stop]))
    await upload.commit()
    assert await driver.get("data/0") == content
    assert (await driver.stat("data/0")).nbytes == nbytes


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, (64 << 10) - 1, 64 << 10, (64 << 10) + 4097])
@asynchronous
async def test_every_size_can_be_stored(driver: Driver, place: Place, nbytes: int, seed: int) -> None:
    """Sizes around a page and around the least direct write, empty ones too, by upload and by put."""
    content = random.Random(seed).randbytes(nbytes)
    upload = await driver.create("upload", nbytes)
    if nbytes:
        await upload.write(0, memoryview(content))
    await upload.commit()
    await driver.put("put", content)
    assert await driver.get("upload") == content
    assert await driver.get("put") == content
    assert (await place.open().stat("upload")).nbytes == nbytes


@pytest.mark.parametrize("offset", [0, 1, 4095])
@asynchronous
async def test_any_range_can_be_read(driver: Driver, offset: int, seed: int) -> None:
    """Ranges of odd starts and lengths, into memory at odd addresses, hold exactly the bytes that were asked for."""
    content = random.Random(seed).randbytes((1 << 20) + 77)
    await driver.put("x", content)
    ranges = [(0, len(content)), (1, len(content) - 1), (4096, 200_000), (4097, 131_072), (5, 3), (len(content) - 1, 1)]
    for start, length in [*ranges, (0, 0), (len(content), 0)]:
        into = memory(length + 2, offset)
        into[:] = bytes([0xAA]) * len(into)
        await driver.read("x", start, into[1 : 1 + length])
        assert into[1 : 1 + length] == content[start : start + length]
        assert (into[0], into[-1]) == (0xAA, 0xAA)


@asynchronous
async def test_an_upload_is_invisible_until_it_commits(driver: Driver, place: Place) -> None:
    """Until then neither get, stat, read nor list shows anything of it, to nobody."""
    upload = await driver.create("a/x", 100_000)
    await upload.write(0, memoryview(bytes(100_000)))
    for other in (driver, place.open()):
        assert await keys(other) == []
        for look in (other.get("a/x"), other.stat("a/x"), other.read("a/x", 0, memoryview(bytearray(1)))):
            with pytest.raises(NotFoundError):
                await look
    await upload.commit()
    assert await keys(place.open()) == ["a/x"]


@asynchronous
async def test_an_aborted_upload_leaves_nothing(driver: Driver, place: Place) -> None:
    """Abort drops what was written, may be called again, and is harmless after a commit."""
    upload = await driver.create("x", 100_000)
    await upload.write(0, memoryview(bytes(50_000)))
    await upload.abort()
    await upload.abort()
    assert (await keys(driver), place.leftovers()) == ([], [])
    for use in (upload.write(50_000, memoryview(bytes(50_000))), upload.commit()):
        with pytest.raises(StorageError):
            await use
    await store(driver, "y", b"kept")
    upload = await driver.create("z", 1)
    await upload.write(0, memoryview(b"z"))
    await upload.commit()
    await upload.abort()
    assert await keys(driver) == ["y", "z"]


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([], "0:100 of 100 were never"),
        ([(0, 10), (20, 100)], "10:20 of 100 were never"),
        ([(0, 99)], "99:100 of 100 were never"),
        ([(50, 100), (0, 60)], "50:60 of 100 were written twice"),
    ],
)
@asynchronous
async def test_an_incomplete_upload_does_not_commit(
    driver: Driver, place: Place, parts: list[tuple[int, int]], why: str
) -> None:
    """Holes and overlaps are named; nothing becomes visible, nothing stays behind, and the old object is untouched."""
    await driver.put("x", b"old")
    upload = await driver.create("x", 100)
    for start, stop in parts:
        await upload.write(start, memoryview(bytes(stop - start)))
    with pytest.raises(StorageError, match=why):
        await upload.commit()
    assert await driver.get("x") == b"old"
    assert place.leftovers() in ([], ["x"])
    await upload.abort()
    with pytest.raises(StorageError):
        await upload.commit()


@pytest.mark.parametrize(("start", "nbytes"), [(0, 11), (10, 1), (-1, 5), (11, 0)])
@asynchronous
async def test_a_part_outside_the_object_is_refused(driver: Driver, start: int, nbytes: int) -> None:
    """The declared size is a limit, and the error names the range; nor is there an object of negative size."""
    with pytest.raises(StorageError, match="-1 bytes"):
        await driver.create("x", -1)
    upload = await driver.create("x", 10)
    with pytest.raises(StorageError, match=f"bytes {start}:{start + nbytes}"):
        await upload.write(start, memoryview(bytes(nbytes)))
    await upload.abort()


@asynchronous
async def test_two_uploads_to_one_key_do_not_disturb_each_other(driver: Driver, place: Place) -> None:
    """Both can be written in turns, from two drivers; the last commit wins, whole."""
    first, second = await driver.create("x", 200_000), await place.open().create("x", 100_000)
    for half in range(2):
        await second.write(half * 50_000, memoryview(b"2" * 50_000))
        await first.write(half * 100_000, memoryview(b"1" * 100_000))
    await second.commit()
    assert await driver.get("x") == b"2" * 100_000
    await first.commit()
    assert await driver.get("x") == b"1" * 200_000
    assert place.leftovers() in ([], ["x"])


@asynchronous
async def test_a_written_part_belongs_to_the_upload(driver: Driver) -> None:
    """Once write or put has returned, the caller may reuse its memory."""
    content = memory(100_000, 0)
    content[:] = b"a" * 100_000
    upload = await driver.create("x", 100_000)
    await upload.write(0, content)
    content[:] = b"b" * 100_000
    await upload.commit()
    assert await driver.get("x") == b"a" * 100_000


@asynchronous
async def test_a_reader_sees_the_old_or_the_new_object(driver: Driver, place: Place) -> None:
    """While an object is replaced again and again, whoever gets or reads it finds one version, whole."""
    versions = [bytes([n]) * 80_000 for n in range(40)]
    other = place.open()
    await driver.put("x", versions[0])
    done = asyncio.Event()

    async def look() -> int:
        looked = 0
        while not done.is_set():
            into = bytearray(80_000)
            await other.read("x", 0, memoryview(into))
            assert bytes(into) in versions
            assert await other.get("x") in versions
            looked += 1
            await asyncio.sleep(0)
        return looked

    async with asyncio.TaskGroup() as group:
        lookers = [group.create_task(look()) for _ in range(3)]
        for version in versions[1:]:
            await (driver.put("x", version) if version[0] % 2 else store(driver, "x", version))
            await asyncio.sleep(0)
        done.set()
    assert min(looker.result() for looker in lookers) > 0
    assert await other.get("x") == versions[-1]


@asynchronous
async def test_a_replaced_or_deleted_object_is_not_read_again(driver: Driver, place: Place) -> None:
    """A read after another driver replaced the object shows the new one; after a delete it finds nothing."""
    other, into = place.open(), bytearray(3)
    for content in (b"old", b"new"):
        await driver.put("x", content)
        await other.read("x", 0, memoryview(into))
        assert into == content
    await store(driver, "x", b"upl")
    await other.read("x", 0, memoryview(into))
    assert into == b"upl"
    await driver.delete("x")
    with pytest.raises(NotFoundError):
        await other.read("x", 0, memoryview(into))


@pytest.mark.parametrize(("start", "nbytes"), [(0, 100_001), (100_000, 1), (90_000, 80_000), (200_000, 70_000)])
@asynchronous
async def test_a_read_past_the_end_is_damage(driver: Driver, start: int, nbytes: int) -> None:
    """The object is shorter than the caller was told; the error names key and offset."""
    await driver.put("a/x", bytes(100_000))
    with pytest.raises(DamagedError, match=r"ends at byte \d+, before " + str(start + nbytes)) as caught:
        await driver.read("a/x", start, memory(nbytes, 0))
    assert (caught.value.key, caught.value.uri) == ("a/x", driver.uri)


HOSTILE = ["", "/", "/etc/passwd", "..", "../x", "a/../../x", "a/..", ".", "a/./b", "a//b", "a/", "a\0b", "\0"]


@pytest.mark.parametrize("key", HOSTILE)
@asynchronous
async def test_a_hostile_key_is_refused_everywhere(driver: Driver, place: Place, key: str) -> None:
    """No method takes a key that could leave the root, or that is no plain path; nothing is touched."""
    into = memoryview(bytearray(1))
    calls = [driver.read(key, 0, into), driver.create(key, 1), driver.get(key), driver.put(key, b""), driver.stat(key)]
    calls += [driver.put(key, b"", exclusive=True), driver.delete(key), driver.delete_all(key)]
    if key:  # the empty prefix lists everything
        calls.append(keys(driver, key))
    for call in calls:
        with pytest.raises(UriError):
            await call
    assert place.leftovers() == []


def test_check_key_returns_a_good_key() -> None:
    """Dots inside a name, spaces and any script are fine."""
    for key in ("a", "a/b", "..a", "a..", "...", "a b/ü", ".hidden"):
        assert check_key(key) == key


@asynchronous
async def test_an_exclusive_put_has_one_winner(driver: Driver, place: Place) -> None:
    """Of many that race, over several drivers, exactly one succeeds, and its bytes are what is stored."""
    drivers = [driver, place.open(), place.open()]
    for round_ in range(5):
        key = f"lock/{round_}"
        puts = [drivers[n % 3].put(key, b"%d" % n * 1000, exclusive=True) for n in range(24)]
        results = await asyncio.gather(*puts, return_exceptions=True)
        winners = [n for n, result in enumerate(results) if result is None]
        assert len(winners) == 1
        assert {type(result) for result in results if result is not None} == {ExistsError}
        assert await driver.get(key) == b"%d" % winners[0] * 1000
    assert len(place.leftovers()) in (0, 5)


@asynchronous
async def test_an_exclusive_put_to_a_taken_key_changes_nothing(driver: Driver, place: Place) -> None:
    """ExistsError, and the object is the one that was there."""
    await store(driver, "a/x", b"first")
    with pytest.raises(ExistsError) as caught:
        await place.open().put("a/x", b"second", exclusive=True)
    assert (caught.value.key, caught.value.uri) == ("a/x", driver.uri)
    assert await driver.get("a/x") == b"first"
    await driver.put("a/x", b"third")
    assert await driver.get("a/x") == b"third"
    assert place.leftovers() in ([], ["a/x"])


TREE = ["a/b/1", "a/b/2", "a/bc", "ab", "c/d/e/f", "c/.hidden"]


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("", sorted(TREE)),
        ("a", ["a/b/1", "a/b/2", "a/bc"]),
        ("a/b", ["a/b/1", "a/b/2"]),
        ("a/b/1", ["a/b/1"]),
        ("ab", ["ab"]),
        ("c", ["c/.hidden", "c/d/e/f"]),
        ("b", []),
        ("ab/x", []),
        ("x/y/z", []),
    ],
)
@asynchronous
async def test_a_listing_goes_by_whole_names(driver: Driver, prefix: str, expected: list[str]) -> None:
    """A prefix is a key, not a beginning of letters; what does not exist is empty; sizes are those of the objects."""
    for key in TREE:
        await driver.put(key, key.encode())
    assert await keys(driver, prefix) == expected
    assert {info.key: info.nbytes async for info in driver.list(prefix)} == {key: len(key) for key in expected}


@asynchronous
async def test_a_listing_may_be_left_early_and_disturbed(driver: Driver) -> None:
    """Objects may vanish while it runs, and it need not be read to its end."""
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
    await early.aclose()  # type: ignore[attr-defined] - an async generator, in every driver
    assert len(await keys(driver)) <= 1


@asynchronous
async def test_deleting_all_takes_what_lies_below_and_no_more(driver: Driver, place: Place) -> None:
    """Objects and unfinished uploads below the prefix go; neighbours with a longer name stay; twice is once."""
    for key in TREE:
        await driver.put(key, b"")
    upload = await driver.create("a/b/unfinished", 100_000)
    for _ in range(2):
        await driver.delete_all("a/b")
        assert await keys(driver) == ["a/bc", "ab", "c/.hidden", "c/d/e/f"]
    if place.folder:
        assert not (place.folder / "a/b").exists()
    with pytest.raises(StorageError):
        await upload.commit()
    await upload.abort()
    await driver.delete_all("ab")
    await driver.delete_all("nowhere/at/all")
    assert await keys(driver) == ["a/bc", "c/.hidden", "c/d/e/f"]
    await driver.put("a/b/1", b"again")
    assert await place.open().get("a/b/1") == b"again"


@asynchronous
async def test_deleting_what_is_not_there_is_no_error(driver: Driver) -> None:
    """The object's absence was all that was asked for."""
    await driver.delete("a/x")
    await driver.put("a/x", b"")
    await driver.delete("a/x")
    await driver.delete("a/x")
    assert await keys(driver) == []


@asynchronous
async def test_errors_say_where(driver: Driver) -> None:
    """Every error carries URI and key, and shows both."""
    into = memoryview(bytearray(1))
    for call in (driver.read("a/x", 0, into), driver.get("a/x"), driver.stat("a/x")):
        with pytest.raises(NotFoundError) as caught:
            await call
        assert (caught.value.uri, caught.value.key) == (driver.uri, "a/x")
        assert "a/x" in str(caught.value)
        assert driver.uri in str(caught.value)
        assert caught.value.__cause__ is not None
    with pytest.raises(UriError) as refused:
        await driver.get("../x")
    assert (refused.value.uri, refused.value.key) == (driver.uri, "../x")


@asynchronous
async def test_closing_twice_is_once(driver: Driver) -> None:
    """Close lets go of everything, also when there is nothing left."""
    await driver.put("x", b"")
    await driver.close()
    await driver.close()


def test_traits_make_sense(driver: Driver) -> None:
    """Sizes and counts are positive, and parts of the preferred size are aligned."""
    traits = driver.traits
    assert min(traits.part_nbytes, traits.part_min_nbytes, traits.align_nbytes, traits.concurrency) >= 1
    assert traits.part_nbytes % traits.align_nbytes == 0
    assert traits.part_min_nbytes <= traits.part_nbytes
    assert traits.coalesce_nbytes >= 0


@asynchronous
async def test_many_tasks_share_a_driver(driver: Driver, seed: int) -> None:
    """Uploads, reads, listings and deletions of many tasks at once do not disturb each other."""
    content = random.Random(seed).randbytes(150_000)

    async def work(n: int) -> None:
        upload = await driver.create(f"{n}/x", len(content))
        await asyncio.gather(
            *(upload.write(s, memoryview(content)[s:e]) for s, e in parts_of(len(content), 40_000 + n, n))
        )
        await upload.commit()
        into = bytearray(len(content) - n)
        await driver.read(f"{n}/x", n, memoryview(into))
        assert into == content[n:]
        assert await keys(driver, str(n)) == [f"{n}/x"]
        if n % 2:
            await driver.delete_all(str(n))

    await asyncio.gather(*(work(n) for n in range(100)))  # more objects than are kept open
    assert len(await keys(driver)) == 50
