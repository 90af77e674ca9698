"""Test that objects whose put or commit returned survive a power cut, whole."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.disks import Disk, needed, new_disk, run

from holdfast.drivers.local.driver import LocalDriver


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Mount an ext4 of 64 MiB."""
    with new_disk("ext4", tmp_path).mounted() as disk:
        yield disk


CONTENT = {"small": b"content" * 100, "large": random.Random(1).randbytes((3 << 20) + 5)}


async def put(driver: LocalDriver, key: str, content: bytes) -> None:
    """Put an object of any size."""
    await driver.put(key, content)


async def exclusive(driver: LocalDriver, key: str, content: bytes) -> None:
    """Put an object exclusively."""
    await driver.put(key, content, exclusive=True)


async def upload(driver: LocalDriver, key: str, content: bytes) -> None:
    """Upload an object in parallel parts."""
    new = await driver.create(key, len(content))
    view = memoryview(content)
    await asyncio.gather(
        *(
            new.write(start, view[start : start + (1 << 20)])
            for start in range(0, len(content), 1 << 20)
        )
    )
    await new.commit()


async def shorter(driver: LocalDriver, key: str, content: bytes) -> None:
    """Upload an object that ends before its declared size."""
    new = await driver.create(key, 2 * len(content))
    await new.write(0, memoryview(content))
    await new.commit(len(content))


def write_unsynced(disk: Disk) -> None:
    """Write a file that is not synced."""
    (disk.folder / "unsynced").write_bytes(b"x" * 100_000)


def power_cut_lost_something(disk: Disk) -> bool:
    """Return whether the file is gone or empty."""
    path = disk.folder / "unsynced"
    return not path.exists() or path.stat().st_size == 0


@asynccontextmanager
async def opened(folder: Path, direct: str = "auto") -> AsyncIterator[LocalDriver]:
    """Open a driver, which is closed even if the file system is gone."""
    driver = LocalDriver(folder, direct=direct)
    try:
        yield driver
    finally:
        await driver.close()


@pytest.mark.parametrize("size", CONTENT)
@pytest.mark.parametrize("store", [put, exclusive, upload, shorter])
@pytest.mark.parametrize("direct", ["auto", "off"])
def test_what_was_acknowledged_survives(
    disk: Disk, store: Callable[[LocalDriver, str, bytes], Awaitable[None]], size: str, direct: str
) -> None:
    """An object in a new folder of a new root is there after the cut, whole."""
    root = disk.folder / "new" / "root"

    async def before() -> None:
        async with opened(root, direct) as driver:
            await store(driver, "a/b/x", CONTENT[size])
            write_unsynced(disk)
            disk.cut_power()

    async def after() -> None:
        async with opened(root, direct) as driver:
            assert await driver.get("a/b/x") == CONTENT[size]
            assert [info.key async for info in driver.list()] == ["a/b/x"]

    asyncio.run(before())
    disk.unmount()
    disk.mount()
    asyncio.run(after())
    assert os.listdir(root / "a" / "b") == ["x"]
    assert power_cut_lost_something(disk)


def test_a_disk_is_mounted_afresh_though_a_namespace_keeps_the_old_mount(disk: Disk) -> None:
    """A process whose mount namespace was made before the cut does not keep the power off."""
    needed("unshare", "nsenter")
    (disk.folder / "x").write_bytes(b"content")
    run("sync", "-f", disk.folder)
    command = ["unshare", "--mount", "sh", "-c", "echo ready && exec sleep 60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            disk.cut_power()
            disk.restart()
            assert (disk.folder / "x").read_bytes() == b"content"
        finally:
            process.kill()


def test_what_was_deleted_stays_deleted(disk: Disk) -> None:
    """A deletion that returned is not undone by the cut."""

    async def before() -> None:
        async with opened(disk.folder) as driver:
            for key in ("manifest", "data/0", "data/1"):
                await driver.put(key, b"content")
            await driver.delete("manifest")
            await driver.delete_all("data")
            write_unsynced(disk)
            disk.cut_power()

    asyncio.run(before())
    disk.unmount()
    disk.mount()
    assert power_cut_lost_something(disk)
    assert set(os.listdir(disk.folder)) <= {"lost+found", "unsynced"}
