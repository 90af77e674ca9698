"""The local driver where other hosts see the same files: locks that want a writer, names that a
client hides open files behind, attributes that are cached, and file systems that nobody has heard
of."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.drivers.local.driver import LocalDriver
from holdfast.drivers.local.mounts import is_shared
from holdfast.drivers.local.tree import Tree
from holdfast.errors import DamagedError, NotFoundError, UriError

SILLY = ".nfs" + "0123456789abcdef" + "00000a1f"
"""What the NFS client of Linux calls a file that was removed while it is open."""
HIDDEN = ".fuse_hidden" + "00000012" + "00000003"
"""What libfuse calls it."""
DEAD = f".0.safetensors.{'0' * 16}.tmp"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with nothing in it."""
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


@pytest.fixture
def driver(root: Path, no_leaks: None) -> Iterator[LocalDriver]:
    """As on NFS."""
    driver = LocalDriver(root, fs_type=lambda path: "nfs4")
    yield driver
    asyncio.run(driver.close())


def run(work: Any) -> Any:
    """For at most a minute."""
    return asyncio.run(asyncio.wait_for(work, 60))


def left_by_a_dead_save(root: Path, *, age_s: float) -> Path:
    """A temporary file that was last written to so long ago."""
    (root / "data").mkdir()
    path = root / "data" / DEAD
    path.write_bytes(b"half")
    then_s = path.stat().st_mtime - age_s
    os.utime(path, (then_s, then_s))
    return path


def locked_like_nfs(
    fd: int, operation: int, real: Callable[[int, int], None] = fcntl.flock
) -> None:
    """flock(2), NFS details: an exclusive lock becomes a byte-range lock, which needs a descriptor
    open for writing."""
    mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    if operation & fcntl.LOCK_EX and mode == os.O_RDONLY:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    real(fd, operation)


# Locks


def test_a_leftover_is_swept_where_a_lock_needs_a_writer(
    driver: LocalDriver, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS since Linux 2.6.12: what a dead save has left is removed."""
    monkeypatch.setattr(fcntl, "flock", locked_like_nfs)
    dead = left_by_a_dead_save(root, age_s=7200)
    run(driver.sweep("data"))
    assert not dead.exists()


def test_a_live_upload_is_not_swept_where_a_lock_needs_a_writer(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock is seen on its own host, however long it has been quiet."""
    monkeypatch.setattr(fcntl, "flock", locked_like_nfs)

    async def work() -> None:
        writer, sweeper = (LocalDriver(root, fs_type=lambda path: "nfs4") for _ in range(2))
        upload = await writer.create("data/x", 4)
        await upload.write(0, memoryview(b"live"))
        (temporary,) = (root / "data").iterdir()
        os.utime(temporary, (0, 0))
        await sweeper.sweep("data")
        await upload.commit()
        assert await sweeper.get("data/x") == b"live"
        await writer.close()
        await sweeper.close()

    run(work())


@pytest.mark.parametrize(
    "code", [errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS], ids=errno.errorcode.get
)
@pytest.mark.parametrize(("age_s", "stays"), [(600, True), (7200, False)])
def test_without_locks_a_leftover_goes_when_it_was_quiet_for_an_hour(
    driver: LocalDriver,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    age_s: float,
    stays: bool,
) -> None:
    """Mounted with nolock, or without a lock daemon: saves work, sweeps raise nothing, and the
    clock decides."""

    def refused(fd: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refused)
    left = left_by_a_dead_save(root, age_s=age_s)
    run(driver.put("data/x", b"new"))
    run(driver.sweep("data"))
    assert left.exists() is stays
    assert run(driver.get("data/x")) == b"new"


def test_without_locks_and_other_hosts_nothing_is_judged_by_a_clock(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local file system that knows no locks: whether an upload lives cannot be told, so it stays."""

    def refused(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)
    left = left_by_a_dead_save(root, age_s=7200)

    async def work() -> None:
        driver = LocalDriver(root, fs_type=lambda path: "ext4")
        await driver.sweep("data")
        await driver.close()

    run(work())
    assert left.exists()


# Files that a client hides because somebody has them open


@pytest.mark.parametrize("name", [SILLY, HIDDEN])
def test_a_removed_file_that_is_still_open_is_no_object(
    driver: LocalDriver, root: Path, name: str
) -> None:
    """It is not listed, and no key names it."""

    async def work() -> None:
        await driver.put("data/x", b"1")
        (root / "data" / name).write_bytes(b"gone")
        assert [info.key async for info in driver.list()] == ["data/x"]
        for call in (driver.get(f"data/{name}"), driver.put(f"data/{name}", b"")):
            with pytest.raises(UriError, match="names of this form"):
                await call

    run(work())


@pytest.mark.parametrize("name", [SILLY, HIDDEN])
def test_a_removed_file_that_is_still_open_does_not_stop_a_deletion(
    driver: LocalDriver, root: Path, name: str
) -> None:
    """The rest goes, and no error is raised; the file stays for whoever reads it, and its folders
    with it, until it is closed."""

    async def work() -> None:
        for key in ("data/a/x", "data/a/b/y", "data/c/z"):
            await driver.put(key, b"1")
        hidden = root / "data/a" / name
        hidden.write_bytes(b"still read")
        await driver.delete_all("data")
        assert [path for path in root.rglob("*") if path.is_file()] == [hidden]
        assert not (root / "data/c").exists()
        await driver.sweep("data")
        assert hidden.read_bytes() == b"still read"
        hidden.unlink()
        await driver.delete_all("data")
        assert not (root / "data").exists()

    run(work())


def test_a_folder_that_fills_while_it_is_deleted_is_an_error(
    driver: LocalDriver, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not everything is taken for a hidden file: what somebody stores meanwhile makes the deletion
    fail, and stays."""
    rmdir = os.rmdir

    def late(name: str, *, dir_fd: int) -> None:
        (root / "data" / "late").write_bytes(b"")
        rmdir(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", late)
    run(driver.put("data/x", b"1"))
    with pytest.raises(OSError, match="ENOTEMPTY"):
        run(driver.delete_all("data"))
    assert (root / "data" / "late").exists()


# Attributes that are cached


class StaleAttributes:
    """``fstat`` as a client with cached attributes answers it: for ever what it said first. A name
    is looked up anew."""

    def __init__(self) -> None:
        self._fstat = os.fstat
        self._said: dict[tuple[int, int], os.stat_result] = {}
        self._kept: list[int] = []
        self._lock = threading.Lock()

    def fstat(self, fd: int) -> os.stat_result:
        """Stands in for ``os.fstat``."""
        found = self._fstat(fd)
        file = (found.st_dev, found.st_ino)
        with self._lock:
            if file not in self._said:
                self._said[file] = found
                self._kept.append(os.dup(fd))  # so that no other file gets its inode
            return self._said[file]

    def close(self) -> None:
        """Let go of the files."""
        for fd in self._kept:
            os.close(fd)


@pytest.fixture
def stale(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[StaleAttributes]:
    """Attributes of open files never change, from when :meth:`fstat` is put in its place."""
    attributes = StaleAttributes()
    yield attributes
    monkeypatch.undo()
    attributes.close()


async def read(driver: LocalDriver, key: str, nbytes: int) -> bytes:
    """The first bytes of an object."""
    into = bytearray(nbytes)
    await driver.read(key, 0, memoryview(into))
    return bytes(into)


def replaced(path: Path) -> None:
    """By another file, as another host would: the old one is kept, so that its inode is not used
    again."""
    os.link(path, path.with_name("kept"))
    path.with_name("new").write_bytes(b"new")
    os.rename(path.with_name("new"), path)


@pytest.mark.parametrize("kind", ["nfs4", "fuse.juicefs", "cvfs"])
def test_an_object_that_another_host_replaces_is_not_read_from_an_old_descriptor(
    root: Path, kind: str, stale: StaleAttributes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the descriptor's attributes, which are cached, say that its file still has a name."""

    async def work() -> None:
        driver = LocalDriver(root, fs_type=lambda path: kind)
        await driver.put("data/x", b"old")
        monkeypatch.setattr(os, "fstat", stale.fstat)
        assert await read(driver, "data/x", 3) == b"old"
        replaced(root / "data/x")
        assert await read(driver, "data/x", 3) == b"new"
        await driver.close()

    run(work())


def test_an_object_that_another_host_deletes_is_gone(
    driver: LocalDriver, root: Path, stale: StaleAttributes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder too."""

    async def work() -> None:
        monkeypatch.setattr(os, "fstat", stale.fstat)
        for gone in ("data/a/x", "data/a", "data"):
            await driver.put("data/a/x", b"old")
            assert await read(driver, "data/a/x", 3) == b"old"
            removed = root / gone
            shutil.rmtree(removed) if removed.is_dir() else removed.unlink()
            with pytest.raises(NotFoundError):
                await read(driver, "data/a/x", 3)

    run(work())


def test_an_object_that_another_host_shortens_is_opened_anew(
    driver: LocalDriver, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may go on reading what it had when the file was opened; who opens it again learns
    how long it is."""
    opened = []
    open_object = Tree.open_object
    monkeypatch.setattr(
        Tree, "open_object", lambda tree, key: opened.append(key) or open_object(tree, key)
    )

    async def work() -> None:
        await driver.put("x", b"old contents")
        await read(driver, "x", 12)
        await read(driver, "x", 12)
        assert opened == ["x"], "an object that stays as it is, is opened once"
        os.truncate(root / "x", 3)
        with pytest.raises(DamagedError, match="ends at byte 3"):
            await read(driver, "x", 12)
        assert opened == ["x", "x"]

    run(work())


# File systems


@pytest.mark.parametrize(
    "kind",
    [
        "nfs",
        "nfs4",
        "cvfs",
        "scoutfs",
        "acfs",
        "fuse",
        "fuse.rclone",
        "gpfs",
        "autofs",
        "newfs",
        "9p",
        "",
    ],
)
def test_a_file_system_that_is_not_known_to_be_local_counts_as_shared(kind: str) -> None:
    """Also one that nobody has heard of: of two errors, the one that sweeps the live upload of
    another host is worse."""
    assert is_shared(kind)


@pytest.mark.parametrize(
    "kind",
    ["ext4", "ext3", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "f2fs", "bcachefs", "fuseblk"],
)
def test_a_file_system_of_one_host_is_not_shared(kind: str) -> None:
    """By its type; so leftovers there go at once."""
    assert not is_shared(kind)


def test_a_young_upload_on_an_unknown_file_system_is_not_swept(root: Path) -> None:
    """It may be another host's, whose locks do not reach this one."""
    left = left_by_a_dead_save(root, age_s=600)

    async def work() -> None:
        driver = LocalDriver(root, fs_type=lambda path: "cvfs")
        await driver.sweep("data")
        await driver.close()

    run(work())
    assert left.exists()


# Folders


@pytest.mark.parametrize("believed_s", [0.0, 0.2])
def test_a_folder_that_another_host_has_removed_is_made_again(
    driver: LocalDriver, root: Path, monkeypatch: pytest.MonkeyPatch, believed_s: float
) -> None:
    """As on FUSE: the client opens from its cache a folder that is gone. It asks the server when a
    folder is to be made, or only after some time."""
    run(driver.put("data/attempt/a", b"first"))
    gone = os.open(root / "data/attempt", os.O_RDONLY)
    shutil.rmtree(root / "data/attempt")
    until_s = time.monotonic() + believed_s
    cached = {"attempt"}
    really_open, really_mkdir = os.open, os.mkdir

    def open_from_cache(name: Any, *options: Any, **named: Any) -> int:
        return os.dup(gone) if name in cached else really_open(name, *options, **named)

    def mkdir(name: Any, *options: Any, **named: Any) -> None:
        if name in cached and time.monotonic() < until_s:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
        cached.discard(name)
        really_mkdir(name, *options, **named)

    monkeypatch.setattr(os, "open", open_from_cache)
    monkeypatch.setattr(os, "mkdir", mkdir)
    run(driver.put("data/attempt/b", b"second"))
    os.close(gone)
    assert (root / "data/attempt/b").read_bytes() == b"second"
