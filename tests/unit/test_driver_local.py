"""The local driver: links, special files, mounts, open files, cancelled calls and direct access."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import functools
import mmap
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.drivers import asynchronous, keys, reads, stored

from holdfast.drivers.contract import AtMost
from holdfast.drivers.local.driver import LocalDriver
from holdfast.drivers.local.tree import Tree
from holdfast.drivers.mounts import can_clone, can_copy, is_shared, mount_of
from holdfast.errors import AccessError, ExistsError, NotFoundError, StorageDownError, StorageError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return the root of the driver, which does not exist yet."""
    return tmp_path / "above" / "root"


@pytest.fixture
def driver(root: Path, no_leaks: None) -> Iterator[LocalDriver]:
    """Return a driver on the root."""
    driver = LocalDriver(root)
    yield driver
    asyncio.run(driver.close())


# Links and other oddities of file systems


@pytest.fixture
def outside(root: Path, tmp_path: Path) -> Path:
    """Create a folder outside of the root, with links in the root to it and to a file in it."""
    outside = tmp_path / "outside"
    for folder in (outside, root / "real"):
        folder.mkdir(parents=True)
        (folder / "x").write_bytes(b"secret")
    (root / "link").symlink_to(outside)
    (root / "file").symlink_to(outside / "x")
    (root / "dangling").symlink_to(outside / "new")
    return outside


@pytest.mark.parametrize("key", ["link/x", "link/a/b", "file", "dangling", "link"])
@asynchronous
async def test_a_key_through_a_symbolic_link_is_refused(
    driver: LocalDriver, outside: Path, key: str
) -> None:
    """Every method raises AccessError and leaves the target of the link untouched."""
    changing = (driver.put(key, b"y"), driver.put(key, b"y", exclusive=True), driver.delete(key))
    for call in (*reads(driver, key), *changing, driver.create(key, 1), keys(driver, key)):
        with pytest.raises(AccessError, match=r"ELOOP.*Symbolic links are not followed") as caught:
            await call
        assert caught.value.key == key
    assert os.listdir(outside) == ["x"]
    assert (outside / "x").read_bytes() == b"secret"
    assert await keys(driver) == ["real/x"]


@asynchronous
async def test_deleting_all_removes_links_and_not_their_targets(
    driver: LocalDriver, outside: Path, root: Path
) -> None:
    """A deletion removes links below or at its prefix, and refuses a prefix behind a link."""
    (root / "real" / "link").symlink_to(outside)
    with pytest.raises(AccessError):
        await driver.delete_all("link/x")
    await driver.delete_all("real")
    await driver.delete_all("link")
    assert sorted(os.listdir(root)) == ["dangling", "file"]
    assert (outside / "x").read_bytes() == b"secret"


@asynchronous
async def test_a_folder_swapped_for_a_link_leads_nowhere(
    driver: LocalDriver, outside: Path, root: Path
) -> None:
    """An upload stays in its original folder, even if a link replaces that folder."""
    upload = await driver.create("real/new", 3)
    (root / "real").rename(root / "moved")
    (root / "real").symlink_to(outside)
    await upload.write(0, memoryview(b"new"))
    await upload.commit()
    assert os.listdir(outside) == ["x"]
    assert (root / "moved" / "new").read_bytes() == b"new"
    with pytest.raises(AccessError):
        await driver.get("real/x")


@asynchronous
async def test_a_pipe_that_comes_between_two_opens_is_not_waited_for(
    driver: LocalDriver, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read does not block on a pipe that replaces the file before its second, direct open."""
    await driver.put("o", bytes(1 << 20))
    plainly = Tree.open_object

    def then_a_pipe(tree: Tree, key: str) -> tuple[int, int]:
        opened = plainly(tree, key)
        os.unlink(root / "o")
        os.mkfifo(root / "o")
        return opened

    monkeypatch.setattr(Tree, "open_object", then_a_pipe)
    into = memoryview(bytearray(b"x" * (1 << 20)))
    await driver.read("o", 0, into)
    assert bytes(into) == bytes(1 << 20)


@asynchronous
async def test_the_root_may_be_reached_through_links(
    tmp_path: Path, root: Path, no_leaks: None
) -> None:
    """Links above the root are followed; only the content of the root is distrusted."""
    os.makedirs(root)
    os.symlink(root, tmp_path / "alias")
    driver = LocalDriver(tmp_path / "alias")
    await driver.put("a/x", b"1")
    assert (root / "a" / "x").read_bytes() == b"1"
    await driver.close()


@asynchronous
async def test_what_is_no_file_is_no_object(driver: LocalDriver, root: Path) -> None:
    """Special files and folders are neither listed nor read; reading a pipe does not block."""
    (root / "folder").mkdir(parents=True)
    os.mkfifo(root / "pipe")
    os.mknod(root / "socket", stat.S_IFSOCK | 0o600)
    special = ["pipe", "folder", "socket"]
    if os.geteuid() == 0:
        os.mknod(root / "device", stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero
        special.append("device")
    for key in special:
        for call in reads(driver, key):
            with pytest.raises(NotFoundError):
                await call
    assert await keys(driver) == []
    await driver.delete("folder")
    assert (root / "folder").is_dir()


@asynchronous
async def test_an_object_and_a_folder_cannot_share_a_name(driver: LocalDriver) -> None:
    """A put or an upload over a folder, or below an object, fails clearly."""
    await driver.put("a/x", b"")
    for key, code in (("a", "EISDIR"), ("a/x/y", "ENOTDIR")):
        for call in (driver.put(key, b""), driver.create(key, 1)):
            with pytest.raises(StorageError, match=code):
                await call
    assert await keys(driver) == ["a/x"]


@pytest.mark.parametrize(
    ("umask", "folder", "file"), [(0o022, 0o755, 0o644), (0o077, 0o700, 0o600)]
)
@asynchronous
async def test_permissions_are_what_the_umask_leaves(
    driver: LocalDriver, root: Path, umask: int, folder: int, file: int
) -> None:
    """The umask of the process applies to folders and files; no file is executable."""
    before = os.umask(umask)
    try:
        await driver.put("a/x", b"")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (root, root / "a", root / "a" / "x")]
    assert modes == [folder, folder, file]


@asynchronous
async def test_a_root_made_anew_is_found(driver: LocalDriver, root: Path) -> None:
    """A put recreates the root or a folder that somebody removed under a running driver."""
    await driver.put("a/x", b"1")
    shutil.rmtree(root / "a")
    await driver.put("a/x", b"2")
    shutil.rmtree(root)
    with pytest.raises(NotFoundError):
        await driver.get("a/x")
    await driver.put("a/x", b"3")
    assert (root / "a" / "x").read_bytes() == b"3"
    assert await driver.get("a/x") == b"3"


@asynchronous
@pytest.mark.parametrize(
    "code", [errno.ENOENT, errno.ESTALE], ids=["as FUSE says it", "as NFS says it"]
)
async def test_an_object_that_is_replaced_when_it_was_just_opened_is_read_anew(
    driver: LocalDriver, root: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read retries if its file is stale or missing because the object was just replaced."""
    await driver.put("x", b"old")
    status, forgotten = os.fstat, 1

    def forgetful(fd: int) -> os.stat_result:
        nonlocal forgotten
        found = status(fd)
        if found.st_ino == (root / "x").stat().st_ino and forgotten:
            forgotten -= 1
            (root / "new").write_bytes(b"new")
            os.rename(root / "new", root / "x")
            raise OSError(code, os.strerror(code))
        return found

    into = bytearray(3)
    await driver.read("x", 0, memoryview(into))  # from now on it is open
    monkeypatch.setattr(os, "fstat", forgetful)
    await driver.read("x", 0, memoryview(into))
    assert into == b"new"
    await driver.put("x", b"old")
    forgotten = 1
    assert await driver.get("x") == b"new"
    forgotten = 1000
    with pytest.raises(StorageError, match="forgotten") as raised:
        await driver.get("x")
    assert not isinstance(raised.value, NotFoundError)


@asynchronous
async def test_a_listing_looks_only_below_its_prefix(
    driver: LocalDriver, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing scans only folders below its prefix, so its cost ignores the rest."""
    for n in range(20):
        await driver.put(f"{n}/a/x", b"")
    scanned = []
    scandir = os.scandir
    monkeypatch.setattr(
        os, "scandir", lambda fd: scanned.append(os.readlink(f"/proc/self/fd/{fd}")) or scandir(fd)
    )
    assert await keys(driver, "7") == ["7/a/x"]
    assert scanned == [str(root / "7"), str(root / "7/a")]


@asynchronous
async def test_listings_at_once_do_not_disturb_each_other(driver: LocalDriver, root: Path) -> None:
    """Concurrent listings are independent, even in the root, which the driver keeps open."""
    os.makedirs(root)
    names = sorted(f"{n:04}" for n in range(2000))
    for name in names:
        os.close(os.open(root / name, os.O_CREAT | os.O_WRONLY))
    assert await asyncio.gather(*(keys(driver) for _ in range(8))) == [names] * 8


# Mounts

MOUNTINFO = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:26 / /scratch rw shared:5 - lustre mds@tcp:/scratch rw
31 22 0:27 / /home rw - nfs4 server:/home rw,vers=4.2
32 22 0:28 / /home/tmp rw - tmpfs tmpfs rw
33 22 0:29 / /with\\040space rw - fuse.sshfs host: rw
34 22 0:30 / /over rw - ext4 /dev/vdb rw
35 22 0:31 / /over rw - xfs /dev/vdc rw
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/", "ext4"),
        ("/scratch", "lustre"),
        ("/scratch/run/not/yet", "lustre"),
        ("/scratchy", "ext4"),
        ("/home/me", "nfs4"),
        ("/home/tmp/x", "tmpfs"),
        ("/with space/x", "fuse.sshfs"),
        ("/over/x", "xfs"),
    ],
)
def test_the_file_system_of_a_path_is_found(path: str, expected: str) -> None:
    """The deepest and latest mount above a path determines its file system."""
    assert mount_of(path, MOUNTINFO).fs_type == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [("/home/x", (True, False)), ("/over/x", (True, True)), ("/x", (False, False))],
)
def test_the_mount_tells_whether_ranges_are_copied(path: str, expected: tuple[bool, bool]) -> None:
    """XFS shares blocks; an NFS server copies from version 4.2 on; ext4 does neither."""
    mount = mount_of(path, MOUNTINFO)
    assert (can_copy(mount), can_clone(mount.fs_type)) == expected
    assert not can_copy(mount_of(path, MOUNTINFO.replace("4.2", "4.1").replace("xfs", "ext4")))


def test_only_known_local_file_systems_are_not_shared() -> None:
    """An unknown file system counts as shared: a wrong sweep costs an upload."""
    shared = ["", "nfs", "nfs4", "cvfs", "fuse", "fuse.rclone", "gpfs", "autofs", "newfs", "9p"]
    local = ["ext4", "ext3", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "f2fs", "fuseblk"]
    assert all(map(is_shared, shared))
    assert not any(map(is_shared, local))


# Open files


def open_below(folder: Path) -> set[str]:
    """Return the paths that this process has open below a folder."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    paths = {os.readlink(link) for link in links if os.path.lexists(link)}
    return {path for path in paths if str(folder) in path}


@asynchronous
async def test_only_so_many_files_stay_open(driver: LocalDriver, root: Path) -> None:
    """The least recently used files are closed, but never one in use."""
    into = memoryview(bytearray(1))
    for n in range(100):
        await driver.put(f"{n}", b"x")
    await asyncio.gather(*(driver.read(f"{n % 100}", 0, into) for n in range(300)))
    assert len(open_below(root)) <= 64 + 1
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
    assert open_below(root) == {str(root)}


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
    driver: LocalDriver, root: Path, writes: Any, start: int, stop: int, offset: int, expected: Any
) -> None:
    """An aligned part is one direct write; of any other part, all but head and tail is direct."""
    _needs_direct(root)
    await _write(driver, start, stop, offset)
    assert writes == expected


@pytest.mark.parametrize("refused", ["open", "call"])
@pytest.mark.parametrize("direct", ["auto", "on", "off"])
@asynchronous
async def test_direct_access_is_optional_unless_demanded(
    root: Path, monkeypatch: pytest.MonkeyPatch, direct: str, refused: str, no_leaks: None
) -> None:
    """If a call or an open refuses O_DIRECT, the page cache is used, or ``direct=on`` fails."""
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
        await stored(driver, "x", content)
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
    await stored(driver, "x", content)
    assert await driver.get("x") == content
    monkeypatch.setattr(
        os, "preadv", lambda fd, to, at: preadv(fd, [memoryview(to[0])[: _pieces(fd, most)]], at)
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
    await stored(driver, "x", content)
    assert await driver.get("x") == content
    await driver.close()


@pytest.mark.parametrize("declared", [AtMost(1 << 40), 64 * MiB], ids=["bound", "size"])
@pytest.mark.parametrize("refused", [False, True])
@asynchronous
async def test_a_file_that_ends_early_is_cut_before_it_is_durable(
    driver: LocalDriver, root: Path, monkeypatch: pytest.MonkeyPatch, refused: bool, declared: int
) -> None:
    """A file has its declared size from the beginning, and its final size when it is fsynced."""
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
