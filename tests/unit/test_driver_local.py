"""The local driver with folders, symbolic links and special files, and the detection of mounts."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.drivers import asynchronous, keys

from holdfast.drivers.local.driver import LocalDriver
from holdfast.drivers.local.tree import Tree
from holdfast.drivers.mounts import is_shared, mount_of
from holdfast.errors import AccessError, NotFoundError, StorageError


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


# Links and other oddities of file systems


@pytest.fixture
def outside(root: Path, tmp_path: Path) -> Path:
    """Create a folder outside of the root.

    The root has the links ``link`` (to the folder) and ``file`` (to a file in it).
    """
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
    into = memoryview(bytearray(1))
    calls = [
        driver.read(key, 0, into),
        driver.create(key, 1),
        driver.get(key),
        driver.put(key, b"y"),
        driver.stat(key),
    ]
    calls += [driver.put(key, b"y", exclusive=True), driver.delete(key)]
    for call in [*calls, keys(driver, key)]:
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
    """A deletion removes links below the prefix, or at it, but not their targets.

    It refuses a prefix behind a link.
    """
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
    """A read does not block on a pipe that replaces the file before it is opened a second time.

    The first open is for the page cache, and the second for direct access.
    """
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
        for call in (
            driver.get(key),
            driver.stat(key),
            driver.read(key, 0, memoryview(bytearray(1))),
        ):
            with pytest.raises(NotFoundError):
                await call
    assert await keys(driver) == []
    await driver.delete("folder")
    assert (root / "folder").is_dir()


@asynchronous
async def test_an_object_and_a_folder_cannot_share_a_name(driver: LocalDriver) -> None:
    """A put over a folder or below an object fails clearly; a read below an object finds none."""
    await driver.put("a/x", b"")
    for call in (driver.put("a", b""), driver.create("a", 1)):
        with pytest.raises(StorageError, match="EISDIR"):
            await call
    for call in (driver.put("a/x/y", b""), driver.create("a/x/y", 1)):
        with pytest.raises(StorageError, match="ENOTDIR"):
            await call
    for call in (driver.get("a/x/y"), driver.stat("a/x/y")):
        with pytest.raises(NotFoundError):
            await call
    await driver.delete("a/x/y")
    await driver.delete_all("a/x/y")
    assert await keys(driver) == ["a/x"]


# Folders


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
    """A read retries if the object is replaced right after it was opened.

    Some file systems then report the old file as stale or missing, which must not look like a
    missing object.
    """
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


def test_only_known_local_file_systems_are_not_shared() -> None:
    """A file system that nobody has heard of counts as shared: a wrong sweep costs an upload."""
    shared = [
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
    ]
    local = [
        "ext4",
        "ext3",
        "xfs",
        "btrfs",
        "zfs",
        "tmpfs",
        "overlay",
        "f2fs",
        "bcachefs",
        "fuseblk",
    ]
    assert all(map(is_shared, ["", *shared]))
    assert not any(map(is_shared, local))
