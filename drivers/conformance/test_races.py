"""Trials of atomicity and concurrency: racing readers, writers and processes."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.drivers.conformance.children import child_of, sees_children
from holdfast.drivers.conformance.place import Place
from holdfast.drivers.conformance.trials import (
    ATOMIC_EXCLUSIVE,
    bytes_of,
    parts_of,
    store,
    trial,
    write_parts,
)
from holdfast.drivers.contract import Driver
from holdfast.errors import ExistsError, NotFoundError


@trial()
async def test_a_reader_sees_the_old_or_the_new_object(place: Place, driver: Driver) -> None:
    """While an object is repeatedly replaced, every get and read returns one whole version."""
    other = place.open()
    versions = [bytes([n]) * 80_000 for n in range(24)]
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


@trial()
async def test_a_new_object_appears_whole(place: Place, driver: Driver) -> None:
    """A client polling for an object with stat, list or get sees all of it as soon as it sees
    it."""
    other = place.open()
    content = bytes_of(300_000)

    async def wait_for(key: str) -> None:
        while True:
            try:
                found = await other.get(key)
            except NotFoundError:
                assert {info.nbytes async for info in other.list(key)} <= {len(content)}
                await asyncio.sleep(0)
                continue
            assert found == content
            assert (await other.stat(key)).nbytes == len(content)
            return

    for n in range(10):
        waiting = asyncio.create_task(wait_for(f"a/{n}"))
        await asyncio.sleep(0.001)
        await (store(driver, f"a/{n}", content) if n % 2 else driver.put(f"a/{n}", content))
        await waiting


@trial(ATOMIC_EXCLUSIVE)
async def test_an_exclusive_put_has_one_winner(place: Place) -> None:
    """When many puts over several drivers race, exactly one succeeds, and its bytes are stored."""
    drivers = [place.open() for _ in range(3)]
    for round_ in range(3):
        key = f"lock/{round_}"
        puts = [drivers[n % 3].put(key, b"%d" % n * 1000, exclusive=True) for n in range(24)]
        results = await asyncio.gather(*puts, return_exceptions=True)
        winners = [n for n, result in enumerate(results) if result is None]
        assert len(winners) == 1
        assert {type(result) for result in results if result is not None} == {ExistsError}
        assert await drivers[0].get(key) == b"%d" % winners[0] * 1000
    await place.holds(*(f"lock/{n}" for n in range(3)))


@trial(ATOMIC_EXCLUSIVE)
async def test_an_exclusive_put_has_one_winner_among_processes(place: Place) -> None:
    """When two processes put exclusively to the same twenty keys, each key has one winner."""
    if not await sees_children(place):
        pytest.skip("not applicable: other processes do not see this storage")
    racers = [asyncio.create_task(child_of(place, "race", str(n))) for n in range(2)]
    won = [(await racer).split() for racer in racers]
    assert sorted(won[0] + won[1]) == sorted(f"race/{n}" for n in range(20))
    for n, keys in enumerate(won):
        for key in keys:
            assert await place.looker.get(key) == b"%d" % n * 1000


@trial()
async def test_many_tasks_share_a_driver(place: Place, driver: Driver) -> None:
    """Uploads, reads, listings and deletions by far more tasks than the useful concurrency do not
    interfere."""
    traits = place.traits
    many = min(64, max(24, 3 * place.traits.concurrency))
    content = bytes_of(150_000)

    async def work(n: int) -> None:
        upload = await driver.create(f"{n}/x", len(content))
        await write_parts(
            upload, memoryview(content), parts_of(len(content), 40_000 + n, traits, n), traits
        )
        await upload.commit()
        into = bytearray(len(content) - n)
        await driver.read(f"{n}/x", n, memoryview(into))
        assert into == content[n:]
        assert [info.key async for info in driver.list(str(n))] == [f"{n}/x"]
        if n % 2:
            await driver.delete_all(str(n))

    await asyncio.gather(*(work(n) for n in range(many)))
    assert len(await place.keys()) == many // 2


@trial()
async def test_uploads_beyond_the_concurrency_all_end(place: Place, driver: Driver) -> None:
    """Many uploads are open at once, each with parts in flight; some are aborted, and the others
    commit."""
    nbytes = place.part_nbytes + 1000
    many = min(64, 2 * place.traits.concurrency)

    async def work(n: int) -> None:
        content = memoryview(bytes_of(nbytes, n))
        upload = uploads[n]
        await write_parts(
            upload, content, parts_of(nbytes, place.part_nbytes, place.traits, n), place.traits
        )
        await (upload.commit() if n % 4 else upload.abort())

    uploads = [await driver.create(f"a/{n}", nbytes) for n in range(many)]
    await asyncio.gather(*(work(n) for n in range(many)))
    await place.holds(*(f"a/{n}" for n in range(many) if n % 4))
    for n in range(many):
        if n % 4:
            assert await driver.get(f"a/{n}") == bytes_of(nbytes, n)
