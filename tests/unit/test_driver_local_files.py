"""The local driver: temporary files, files that stay open, cancelled calls, and races between
processes."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.drivers.local import driver as local
from holdfast.drivers.local.driver import LocalDriver
from holdfast.drivers.local.names import temporary_name
from holdfast.errors import ExistsError, StorageDownError, StorageError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The root of the driver; it does not exist yet."""
    return tmp_path / "above" / "root"


@pytest.fixture
def driver(root: Path, no_leaks: None) -> Iterator[LocalDriver]:
    """A driver on the root."""
    driver = LocalDriver(root)
    yield driver
    asyncio.run(driver.close())


def asynchronous(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a coroutine function as a test, for at most a minute."""
    return functools.wraps(test)(
        lambda *args, **kwargs: asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60))
    )


async def keys(driver: LocalDriver, prefix: str = "") -> list[str]:
    """The keys at or below ``prefix``, sorted."""
    return sorted([info.key async for info in driver.list(prefix)])


def open_below(folder: Path) -> list[str]:
    """What this process has open below a folder."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sorted(
        os.readlink(link)
        for link in links
        if os.path.lexists(link) and str(folder) in os.readlink(link)
    )


# Temporary files and open files


@asynchronous
async def test_unfinished_uploads_lie_hidden_beside_their_target(
    driver: LocalDriver, root: Path
) -> None:
    """A rename across folders, or file systems, is never needed; deleting the folder takes dead
    uploads along."""
    upload = await driver.create("a/x", 10)
    (name,) = os.listdir(root / "a")
    assert name.startswith(".x.")
    assert name.endswith(".tmp")
    (root / "a" / temporary_name("dead")).write_bytes(b"")
    assert await keys(driver) == []
    await driver.delete_all("a")
    assert os.listdir(root) == []
    await upload.abort()


@asynchronous
async def test_only_so_many_files_stay_open(driver: LocalDriver, root: Path) -> None:
    """The longest unused are closed; those in use never are."""
    into = memoryview(bytearray(1))
    for n in range(100):
        await driver.put(f"{n}", b"x")
    await asyncio.gather(*(driver.read(f"{n % 100}", 0, into) for n in range(300)))
    assert len(open_below(root)) <= 2 * 64 + 1
    await driver.read("99", 0, into)
    assert str(root / "99") in open_below(root)


@asynchronous
async def test_space_of_deleted_objects_is_let_go(
    driver: LocalDriver, root: Path, no_leaks: None
) -> None:
    """An object that was read, and deleted by someone else, is not kept open once something new is
    stored."""
    other = LocalDriver(root)
    for key in ("a/old", "kept"):
        await driver.put(key, b"x")
        await driver.read(key, 0, memoryview(bytearray(1)))
    await other.delete_all("a")
    assert any("(deleted)" in path for path in open_below(root))
    upload = await driver.create("a/new", 1)
    assert not any("(deleted)" in path for path in open_below(root))
    assert str(root / "kept") in open_below(root)
    await upload.abort()
    await other.close()


@asynchronous
async def test_own_deletions_close_at_once(driver: LocalDriver, root: Path) -> None:
    """What this driver deletes or replaces, it does not keep open."""
    into = memoryview(bytearray(1))
    for key in ("a/x", "b", "c"):
        await driver.put(key, b"x")
        await driver.read(key, 0, into)
    await driver.delete_all("a")
    await driver.delete("b")
    await driver.put("c", b"y")
    assert set(open_below(root)) == {str(root)}


@asynchronous
async def test_an_abort_during_a_write_waits_for_nobody(
    driver: LocalDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The temporary file goes at once; its descriptors when the last write is done with them."""
    inside, go_on = _blocking(monkeypatch, "pwrite")
    upload = await driver.create("x", 10)
    write = asyncio.ensure_future(upload.write(0, memoryview(bytes(10))))
    await asyncio.to_thread(inside.wait, 10)
    await upload.abort()
    assert await keys(driver) == []
    go_on.set()
    await write
    with pytest.raises(StorageError):
        await upload.commit()


def _blocking(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> tuple[threading.Event, threading.Event]:
    """Make a call of ``os`` wait; the events that it is inside, and that it may go on."""
    inside, go_on = threading.Event(), threading.Event()
    real = getattr(os, name)

    def wait(*args: Any, **kwargs: Any) -> Any:
        inside.set()
        assert go_on.wait(30)
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, wait)
    return inside, go_on


@asynchronous
async def test_close_says_what_it_waited_for(
    root: Path, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    """An operation that never ends does not hang close, but is an error; a second close tries
    again."""
    monkeypatch.setattr(local, "CLOSE_TIMEOUT_S", 0.05)
    inside, go_on = _blocking(monkeypatch, "fsync")
    driver = LocalDriver(root)
    put = asyncio.ensure_future(driver.put("x", b""))
    await asyncio.to_thread(inside.wait, 10)
    with pytest.raises(StorageDownError, match=r"1 operations still run 0.05 s"):
        await driver.close()
    go_on.set()
    await put
    await driver.close()


# Races between processes


@asynchronous
async def test_exclusive_without_hard_links(
    driver: LocalDriver, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the file system has no hard links, there is still one winner, and its object is whole."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    puts = [driver.put("x", b"%d" % n, exclusive=True) for n in range(8)]
    results = await asyncio.gather(*puts, return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["ExistsError"] * 7 + ["NoneType"]
    assert await driver.get("x") == b"%d" % results.index(None)
    assert os.listdir(root) == ["x"]
    with pytest.raises(ExistsError):
        await driver.put("x", b"", exclusive=True)


# Cancelled calls


@asynchronous
async def test_a_cancelled_create_leaves_nothing(
    driver: LocalDriver, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upload that nobody was handed is dropped, although the thread went on and made it."""
    inside, go_on = _blocking(monkeypatch, "mkdir")
    create = asyncio.ensure_future(driver.create("a/x", 1 << 20))
    await asyncio.to_thread(inside.wait, 10)
    create.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError) as cancelled:
        await create
    assert cancelled.value.__cause__ is None
    assert [names for _, _, names in os.walk(root)] == [[], []]


@asynchronous
async def test_a_cancelled_commit_ends_first(
    driver: LocalDriver, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it has begun it goes on to its end: the object is there, and the abort that follows does
    nothing."""
    upload = await driver.create("x", 1)
    await upload.write(0, memoryview(b"1"))
    inside, go_on = _blocking(monkeypatch, "fsync")
    commit = asyncio.ensure_future(upload.commit())
    await asyncio.to_thread(inside.wait, 10)
    commit.cancel()
    await asyncio.sleep(0.01)
    assert not commit.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await commit
    await upload.abort()
    assert await driver.get("x") == b"1"
