"""A network file system that does a request, loses its reply, is asked again and refuses: no good
operation fails of that.

There is no such server here. Each system call does its work, and then reports what the second one
would: that is what the client of NFS hands on.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.drivers.local.driver import LocalDriver
from holdfast.drivers.local.files import create_file
from holdfast.drivers.lustre.files import Facts, Striper
from holdfast.errors import ExistsError, NotFoundError, StorageDownError

REPLIES = {
    "link": errno.EEXIST,
    "rename": errno.ENOENT,
    "mkdir": errno.EEXIST,
    "unlink": errno.ENOENT,
    "rmdir": errno.ENOENT,
}
"""What the second request of each call is answered with."""


class Lossy:
    """System calls whose first replies are lost, one for each name that they concern."""

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


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where there is nothing yet."""
    return tmp_path / "above/root"


@pytest.fixture
def driver(root: Path, no_leaks: None) -> Iterator[LocalDriver]:
    """As on NFS."""
    driver = LocalDriver(root, fs_type=lambda path: "nfs4")
    yield driver
    asyncio.run(driver.close())


def run(work: Any) -> Any:
    """For at most a minute."""
    return asyncio.run(asyncio.wait_for(work, 60))


def files(root: Path) -> list[str]:
    """All files, those with temporary names among them."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    "calls", [["link"], ["rename"], ["mkdir"], ["unlink"], list(REPLIES)], ids="+".join
)
def test_whatever_reply_is_lost_puts_and_deletions_succeed(
    driver: LocalDriver, root: Path, monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    """Exclusive ones too; what is there afterwards is what was put, and nothing else."""

    async def work() -> None:
        lossy = Lossy(monkeypatch, *calls)
        await driver.put("a/b/exclusive", b"1", exclusive=True)
        await driver.put("a/b/replaced", b"1")
        await driver.put("a/b/replaced", b"2")
        upload = await driver.create("a/c/image", 3)
        await upload.write(0, memoryview(b"abc"))
        await upload.commit()
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

    run(work())


def test_a_deletion_whose_reply_was_lost_is_durable(
    driver: LocalDriver, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is synced all the same."""
    synced: list[str] = []
    fsync = os.fsync

    def noted(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        fsync(fd)

    async def work() -> None:
        for key in ("a/x", "a/y"):
            await driver.put(key, b"1")
        Lossy(monkeypatch, "unlink")
        monkeypatch.setattr(os, "fsync", noted)
        await driver.delete("a/x")
        await driver.delete_all("a/y")

    run(work())
    assert synced == ["a", "a"]


def test_an_exclusive_put_that_somebody_else_has_won_fails(
    driver: LocalDriver, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the second reply says: the file under the name is not ours."""

    async def work() -> None:
        real = os.link

        def late(*args: Any, **kwargs: Any) -> None:
            (root / "x").write_bytes(b"theirs")
            real(*args, **kwargs)

        monkeypatch.setattr(os, "link", late)
        with pytest.raises(ExistsError):
            await driver.put("x", b"ours", exclusive=True)
        assert await driver.get("x") == b"theirs"

    run(work())
    assert files(root) == ["x"]


def test_a_rename_that_finds_nothing_fails(
    driver: LocalDriver, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody has deleted the temporary file: what is under the name is not ours."""

    async def work() -> None:
        await driver.put("x", b"before")
        real = os.rename

        def late(source: str, *args: Any, **kwargs: Any) -> None:
            os.unlink(source, dir_fd=kwargs["src_dir_fd"])
            real(source, *args, **kwargs)

        monkeypatch.setattr(os, "rename", late)
        with pytest.raises(NotFoundError):
            await driver.put("x", b"ours")
        assert await driver.get("x") == b"before"

    run(work())


@pytest.mark.parametrize("striped", [False, True])
def test_a_creation_whose_reply_was_lost_is_done_under_another_name(
    root: Path, striped: bool
) -> None:
    """EEXIST for a name that nobody else draws is the second reply; the file of the first goes. On
    Lustre too."""
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
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)

    async def work() -> None:
        driver = LocalDriver(root, create=create)
        upload = await driver.create("x", 2 << 20)
        await upload.write(0, memoryview(bytes(2 << 20)))
        await upload.commit()
        await driver.close()

    run(work())
    assert len(set(created)) == 2
    assert files(root) == ["x"]


def test_a_save_on_which_every_first_reply_is_lost_succeeds(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so do the next one, which deletes it, and a load."""
    lossy = Lossy(monkeypatch, *REPLIES)
    for step in (1, 2):
        holdfast.save(root, {"x": torch.full((10,), float(step))})
    assert holdfast.load(root)["x"][0] == 2.0
    assert {call for call, _ in lossy.lost} >= {"link", "rename", "mkdir", "unlink", "rmdir"}
    assert len([name for name in files(root) if name.endswith("fate")]) == 1
    assert not [name for name in files(root) if name.endswith(".tmp")]


def test_a_claim_without_hard_links_that_fails_leaves_nothing(
    driver: LocalDriver, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an empty file holds the name for a moment, a rename that fails takes it back."""

    def refused(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    def broken(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "link", refused)
    monkeypatch.setattr(os, "rename", broken)
    with pytest.raises(StorageDownError):
        run(driver.put("x", b"1", exclusive=True))
    assert files(root) == []


# What a sweep, or another process, does in the middle.


def test_a_temporary_file_that_a_sweep_took_before_it_was_locked_is_made_anew(root: Path) -> None:
    """Else what is written would go with it."""
    taken: list[str] = []

    def create(folder: int, name: str, nbytes: int) -> int:
        fd = create_file(folder, name, nbytes)
        if len(taken) < 2:
            taken.append(name)
            os.unlink(name, dir_fd=folder)
        return fd

    async def work() -> None:
        driver = LocalDriver(root, create=create)
        upload = await driver.create("x", 3)
        await upload.write(0, memoryview(b"abc"))
        await upload.commit()
        assert await driver.get("x") == b"abc"
        await driver.close()

    run(work())
    assert len(taken) == 2


@pytest.mark.parametrize(("kind", "stays"), [("nfs4", True), ("ext4", False)])
def test_a_sweep_spares_young_files_where_other_hosts_write(
    root: Path, kind: str, stays: bool
) -> None:
    """Their locks may not reach this host; what nobody has written to for an hour is dead there,
    too."""
    root.mkdir(parents=True)
    name = f".x.{'0' * 16}.tmp"
    (root / name).write_bytes(b"half")

    async def work(left: bool) -> None:
        driver = LocalDriver(root, fs_type=lambda path: kind)
        await driver.sweep("x")
        assert (root / name).exists() == left
        await driver.close()

    run(work(stays))
    if stays:
        old_s = (root / name).stat().st_mtime - 3700
        os.utime(root / name, (old_s, old_s))
        run(work(False))


def folder_sync_fails(
    monkeypatch: pytest.MonkeyPatch, first: Callable[[], None] = lambda: None
) -> None:
    """The fsync of a folder fails, with an I/O error, after ``first``."""
    fsync = os.fsync

    def failing(fd: int) -> None:
        fsync(fd)
        if Path(f"/proc/self/fd/{fd}").is_dir():
            first()
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", failing)


def test_a_folder_that_can_no_longer_be_asked_after_its_fsync_has_lost_its_names(
    driver: LocalDriver, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that has shut down may call the fsync of a folder a success: a put is none,
    then."""
    run(driver.put("x", b"before"))
    synced: list[int] = []
    fsync, fstat = os.fsync, os.fstat

    def shut_down(fd: int) -> os.stat_result:
        if fd in synced:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return fstat(fd)

    def noted(fd: int) -> None:
        fsync(fd)
        synced.extend([fd] * Path(f"/proc/self/fd/{fd}").is_dir())

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "fstat", shut_down)
    with pytest.raises(StorageDownError):
        run(driver.put("y", b"1"))
    synced.clear()
    with pytest.raises(StorageDownError):
        run(driver.delete("x"))


def test_a_put_whose_last_step_fails_takes_back_its_own_object_only(
    driver: LocalDriver, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process has put its own under the name meanwhile: that one stays."""
    run(driver.put("other", b"theirs"))
    with monkeypatch.context() as patch:
        folder_sync_fails(patch)
        with pytest.raises(StorageDownError):
            run(driver.put("x", b"ours", exclusive=True))
    assert files(root) == ["other"]

    def replace() -> None:
        assert stat.S_ISREG((root / "x").stat().st_mode)
        (root / "other").rename(root / "x")

    folder_sync_fails(monkeypatch, replace)
    with pytest.raises(StorageDownError):
        run(driver.put("x", b"ours", exclusive=True))
    assert (root / "x").read_bytes() == b"theirs"
