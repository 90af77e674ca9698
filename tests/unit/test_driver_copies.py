"""Copies between files of one file system: blocks are shared where it can, and checked everywhere."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.disks import needed, new_disk, run
from support.drivers import asynchronous, stored

from holdfast.drivers.contract import CopyTraits, Driver
from holdfast.drivers.local.driver import LocalDriver
from holdfast.drivers.lustre.driver import LustreDriver
from holdfast.drivers.mounts import Mount, mount_of
from holdfast.errors import AccessError, StorageError

MIB = 1 << 20
CONTENT = os.urandom(160 * MIB)


@pytest.fixture(params=["xfs", "btrfs"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Yield the folder of a file system that can share blocks. It has no room for two objects."""
    with new_disk(request.param, tmp_path).mounted() as disk:
        yield disk.folder


def free(folder: Path) -> int:
    """Return the free space in bytes, once all is written."""
    os.sync()
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


async def compose(driver: Driver, source: Driver, start: int = 0) -> None:
    """Copy all of ``a`` from byte ``start``, and write the bytes before it."""
    upload = await driver.compose("b", len(CONTENT))
    try:
        await upload.write(0, memoryview(CONTENT)[:start])
        await upload.copy(start, source, "a", start, len(CONTENT) - start)
        await upload.commit()
    finally:
        await upload.abort()


@asynchronous
async def test_copies_share_space(disk: Path) -> None:
    """A copy of an object that is larger than the free space takes as much as was written of it,
    and stays whole once its source is deleted."""
    needed("filefrag")
    source, driver = LocalDriver(disk / "one"), LocalDriver(disk / "two")
    assert driver.traits.copies == CopyTraits(align_nbytes=4096, shares=True)
    await stored(source, "a", CONTENT)
    before = free(disk)
    assert before < len(CONTENT)
    await compose(driver, source, MIB)
    assert before - free(disk) < 4 * MIB
    found = re.findall(r"\bshared\b", run("filefrag", "-v", disk / "two/b"))
    assert found
    await source.delete("a")
    assert await driver.fetch("b", 0, len(CONTENT)) == CONTENT
    for used in (source, driver):
        await used.close()


@asynchronous
async def test_only_files_of_one_file_system_are_copied(disk: Path, tmp_path: Path) -> None:
    """Other mounts are not accepted. A mount below the root, which is found by the copy, fails it,
    and the same bytes are written."""
    driver, elsewhere = LocalDriver(disk), LocalDriver(tmp_path)
    assert not driver.copies_from(elsewhere)
    assert not elsewhere.copies_from(driver)
    wrong = LocalDriver(tmp_path, mount_of=lambda path: mount_of(str(disk)))
    await stored(wrong, "a", CONTENT)
    upload = await driver.compose("b", MIB)
    with pytest.raises(StorageError, match="copy failed"):
        await upload.copy(0, wrong, "a", 0, MIB)
    await upload.write(0, memoryview(CONTENT)[:MIB])
    await upload.commit()
    for used in (driver, elsewhere, wrong):
        await used.close()


@asynchronous
async def test_the_kernel_copies_what_it_cannot_share(tmp_path: Path) -> None:
    """On a file system without shared blocks, a copy in the kernel does the same."""
    xfs = Mount("xfs", device="0:1")
    source = LocalDriver(tmp_path, mount_of=lambda path: xfs)
    await stored(source, "a", CONTENT)
    await compose(source, source, 4096)
    assert await source.fetch("b", 0, len(CONTENT)) == CONTENT
    await source.close()


@asynchronous
async def test_a_source_behind_a_link_is_refused(tmp_path: Path) -> None:
    """Copies follow symbolic links as little as reads do."""
    (tmp_path / "secret").write_bytes(CONTENT)
    (tmp_path / "root").mkdir()
    (tmp_path / "root/a").symlink_to("../secret")
    driver = LocalDriver(tmp_path / "root", mount_of=lambda path: Mount("xfs", device="0:1"))
    with pytest.raises(AccessError):
        await compose(driver, driver)
    await driver.close()


def test_other_file_systems_copy_nothing(tmp_path: Path) -> None:
    """Ext4, Lustre and NFS before 4.2 do not claim to copy."""
    mounts = [
        Mount("ext4", device="1:1"),
        Mount("nfs4", device="0:3", options="rw,vers=4.1"),
        Mount(),
    ]
    for mount in mounts:
        driver = LocalDriver(tmp_path, mount_of=lambda path, mount=mount: mount)  # type: ignore[misc]
        assert driver.traits.copies is None
        assert not driver.copies_from(driver)
    assert LustreDriver(tmp_path).traits.copies is None
