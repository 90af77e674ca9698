"""The local driver: past the page cache where that is possible, through it where it is not."""

from __future__ import annotations

import asyncio
import fcntl
import functools
import mmap
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.drivers.contract import AtMost
from holdfast.drivers.local.driver import LocalDriver
from holdfast.errors import StorageDownError, StorageError


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


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Every pwrite: "direct" or "cached", offset, length."""
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
    """An aligned part is one direct write from the caller's memory; of another, all but head and
    tail is direct, too."""
    _needs_direct(root)
    await _write(driver, start, stop, offset)
    assert writes == expected


@pytest.mark.parametrize("direct", ["auto", "on", "off"])
@asynchronous
async def test_direct_access_is_optional_unless_demanded(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    writes: list[tuple[str, int, int]],
    direct: str,
    no_leaks: None,
) -> None:
    """A file system that refuses O_DIRECT is served through the page cache, but for ``direct=on``:
    that is an error."""
    real = os.open

    def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    driver = LocalDriver(root, direct=direct)
    if direct == "on":
        with pytest.raises(StorageError, match=r"create failed.*EINVAL"):
            await driver.create("x", MiB)
        assert os.listdir(root) == []
    else:
        await _write(driver, 0, MiB)
        assert {kind for kind, _, _ in writes} == {"cached"}
        into = bytearray(MiB)
        await driver.read("x", 0, memoryview(into))
        assert bytes(into) == bytes(MiB)
    await driver.close()


@pytest.mark.parametrize("direct", ["auto", "on"])
@asynchronous
async def test_direct_access_may_be_refused_late(
    root: Path, monkeypatch: pytest.MonkeyPatch, direct: str, no_leaks: None
) -> None:
    """Some file systems take the flag and refuse the call: then, too, the page cache serves."""
    _needs_direct(root)
    for name in ("pwrite", "preadv"):
        monkeypatch.setattr(os, name, functools.partial(_refuse_direct, getattr(os, name)))
    driver = LocalDriver(root, direct=direct)
    content = memoryview(mmap.mmap(-1, MiB))
    content[:3] = b"abc"
    upload = await driver.create("x", MiB)
    if direct == "on":
        with pytest.raises(StorageError, match="EINVAL"):
            await upload.write(0, content)
    else:
        await upload.write(0, content)
        await upload.commit()
        into = memoryview(mmap.mmap(-1, MiB))
        await driver.read("x", 0, into)
        assert into == content
    await driver.close()


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
    """A call that does less than it was asked for is followed by another, direct or not."""
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
    """Direct access knows only whole blocks: the one that was cut is written again, directly, and
    the bytes are right."""
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
    """It had the size that was declared from its beginning, also where direct writes then turn out
    to be refused; none of that is left when it is fsynced, nor on the disk."""
    _needs_direct(root)
    if refused:
        monkeypatch.setattr(os, "pwrite", functools.partial(_refuse_direct, os.pwrite))
    content = memoryview(mmap.mmap(-1, MiB))
    content[:] = os.urandom(MiB)
    upload = await driver.create("x", declared)
    await upload.write(0, content)
    await upload.write(MiB, content[: MiB // 2 + 5])
    synced: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_size), fsync(fd)))
    await upload.commit(MiB + MiB // 2 + 5)
    assert synced[0] == (root / "x").stat().st_size == MiB + MiB // 2 + 5
    assert (root / "x").stat().st_blocks * 512 <= 2 * MiB
    assert await driver.get("x") == bytes(content) + content[: MiB // 2 + 5]


@asynchronous
async def test_a_file_for_direct_writes_has_its_size_at_once(
    driver: LocalDriver, root: Path
) -> None:
    """Direct writes that extend a file would wait for each other."""
    _needs_direct(root)
    upload = await driver.create("x", MiB + 5)
    assert [entry.stat().st_size for entry in os.scandir(root)] == [MiB + 5]
    await upload.abort()


def _pieces(fd: int, most: int) -> int:
    """How much a call may do: what is direct, in whole blocks."""
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
