"""The local driver's own promises: links, folders, temporary files, open files, and direct access."""

from __future__ import annotations

import asyncio
import fcntl
import functools
import mmap
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.drivers import local, local_io
from holdfast.drivers.local import LocalDriver
from holdfast.drivers.local_tree import temporary_name
from holdfast.drivers.mounts import fs_type, is_shared
from holdfast.errors import AccessError, ExistsError, NotFoundError, StorageDownError, StorageError, UriError


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

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def limited() -> None:
            async with asyncio.timeout(60):
                await test(*args, **kwargs)

        asyncio.run(limited())

    return run


async def keys(driver: LocalDriver, prefix: str = "") -> list[str]:
    """The keys at or below ``prefix``, sorted."""
    return sorted([info.key async for info in driver.list(prefix)])


def open_below(folder: Path) -> list[str]:
    """What this process has open below a folder."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sorted(os.readlink(link) for link in links if os.path.lexists(link) and str(folder) in os.readlink(link))


# Links and other oddities of file systems


@pytest.fixture
def outside(root: Path, tmp_path: Path) -> Path:
    """A folder outside of the root, with links to it from inside: ``link`` (folder) and ``file`` (file)."""
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
async def test_a_key_through_a_symbolic_link_is_refused(driver: LocalDriver, outside: Path, key: str) -> None:
    """Every method raises AccessError, and what the link points to is untouched."""
    into = memoryview(bytearray(1))
    calls = [driver.read(key, 0, into), driver.create(key, 1), driver.get(key), driver.put(key, b"y"), driver.stat(key)]
    calls += [driver.put(key, b"y", exclusive=True), driver.delete(key)]
    for call in [*calls, keys(driver, key)]:
        with pytest.raises(AccessError, match=r"ELOOP.*Symbolic links are not followed") as caught:
            await call
        assert caught.value.key == key
    assert [path.name for path in outside.iterdir()] == ["x"]
    assert (outside / "x").read_bytes() == b"secret"
    assert (driver.uri, await keys(driver)) == (driver.uri, ["real/x"])


@asynchronous
async def test_deleting_all_removes_links_and_not_their_targets(
    driver: LocalDriver, outside: Path, root: Path
) -> None:
    """A link below the prefix, or the prefix itself, goes; nothing behind it does; a prefix behind one is refused."""
    (root / "real" / "link").symlink_to(outside)
    with pytest.raises(AccessError):
        await driver.delete_all("link/x")
    await driver.delete_all("real")
    await driver.delete_all("link")
    assert sorted(os.listdir(root)) == ["dangling", "file"]
    assert (outside / "x").read_bytes() == b"secret"


@asynchronous
async def test_a_folder_swapped_for_a_link_leads_nowhere(driver: LocalDriver, outside: Path, root: Path) -> None:
    """An upload goes on in the folder in which it began; whoever replaces that by a link gains nothing."""
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
async def test_the_root_may_be_reached_through_links(tmp_path: Path, root: Path, no_leaks: None) -> None:
    """Only what lies below the root is distrusted."""
    root.mkdir(parents=True)
    (tmp_path / "alias").symlink_to(root)
    driver = LocalDriver(tmp_path / "alias")
    await driver.put("a/x", b"1")
    assert (root / "a" / "x").read_bytes() == b"1"
    await driver.close()


@asynchronous
async def test_what_is_no_file_is_no_object(driver: LocalDriver, root: Path) -> None:
    """Named pipes and folders are neither listed nor read, and reading a pipe does not wait for its writer."""
    (root / "folder").mkdir(parents=True)
    os.mkfifo(root / "pipe")
    for key in ("pipe", "folder"):
        for call in (driver.get(key), driver.stat(key), driver.read(key, 0, memoryview(bytearray(1)))):
            with pytest.raises(NotFoundError):
                await call
    assert await keys(driver) == []
    await driver.delete("folder")
    assert (root / "folder").is_dir()


@asynchronous
async def test_an_object_and_a_folder_cannot_share_a_name(driver: LocalDriver) -> None:
    """Storing over a folder, or below an object, is an error that says so; looking below an object finds nothing."""
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


@asynchronous
async def test_any_name_that_the_file_system_takes(driver: LocalDriver, root: Path) -> None:
    """255 bytes, of any script or none, can be stored; one byte more is an error with advice."""
    names = ["n" * 255, "ü" * 127, os.fsdecode(b"\xff\xfe"), "a\nb", ".hidden", "-rf", "x.tmp"]
    for name in names:
        await driver.put(name, name.encode(errors="surrogateescape"))
        upload = await driver.create(name, 0)
        await upload.commit()
    assert await keys(driver) == sorted(names)
    assert os.fsdecode(b"\xff\xfe") in os.listdir(root)
    with pytest.raises(StorageError, match=r"ENAMETOOLONG.*255 bytes"):
        await driver.put("n" * 256, b"")


@pytest.mark.parametrize("key", [".x.0123456789abcdef.tmp", "a/.x.0123456789abcdef.tmp", ".x.0123456789abcdef.tmp/a"])
@asynchronous
async def test_names_of_temporary_files_are_no_keys(driver: LocalDriver, key: str) -> None:
    """What a listing would hide cannot be stored."""
    with pytest.raises(UriError, match="unfinished uploads"):
        await driver.put(key, b"")


# Folders


@asynchronous
async def test_a_root_that_is_missing_is_empty_until_something_is_stored(driver: LocalDriver, root: Path) -> None:
    """Looking creates nothing; storing makes the root, the folders above it and those of the key."""
    assert await keys(driver) == await keys(driver, "a") == []
    for call in (driver.get("x"), driver.stat("x"), driver.read("x", 0, memoryview(bytearray(1)))):
        with pytest.raises(NotFoundError):
            await call
    await driver.delete("x")
    await driver.delete_all("x")
    assert not root.parent.exists()
    await driver.put("a/b/x", b"")
    assert (root / "a" / "b" / "x").is_file()


@pytest.mark.parametrize(("umask", "folder", "file"), [(0o022, 0o755, 0o644), (0o077, 0o700, 0o600)])
@asynchronous
async def test_permissions_are_what_the_umask_leaves(
    driver: LocalDriver, root: Path, umask: int, folder: int, file: int
) -> None:
    """Folders and files are as private as the user wants them, and never executable."""
    before = os.umask(umask)
    try:
        await driver.put("a/x", b"")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (root, root / "a", root / "a" / "x")]
    assert modes == [folder, folder, file]


@asynchronous
async def test_a_root_made_anew_is_found(driver: LocalDriver, root: Path) -> None:
    """When somebody removes the root, or a folder, under a running driver, the next put makes it again."""
    await driver.put("a/x", b"1")
    subprocess.run(["rm", "-r", str(root / "a")], check=True, timeout=60)
    await driver.put("a/x", b"2")
    subprocess.run(["rm", "-r", str(root)], check=True, timeout=60)
    with pytest.raises(NotFoundError):
        await driver.get("a/x")
    await driver.put("a/x", b"3")
    assert (root / "a" / "x").read_bytes() == b"3"
    assert await driver.get("a/x") == b"3"


@asynchronous
async def test_a_listing_looks_only_below_its_prefix(
    driver: LocalDriver, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cost does not grow with what lies beside it."""
    for n in range(20):
        await driver.put(f"{n}/a/x", b"")
    scanned = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda fd: scanned.append(os.readlink(f"/proc/self/fd/{fd}")) or scandir(fd))
    assert await keys(driver, "7") == ["7/a/x"]
    assert scanned == [str(root / "7"), str(root / "7/a")]


# Temporary files and open files


@asynchronous
async def test_unfinished_uploads_lie_hidden_beside_their_target(driver: LocalDriver, root: Path) -> None:
    """A rename across folders, or file systems, is never needed; deleting the folder takes dead uploads along."""
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
async def test_close_drops_what_was_neither_committed_nor_aborted(root: Path, no_leaks: None) -> None:
    """A forgotten upload holds no descriptor and no space once the driver is closed; using it is an error."""
    driver = LocalDriver(root)
    upload = await driver.create("x", 100_000)
    await upload.write(0, memoryview(bytes(50_000)))
    await driver.close()
    assert os.listdir(root) == []
    with pytest.raises(StorageError, match="closed"):
        await upload.write(50_000, memoryview(bytes(50_000)))
    await upload.abort()
    with pytest.raises(StorageError, match="closed"):
        await driver.get("x")


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
async def test_space_of_deleted_objects_is_let_go(driver: LocalDriver, root: Path, no_leaks: None) -> None:
    """An object that was read, and deleted by someone else, is not kept open once something new is stored."""
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
async def test_an_abort_during_a_write_waits_for_nobody(driver: LocalDriver, monkeypatch: pytest.MonkeyPatch) -> None:
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


def _blocking(monkeypatch: pytest.MonkeyPatch, name: str) -> tuple[Any, Any]:
    """Make a call of ``os`` wait; the events that it is inside, and that it may go on."""
    inside, go_on = threading.Event(), threading.Event()
    real = getattr(os, name)

    def wait(*args: Any) -> Any:
        inside.set()
        assert go_on.wait(30)
        return real(*args)

    monkeypatch.setattr(os, name, wait)
    return inside, go_on


@asynchronous
async def test_close_says_what_it_waited_for(
    root: Path, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    """An operation that never ends does not hang close, but is an error; a second close tries again."""
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

RACER = """
import asyncio, sys, time
from holdfast.drivers.local import LocalDriver
from holdfast.errors import ExistsError
async def main(root, me, start_s):
    driver, won = LocalDriver(root), []
    time.sleep(max(0, start_s - time.time()))
    for n in range(60):
        try:
            await driver.put(f"lock/{n}", me.encode() * 100, exclusive=True)
            won.append(n)
        except ExistsError:
            pass
    await driver.close()
    print(*won)
asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
"""


@asynchronous
async def test_exclusive_puts_of_two_processes_have_one_winner(driver: LocalDriver, root: Path) -> None:
    """Every key goes to exactly one process, and holds what that one wrote."""
    start = str(time.time() + 1.0)
    racers = [
        subprocess.Popen([sys.executable, "-c", RACER, str(root), me, start], stdout=subprocess.PIPE, text=True)
        for me in "ab"
    ]
    won = [{int(n) for n in racer.communicate(timeout=60)[0].split()} for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    assert won[0] & won[1] == set()
    assert won[0] | won[1] == set(range(60))
    for me, keys_won in zip("ab", won, strict=True):
        for n in keys_won:
            assert await driver.get(f"lock/{n}") == me.encode() * 100
    assert len(os.listdir(root / "lock")) == 60


@asynchronous
async def test_exclusive_without_hard_links(driver: LocalDriver, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


# Direct access


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
    """An aligned part is one direct write from the caller's memory; of another, all but head and tail is direct, too."""
    _needs_direct(root)
    await _write(driver, start, stop, offset)
    assert writes == expected


@pytest.mark.parametrize("direct", ["auto", "on", "off"])
@asynchronous
async def test_direct_access_is_optional_unless_demanded(
    root: Path, monkeypatch: pytest.MonkeyPatch, writes: list[tuple[str, int, int]], direct: str, no_leaks: None
) -> None:
    """A file system that refuses O_DIRECT is served through the page cache, but for ``direct=on``: that is an error."""
    real = os.open

    def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    driver = LocalDriver(root, direct=direct)
    if direct == "on":
        with pytest.raises(StorageError, match="create failed.*EINVAL"):
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
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, memoryview(data)[: _pieces(fd, most)], at))
    content = memoryview(mmap.mmap(-1, 400_000))[offset : offset + 300_001]
    content[:] = os.urandom(300_001)
    upload = await driver.create("x", 300_001)
    await upload.write(0, content)
    await upload.commit()
    assert await driver.get("x") == content
    monkeypatch.setattr(os, "preadv", lambda fd, bufs, at: preadv(fd, [memoryview(bufs[0])[: _pieces(fd, most)]], at))
    into = memoryview(mmap.mmap(-1, 400_000))[offset : offset + 300_001]
    await driver.read("x", 0, into)
    assert into == content


def _pieces(fd: int, most: int) -> int:
    """How much a call may do: what is direct, in whole blocks."""
    return max(most, 4096) // 4096 * 4096 if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT else most


@asynchronous
async def test_a_device_that_takes_nothing_does_not_hang(driver: LocalDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that makes no progress ends with an error."""
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: 0)
    with pytest.raises(StorageDownError, match="takes no more bytes"):
        await driver.put("x", bytes(100_000))
    assert await keys(driver) == []


def test_bounce_memory_is_aligned() -> None:
    """Each thread has its own, at the start of a page."""
    assert local_io._bounce_memory().ctypes.data % local_io.ALIGN_NBYTES == 0
    assert local_io._bounce_memory() is local_io._bounce_memory()


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
    ("path", "expected", "shared"),
    [
        ("/", "ext4", False),
        ("/scratch", "lustre", True),
        ("/scratch/run/not/yet", "lustre", True),
        ("/scratchy", "ext4", False),
        ("/home/me", "nfs4", True),
        ("/home/tmp/x", "tmpfs", False),
        ("/with space/x", "fuse.sshfs", True),
        ("/over/x", "xfs", False),
    ],
)
def test_the_file_system_of_a_path_is_found(path: str, expected: str, shared: bool) -> None:
    """The deepest mount that holds the path, the latest of several; and whether other hosts see it."""
    assert fs_type(path, MOUNTINFO) == expected
    assert is_shared(expected) is shared


def test_traits_tell_a_network_file_system(tmp_path: Path) -> None:
    """A folder on Lustre is shared; one on this machine's disk is not."""
    assert LocalDriver(tmp_path, fs_type=lambda path: "lustre").traits.shared is True
    assert LocalDriver(tmp_path, fs_type=lambda path: "ext4").traits.shared is False
    assert fs_type(str(tmp_path)) == _by_stat(tmp_path)


def _by_stat(path: Path) -> str:
    command = ["findmnt", "--noheadings", "--output", "FSTYPE", "--target", str(path)]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"findmnt(8) does not tell: {error}")


def test_temporary_names_differ_and_fit() -> None:
    """Two uploads to one key never share a file, and the longest name still leaves room."""
    assert len({temporary_name("x") for _ in range(1000)}) == 1000
    assert len(os.fsencode(temporary_name("\U0001f980" * 63))) <= 255
