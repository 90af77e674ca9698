"""Test the local driver's open files, cancelled calls and direct access."""

from __future__ import annotations

import asyncio
import fcntl
import functools
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.drivers import asynchronous, keys

from holdfast.drivers.contract import AtMost
from holdfast.drivers.local.driver import LocalDriver
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


def open_below(folder: Path) -> list[str]:
    """Return the paths that this process has open below a folder."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sorted(
        os.readlink(link)
        for link in links
        if os.path.lexists(link) and str(folder) in os.readlink(link)
    )


# Open files


@asynchronous
async def test_only_so_many_files_stay_open(driver: LocalDriver, root: Path) -> None:
    """The least recently used files are closed, but never one in use."""
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
    """Files that another process has deleted are closed when an upload begins, to free space."""
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
    """The driver closes the files of objects that it deletes or replaces."""
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
    """An abort removes the temporary file at once; the running write still ends."""
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
    """Make a call of ``os`` wait. Return the events that it has begun, and that it may go on."""
    inside, go_on = threading.Event(), threading.Event()
    real = getattr(os, name)

    def wait(*args: Any, **kwargs: Any) -> Any:
        inside.set()
        assert go_on.wait(30)
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, wait)
    return inside, go_on


# Races between processes


@asynchronous
async def test_exclusive_without_hard_links(
    driver: LocalDriver, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exclusive put has one winner even where the file system has no hard links."""

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
    """The file of a cancelled create is removed, although its thread went on and made it."""
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


# Direct access


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Record every pwrite: "direct" or "cached", offset, length."""
    seen: list[tuple[str, int, int]] = []
    pwrite = os.pwrite

    def record(fd: int, data: Any, offset: int) -> int:
        direct = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        seen.append(("direct" if direct else "cached", offset, memoryview(data).nbytes))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", record)
    return seen


async def _write(driver: LocalDriver, start: int, stop: int, offset: int = 0) -> None:
    content = memoryview(mmap.mmap(-1, stop + 8192))
    upload = await driver.create("x", stop)
    await upload.write(0, content[:start])
    await upload.write(start, content[start + offset : stop + offset])
    await upload.commit()


def _needs_direct(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        os.close(os.open(folder / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"O_DIRECT is refused in {folder}: {error.strerror}")
    (folder / "probe").unlink()


MiB = 1 << 20


@pytest.mark.parametrize(
    ("start", "stop", "offset", "expected"),
    [
        (0, 8 * MiB, 0, [("direct", 0, 8 * MiB)]),
        (0, 8 * MiB + 5, 0, [("direct", 0, 8 * MiB), ("cached", 8 * MiB, 5)]),
        (4096, 4096 + MiB, 0, [("cached", 0, 4096), ("direct", 4096, MiB)]),
        (5, MiB, 0, [("cached", 0, 5), ("cached", 5, 4091), ("direct", 4096, MiB - 4096)]),
        (0, 2 * MiB, 1, [("direct", 0, MiB), ("direct", MiB, MiB)]),
        (0, 60_000, 0, [("cached", 0, 60_000)]),
    ],
)
@asynchronous
async def test_only_odd_ends_go_through_the_page_cache(
    driver: LocalDriver,
    root: Path,
    writes: list[tuple[str, int, int]],
    start: int,
    stop: int,
    offset: int,
    expected: list[tuple[str, int, int]],
) -> None:
    """An aligned part is one direct write; of any other part, all but head and tail is direct."""
    _needs_direct(root)
    await _write(driver, start, stop, offset)
    assert writes == expected


@pytest.mark.parametrize("refused", ["open", "call"])
@pytest.mark.parametrize("direct", ["auto", "on", "off"])
@asynchronous
async def test_direct_access_is_optional_unless_demanded(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    direct: str,
    refused: str,
    no_leaks: None,
) -> None:
    """Where O_DIRECT is refused, even as late as in a call, the page cache is used.

    With ``direct=on``, a refusal is an error.
    """
    _needs_direct(root)
    if refused == "open":
        monkeypatch.setattr(os, "open", functools.partial(_refuse_flag, os.open))
    else:
        for name in ("pwrite", "preadv"):
            monkeypatch.setattr(os, name, functools.partial(_refuse_direct, getattr(os, name)))
    driver = LocalDriver(root, direct=direct)
    content = memoryview(mmap.mmap(-1, MiB))
    content[:3] = b"abc"
    if direct == "on":
        with pytest.raises(StorageError, match="EINVAL"):
            await (await driver.create("x", MiB)).write(0, content)
    else:
        upload = await driver.create("x", MiB)
        await upload.write(0, content)
        await upload.commit()
        into = memoryview(mmap.mmap(-1, MiB))
        await driver.read("x", 0, into)
        assert into == content
    await driver.close()
    assert os.listdir(root) == ([] if direct == "on" else ["x"])


def _refuse_flag(real: Callable[..., int], path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
    if flags & os.O_DIRECT:
        raise OSError(22, "Invalid argument")
    return real(path, flags, *args, **kwargs)


def _refuse_direct(real: Callable[..., int], fd: int, data: Any, offset: int) -> int:
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
        raise OSError(22, "Invalid argument")
    return real(fd, data, offset)


@pytest.mark.parametrize("most", [3000, 4096, 5000, 70_000])
@pytest.mark.parametrize("offset", [0, 1])
@asynchronous
async def test_short_writes_and_reads_are_continued(
    driver: LocalDriver, monkeypatch: pytest.MonkeyPatch, most: int, offset: int
) -> None:
    """A short read or write is continued, direct or not."""
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(
        os, "pwrite", lambda fd, data, at: pwrite(fd, memoryview(data)[: _pieces(fd, most)], at)
    )
    content = memoryview(mmap.mmap(-1, 400_000))[offset : offset + 300_001]
    content[:] = os.urandom(300_001)
    upload = await driver.create("x", 300_001)
    await upload.write(0, content)
    await upload.commit()
    assert await driver.get("x") == content
    monkeypatch.setattr(
        os,
        "preadv",
        lambda fd, bufs, at: preadv(fd, [memoryview(bufs[0])[: _pieces(fd, most)]], at),
    )
    into = memoryview(mmap.mmap(-1, 400_000))[offset : offset + 300_001]
    await driver.read("x", 0, into)
    assert into == content


@asynchronous
async def test_a_direct_write_that_stops_within_a_block_goes_on_at_its_start(
    root: Path, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    """After a short direct write, the block that was cut is written again as a whole."""
    _needs_direct(root)
    pwrite = os.pwrite

    def cut(fd: int, data: Any, at: int) -> int:
        count = pwrite(fd, memoryview(data)[:131_072], at)
        return count - 100 if count == 131_072 else count

    monkeypatch.setattr(os, "pwrite", cut)
    content = memoryview(mmap.mmap(-1, MiB))
    content[:] = os.urandom(MiB)
    driver = LocalDriver(root, direct="on")
    upload = await driver.create("x", MiB)
    await upload.write(0, content)
    monkeypatch.undo()
    await upload.commit()
    assert await driver.get("x") == content
    await driver.close()


@pytest.mark.parametrize("declared", [AtMost(1 << 40), 64 * MiB], ids=["bound", "size"])
@pytest.mark.parametrize("refused", [False, True])
@asynchronous
async def test_a_file_that_ends_early_is_cut_before_it_is_durable(
    driver: LocalDriver, root: Path, monkeypatch: pytest.MonkeyPatch, refused: bool, declared: int
) -> None:
    """A file has its declared size from the beginning, and its final size when it is fsynced.

    Direct writes that extend a file would wait for each other. No space stays reserved, even where
    direct writes turn out to be refused.
    """
    _needs_direct(root)
    if refused:
        monkeypatch.setattr(os, "pwrite", functools.partial(_refuse_direct, os.pwrite))
    content = memoryview(mmap.mmap(-1, MiB))
    content[:] = os.urandom(MiB)
    upload = await driver.create("x", declared)
    assert [entry.stat().st_size for entry in os.scandir(root)] == [declared]
    await upload.write(0, content)
    await upload.write(MiB, content[: MiB // 2 + 5])
    synced: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_size), fsync(fd)))
    await upload.commit(MiB + MiB // 2 + 5)
    assert synced[0] == (root / "x").stat().st_size == MiB + MiB // 2 + 5
    assert (root / "x").stat().st_blocks * 512 <= 2 * MiB
    assert await driver.get("x") == bytes(content) + content[: MiB // 2 + 5]


def _pieces(fd: int, most: int) -> int:
    """Return how many bytes a call may transfer; whole blocks if it is direct."""
    return max(most, 4096) // 4096 * 4096 if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT else most


@asynchronous
async def test_a_device_that_takes_nothing_does_not_hang(
    driver: LocalDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that makes no progress ends with an error."""
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: 0)
    with pytest.raises(StorageDownError, match="accepts no more bytes"):
        await driver.put("x", bytes(100_000))
    assert await keys(driver) == []
