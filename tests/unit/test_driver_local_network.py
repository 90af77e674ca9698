"""The local driver on network file systems, where other hosts see the same files.

System calls are replaced by ones that answer as a client of NFS or FUSE would: locks that need a
writer, cached attributes, and replies that are lost, so that a request is repeated and refused.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from support.drivers import asynchronous, keys, stored

from holdfast.drivers.local.driver import LocalDriver
from holdfast.drivers.local.files import create_file
from holdfast.drivers.local.tree import Tree
from holdfast.drivers.lustre.files import Facts, Striper
from holdfast.drivers.mounts import Mount
from holdfast.errors import DamagedError, ExistsError, NotFoundError, StorageDownError, UriError

SILLY = ".nfs" + "0123456789abcdef" + "00000a1f"
"""Name that Linux's NFS client gives to a file that was removed while it is open."""
HIDDEN = ".fuse_hidden" + "00000012" + "00000003"
"""Name that libfuse gives to such a file."""
DEAD = f".0.safetensors.{'0' * 16}.tmp"
REPLIES = dict.fromkeys(("link", "mkdir"), errno.EEXIST)
REPLIES |= dict.fromkeys(("rename", "unlink", "rmdir"), errno.ENOENT)
"""Error that refuses the second request of each call."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder that does not exist yet."""
    return tmp_path / "above/root"


@pytest.fixture
def driver(root: Path, no_leaks: None) -> Iterator[LocalDriver]:
    """Yield a driver on NFS."""
    driver = LocalDriver(root, mount_of=lambda path: Mount("nfs4"))
    yield driver
    asyncio.run(driver.close())


def files(root: Path) -> list[str]:
    """Return all files, including temporary ones."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def left_by_a_dead_save(root: Path, *, age_s: float) -> Path:
    """Create a temporary file that was last written ``age_s`` seconds ago."""
    (root / "data").mkdir(parents=True, exist_ok=True)
    path = root / "data" / DEAD
    path.write_bytes(b"half")
    then_s = path.stat().st_mtime - age_s
    os.utime(path, (then_s, then_s))
    return path


def failing(code: int) -> Callable[..., NoReturn]:
    """Return a system call that always fails."""

    def call(*args: Any, **kwargs: Any) -> NoReturn:
        raise OSError(code, os.strerror(code))

    return call


def locked_like_nfs(
    fd: int, operation: int, real: Callable[[int, int], None] = fcntl.flock
) -> None:
    """Lock as NFS does since Linux 2.6.12: an exclusive lock needs a descriptor open for writing."""
    mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    if operation & fcntl.LOCK_EX and mode == os.O_RDONLY:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    real(fd, operation)


@asynchronous
async def test_a_live_upload_is_not_swept_where_a_lock_needs_a_writer(
    root: Path, driver: LocalDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep removes the file of a dead save, but spares a live upload however old it looks."""
    monkeypatch.setattr(fcntl, "flock", locked_like_nfs)
    writer = LocalDriver(root, mount_of=lambda path: Mount("nfs4"))
    upload = await writer.create("data/x", 4)
    await upload.write(0, memoryview(b"live"))
    (temporary,) = (root / "data").iterdir()
    os.utime(temporary, (0, 0))
    dead = left_by_a_dead_save(root, age_s=7200)
    await driver.sweep("data")
    assert not dead.exists()
    await upload.commit()
    assert await driver.get("data/x") == b"live"
    await writer.close()


@pytest.mark.parametrize(
    ("kind", "age_s", "code", "stays"),
    [
        ("nfs4", 600, 0, True),
        ("nfs4", 7200, 0, False),
        ("ext4", 0, 0, False),
        ("nfs4", 600, errno.ENOLCK, True),
        ("nfs4", 7200, errno.ENOLCK, False),
        ("nfs4", 7200, errno.EBADF, False),
        ("nfs4", 7200, errno.EOPNOTSUPP, False),
        ("nfs4", 7200, errno.ENOSYS, False),
        ("ext4", 7200, errno.ENOLCK, True),
    ],
)
@asynchronous
async def test_a_sweep_decides_by_lock_and_age(
    root: Path, monkeypatch: pytest.MonkeyPatch, kind: str, age_s: float, code: int, stays: bool
) -> None:
    """An unlocked file is dead: at once on local storage, after an hour where other hosts write.

    Without locks, the age alone decides where other hosts write, and nothing is removed elsewhere.
    """
    if code:
        monkeypatch.setattr(fcntl, "flock", failing(code))
    left = left_by_a_dead_save(root, age_s=age_s)
    driver = LocalDriver(root, mount_of=lambda path: Mount(kind))
    await driver.put("data/x", b"new")
    await driver.sweep("data")
    assert left.exists() is stays
    assert await driver.get("data/x") == b"new"
    await driver.close()


# Files that a client hides because somebody has them open


@pytest.mark.parametrize("name", [SILLY, HIDDEN])
@asynchronous
async def test_a_removed_file_that_is_still_open_is_no_object(
    driver: LocalDriver, root: Path, name: str
) -> None:
    """Such a file is not listed, and no key may name it."""
    await driver.put("data/x", b"1")
    (root / "data" / name).write_bytes(b"gone")
    assert await keys(driver) == ["data/x"]
    for call in (driver.get(f"data/{name}"), driver.put(f"data/{name}", b"")):
        with pytest.raises(UriError, match="names of this form"):
            await call


@pytest.mark.parametrize("name", [SILLY, HIDDEN])
@asynchronous
async def test_a_removed_file_that_is_still_open_does_not_stop_a_deletion(
    driver: LocalDriver, root: Path, name: str
) -> None:
    """Everything else is deleted without an error. The file and its folders stay until it is closed."""
    for key in ("data/a/x", "data/a/b/y", "data/c/z"):
        await driver.put(key, b"1")
    hidden = root / "data/a" / name
    hidden.write_bytes(b"still read")
    await driver.delete_all("data")
    assert files(root) == [f"data/a/{name}"]
    assert not (root / "data/c").exists()
    await driver.sweep("data")
    assert hidden.read_bytes() == b"still read"
    hidden.unlink()
    await driver.delete_all("data")
    assert not (root / "data").exists()


@asynchronous
async def test_a_folder_that_fills_while_it_is_deleted_is_an_error(
    driver: LocalDriver, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that somebody stores during a deletion stays, and the deletion fails."""
    rmdir = os.rmdir

    def late(name: str, *, dir_fd: int) -> None:
        (root / "data" / "late").write_bytes(b"")
        rmdir(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", late)
    await driver.put("data/x", b"1")
    with pytest.raises(OSError, match="ENOTEMPTY"):
        await driver.delete_all("data")
    assert (root / "data" / "late").exists()


# Attributes and names that are cached


class StaleAttributes:
    """An ``fstat`` with cached attributes: it always repeats its first answer about a file."""

    def __init__(self) -> None:
        self._fstat = os.fstat
        self._said: dict[tuple[int, int], os.stat_result] = {}
        self._kept: list[int] = []
        self._lock = threading.Lock()

    def fstat(self, fd: int) -> os.stat_result:
        """Replace ``os.fstat``."""
        found = self._fstat(fd)
        file = (found.st_dev, found.st_ino)
        with self._lock:
            if file not in self._said:
                self._said[file] = found
                self._kept.append(os.dup(fd))  # prevents the reuse of its inode
            return self._said[file]

    def close(self) -> None:
        for fd in self._kept:
            os.close(fd)


@pytest.fixture
def stale(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[StaleAttributes]:
    """Yield attributes that never change, once a test installs :meth:`StaleAttributes.fstat`."""
    attributes = StaleAttributes()
    yield attributes
    monkeypatch.undo()
    attributes.close()


async def read(driver: LocalDriver, key: str, nbytes: int) -> bytes:
    """Return the first bytes of an object."""
    into = bytearray(nbytes)
    await driver.read(key, 0, memoryview(into))
    return bytes(into)


@pytest.mark.parametrize("kind", ["nfs4", "fuse.juicefs", "cvfs"])
@asynchronous
async def test_an_object_that_another_host_deletes_is_gone(
    root: Path, kind: str, stale: StaleAttributes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read finds the object that replaced an open one, and nothing after a deletion."""
    driver = LocalDriver(root, mount_of=lambda path: Mount(kind))
    monkeypatch.setattr(os, "fstat", stale.fstat)
    for gone in ("data/a/x", "data/a", "data"):
        await driver.put("data/a/x", b"old")
        assert await read(driver, "data/a/x", 3) == b"old"
        os.link(root / "data/a/x", root / f"kept-{len(gone)}")  # its inode is not used again
        (root / "new").write_bytes(b"new")
        os.rename(root / "new", root / "data/a/x")
        assert await read(driver, "data/a/x", 3) == b"new"
        removed = root / gone
        shutil.rmtree(removed) if removed.is_dir() else removed.unlink()
        with pytest.raises(NotFoundError):
            await read(driver, "data/a/x", 3)
    await driver.close()


@asynchronous
async def test_an_object_that_another_host_shortens_is_opened_anew(
    driver: LocalDriver, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unchanged object is opened once; a shortened one again, so that its new size is seen."""
    opened = []
    open_object = Tree.open_object
    monkeypatch.setattr(
        Tree, "open_object", lambda tree, key: opened.append(key) or open_object(tree, key)
    )
    await driver.put("x", b"old contents")
    await read(driver, "x", 12)
    await read(driver, "x", 12)
    assert opened == ["x"]
    os.truncate(root / "x", 3)
    with pytest.raises(DamagedError, match="ends at byte 3"):
        await read(driver, "x", 12)
    assert opened == ["x", "x"]


@pytest.mark.parametrize("believed_s", [0.0, 0.2])
@asynchronous
async def test_a_folder_that_another_host_has_removed_is_made_again(
    driver: LocalDriver, root: Path, monkeypatch: pytest.MonkeyPatch, believed_s: float
) -> None:
    """A put succeeds although the client still opens, and even makes, a removed folder."""
    await driver.put("data/attempt/a", b"first")
    gone = os.open(root / "data/attempt", os.O_RDONLY)
    shutil.rmtree(root / "data/attempt")
    until_s = time.monotonic() + believed_s
    cached = {"attempt"}
    really_open, really_mkdir = os.open, os.mkdir

    def open_from_cache(name: Any, *options: Any, **named: Any) -> int:
        return os.dup(gone) if name in cached else really_open(name, *options, **named)

    def mkdir(name: Any, *options: Any, **named: Any) -> None:
        if name in cached and time.monotonic() < until_s:
            failing(errno.EEXIST)()
        cached.discard(name)
        really_mkdir(name, *options, **named)

    monkeypatch.setattr(os, "open", open_from_cache)
    monkeypatch.setattr(os, "mkdir", mkdir)
    await driver.put("data/attempt/b", b"second")
    os.close(gone)
    assert (root / "data/attempt/b").read_bytes() == b"second"


# Replies that are lost


class Lossy:
    """System calls whose first reply for each name is lost."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *calls: str) -> None:
        self.lost: list[tuple[str, str]] = []
        for call in calls:
            monkeypatch.setattr(os, call, self._losing(call, getattr(os, call)))

    def _losing(self, call: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def lossy(*args: Any, **kwargs: Any) -> None:
            real(*args, **kwargs)
            about = (call, str(args[1] if call in ("link", "rename") else args[0]))
            if about not in self.lost:
                self.lost.append(about)
                raise OSError(REPLIES[call], os.strerror(REPLIES[call]), about[1])

        return lossy


@pytest.mark.parametrize(
    "calls", [["link"], ["rename"], ["mkdir"], ["unlink"], list(REPLIES)], ids="+".join
)
@asynchronous
async def test_whatever_reply_is_lost_puts_and_deletions_succeed(
    driver: LocalDriver, root: Path, monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    """Puts, uploads and deletions succeed, and leave only the stored objects."""
    lossy = Lossy(monkeypatch, *calls)
    await driver.put("a/b/exclusive", b"1", exclusive=True)
    await driver.put("a/b/replaced", b"1")
    await driver.put("a/b/replaced", b"2")
    await stored(driver, "a/c/image", b"abc")
    assert files(root) == ["a/b/exclusive", "a/b/replaced", "a/c/image"]
    assert await driver.get("a/b/exclusive") == b"1"
    assert await driver.get("a/b/replaced") == b"2"
    assert await driver.get("a/c/image") == b"abc"
    await driver.delete("a/b/replaced")
    await driver.delete_all("a/c")
    await driver.delete_all("a/b/exclusive")
    await driver.sweep("a")
    assert not (root / "a").exists()
    assert {call for call, _ in lossy.lost} == set(calls)


@asynchronous
async def test_a_deletion_whose_reply_was_lost_is_durable(
    driver: LocalDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is synced although the removal seems to have found nothing."""
    synced: list[str] = []
    fsync = os.fsync
    for key in ("a/x", "a/y"):
        await driver.put(key, b"1")
    Lossy(monkeypatch, "unlink")
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")) or fsync(fd)
    )
    await driver.delete("a/x")
    await driver.delete_all("a/y")
    assert [Path(path).name for path in synced] == ["a", "a"]


@asynchronous
async def test_an_exclusive_put_that_somebody_else_has_won_fails(
    driver: LocalDriver, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EEXIST is believed if the file under the name is not ours."""
    real = os.link

    def late(*args: Any, **kwargs: Any) -> None:
        (root / "x").write_bytes(b"theirs")
        real(*args, **kwargs)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(ExistsError):
        await driver.put("x", b"ours", exclusive=True)
    assert await driver.get("x") == b"theirs"
    assert files(root) == ["x"]


@asynchronous
async def test_a_rename_that_finds_nothing_fails(
    driver: LocalDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENOENT is believed if the file under the name is not ours."""
    await driver.put("x", b"before")
    real = os.rename

    def late(source: str, *args: Any, **kwargs: Any) -> None:
        os.unlink(source, dir_fd=kwargs["src_dir_fd"])
        real(source, *args, **kwargs)

    monkeypatch.setattr(os, "rename", late)
    with pytest.raises(NotFoundError):
        await driver.put("x", b"ours")
    assert await driver.get("x") == b"before"


@pytest.mark.parametrize("striped", [False, True])
@asynchronous
async def test_a_creation_whose_reply_was_lost_is_done_under_another_name(
    root: Path, striped: bool, no_leaks: None
) -> None:
    """EEXIST for a name that nobody else draws leads to a second file, and the first is removed."""
    facts = Striper(
        str(root), stripe_count=None, stripe_nbytes=None, writers=None, facts=lambda: Facts(4)
    )
    real = facts.create if striped else create_file
    created: list[str] = []

    def create(folder: int, name: str, nbytes: int) -> int:
        fd = real(folder, name, nbytes)
        created.append(name)
        if len(created) > 1:
            return fd
        os.close(fd)
        return failing(errno.EEXIST)()

    driver = LocalDriver(root, create=create)
    await stored(driver, "x", bytes(2 << 20))
    await driver.close()
    assert len(set(created)) == 2
    assert files(root) == ["x"]


@asynchronous
async def test_a_temporary_file_that_a_sweep_took_before_it_was_locked_is_made_anew(
    root: Path, no_leaks: None
) -> None:
    """An upload whose file a sweep removed right after its creation is not lost."""
    taken: list[str] = []

    def create(folder: int, name: str, nbytes: int) -> int:
        fd = create_file(folder, name, nbytes)
        if len(taken) < 2:
            taken.append(name)
            os.unlink(name, dir_fd=folder)
        return fd

    driver = LocalDriver(root, create=create)
    await stored(driver, "x", b"abc")
    assert await driver.get("x") == b"abc"
    await driver.close()
    assert len(taken) == 2


@asynchronous
async def test_a_claim_without_hard_links_that_fails_leaves_nothing(
    driver: LocalDriver, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the final rename fails, the empty file that claimed the name is removed."""
    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    monkeypatch.setattr(os, "rename", failing(errno.EIO))
    with pytest.raises(StorageDownError):
        await driver.put("x", b"1", exclusive=True)
    assert files(root) == []


@asynchronous
async def test_a_folder_that_can_no_longer_be_asked_after_its_fsync_has_lost_its_names(
    driver: LocalDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put or delete fails if the file system has shut down, even if fsync of the folder succeeds."""
    await driver.put("x", b"before")
    synced: list[int] = []
    fsync, fstat = os.fsync, os.fstat

    def shut_down(fd: int) -> os.stat_result:
        return failing(errno.EIO)() if fd in synced else fstat(fd)

    def noted(fd: int) -> None:
        fsync(fd)
        synced.extend([fd] * Path(f"/proc/self/fd/{fd}").is_dir())

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "fstat", shut_down)
    with pytest.raises(StorageDownError):
        await driver.put("y", b"1")
    synced.clear()
    with pytest.raises(StorageDownError):
        await driver.delete("x")


@pytest.mark.parametrize("replaced", [False, True])
@asynchronous
async def test_a_put_whose_last_step_fails_takes_back_its_own_object_only(
    driver: LocalDriver, root: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    """The new object is removed, unless another process has replaced it meanwhile."""
    await driver.put("other", b"theirs")
    fsync = os.fsync

    def fail(fd: int) -> None:
        fsync(fd)
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            return
        if replaced:
            (root / "other").rename(root / "x")
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageDownError):
        await driver.put("x", b"ours", exclusive=True)
    assert files(root) == (["x"] if replaced else ["other"])
    if replaced:
        assert (root / "x").read_bytes() == b"theirs"
