"""The local driver's durability: the order of system calls, and the effects of failures."""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.drivers import asynchronous, keys

from holdfast.drivers.local.driver import LocalDriver
from holdfast.drivers.local.errors import storage_errors
from holdfast.errors import (
    AccessError,
    ExistsError,
    FullError,
    NotFoundError,
    StorageDownError,
    StorageError,
)


@pytest.fixture
def driver(tmp_path: Path, no_leaks: None) -> Iterator[LocalDriver]:
    """Return a driver on a root that does not exist yet."""
    driver = LocalDriver(tmp_path / "root")
    yield driver
    asyncio.run(driver.close())


async def upload(driver: LocalDriver, key: str, nbytes: int) -> None:
    """Upload an object in two parts."""
    new = await driver.create(key, nbytes)
    try:
        for start, stop in ((nbytes // 2, nbytes), (0, nbytes // 2)):
            await new.write(start, memoryview(bytes(stop - start)))
        await new.commit()
    finally:
        await new.abort()


class Calls(list[str]):
    """A log of the relevant system calls, with the name of the file or folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fail: dict[str, int] = {}
        """Map an entry of the log to the errno with which it fails."""
        for name, label in {
            "pwrite": lambda fd, data, at: f"write {_name(fd)}",
            "fsync": lambda fd: f"fsync {_name(fd)}",
            "rename": lambda a, b, src_dir_fd, dst_dir_fd: f"rename {b}",
            "link": lambda a, b, src_dir_fd, dst_dir_fd, follow_symlinks: f"link {b}",
            "mkdir": lambda path, mode=0o777, dir_fd=None: f"mkdir {Path(path).name}",
            "unlink": lambda path, dir_fd: (
                f"unlink {'temporary' if path.endswith('.tmp') else path}"
            ),
        }.items():
            monkeypatch.setattr(os, name, functools.partial(self._call, getattr(os, name), label))

    def _call(
        self, real: Callable[..., Any], label: Callable[..., str], *args: Any, **kwargs: Any
    ) -> Any:
        entry = label(*args, **kwargs)
        self.append(entry)
        if code := self.fail.get(entry):
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)


def _name(fd: int) -> str:
    path = Path(os.readlink(f"/proc/self/fd/{fd}"))
    return "temporary" if path.suffix == ".tmp" else f"folder {path.name}"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Return a log of system calls."""
    return Calls(monkeypatch)


def _order(calls: Calls) -> list[str]:
    """Return the calls without removals and repetitions."""
    pairs = zip(calls, ["", *calls], strict=False)
    return [call for call, before in pairs if call != before and not call.startswith("unlink")]


@pytest.mark.parametrize("nbytes", [None, 10, 300_001], ids=["put", "upload", "large upload"])
@asynchronous
async def test_a_put_is_durable_when_it_returns(
    driver: LocalDriver, calls: Calls, tmp_path: Path, nbytes: int | None
) -> None:
    """A put or upload syncs the content before the name, the name, and once all folders above."""
    made = ["mkdir root", "mkdir a", "mkdir b"]
    above = [f"fsync folder {folder.name}" for folder in (tmp_path, *tmp_path.parents)]
    synced = ["fsync folder a", "fsync folder root", *above]
    published = ["write temporary", "fsync temporary", "rename x", "fsync folder b"]
    for expected in ([*made, *published, *synced], published):
        calls.clear()
        if nbytes is None:
            await driver.put("a/b/x", b"content")
        else:
            await upload(driver, "a/b/x", nbytes)
        assert _order(calls) == expected


@asynchronous
async def test_an_exclusive_put_is_durable_when_it_returns(
    driver: LocalDriver, calls: Calls
) -> None:
    """The name appears with its content, the temporary name goes, and both are synced."""
    await driver.put("x", b"content", exclusive=True)
    expected = ["write temporary", "fsync temporary", "link x", "unlink temporary"]
    assert calls[calls.index("write temporary") :][:5] == [*expected, "fsync folder root"]


@asynchronous
async def test_a_link_is_durable_when_it_returns(driver: LocalDriver, calls: Calls) -> None:
    """A new folder is synced in its parent, and the name in it."""
    await driver.put("x", b"content")
    calls.clear()
    await driver.link("a/y", driver, "x")
    assert calls == ["mkdir a", "link y", "fsync folder a", "fsync folder root"]


@asynchronous
async def test_folders_of_others_are_synced_once(
    driver: LocalDriver, calls: Calls, tmp_path: Path
) -> None:
    """The name of an existing folder is synced once: another process may have just made it."""
    (tmp_path / "root" / "a").mkdir(parents=True)
    calls.clear()
    for n in range(3):
        await driver.put(f"a/{n}", b"")
    assert calls.count("fsync folder root") == 1
    assert calls.count("fsync folder a") == 3


@asynchronous
async def test_a_deletion_is_durable_when_it_returns(driver: LocalDriver, calls: Calls) -> None:
    """A deletion is synced, so that a manifest always disappears before its data."""
    await driver.put("a/b/x", b"")
    await driver.put("a/y", b"")
    calls.clear()
    await driver.delete("a/y")
    assert calls == ["unlink y", "fsync folder a"]
    await driver.delete_all("a/b")
    assert calls[-1] == "fsync folder a"


@pytest.mark.parametrize(
    "step", ["write temporary", "fsync temporary", "rename x", "fsync folder root"]
)
@pytest.mark.parametrize("store", ["put", "upload"])
@asynchronous
async def test_a_failed_step_leaves_nothing_visible(
    driver: LocalDriver, calls: Calls, tmp_path: Path, step: str, store: str
) -> None:
    """An I/O error reaches the caller, and leaves the old object, if any, and no temporary file."""
    await driver.put("other", b"")
    calls.fail[step] = errno.EIO
    with pytest.raises(StorageDownError, match="EIO") as caught:
        await (driver.put("x", b"content") if store == "put" else upload(driver, "x", 300_001))
    assert (caught.value.key, caught.value.uri, caught.value.temporary) == ("x", driver.uri, True)
    assert isinstance(caught.value.__cause__, OSError)
    assert os.listdir(tmp_path / "root") == ["other"]
    calls.fail.clear()
    await driver.put("x", b"old")
    calls.fail[step] = errno.EIO
    with pytest.raises(StorageDownError):
        await driver.put("x", b"new")
    # Once it was renamed, the new object stays, since the old one is gone.
    assert await driver.get("x") == (b"new" if step == "fsync folder root" else b"old")


@asynchronous
async def test_a_failed_fsync_is_never_repeated(
    driver: LocalDriver, calls: Calls, tmp_path: Path
) -> None:
    """A failed fsync is not retried: the kernel marks lost pages clean, so it would succeed."""
    new = await driver.create("x", 300_001)
    await new.write(0, memoryview(bytes(300_001)))
    calls.fail["fsync temporary"] = errno.EIO
    with pytest.raises(StorageDownError):
        await new.commit()
    calls.fail.clear()
    with pytest.raises(StorageError, match="the upload is over"):
        await new.commit()
    await new.abort()
    assert calls.count("fsync temporary") == 1
    assert os.listdir(tmp_path / "root") == []


@asynchronous
async def test_a_folder_that_knows_no_fsync_is_no_error(driver: LocalDriver, calls: Calls) -> None:
    """EINVAL from fsync of a folder is ignored: such network file systems keep names durable."""
    await driver.put("a/x", b"")
    calls.fail["fsync folder a"] = errno.EINVAL
    await driver.put("a/y", b"")
    assert await keys(driver) == ["a/x", "a/y"]


@asynchronous
async def test_what_cannot_be_removed_is_reported(
    driver: LocalDriver, calls: Calls, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Abort raises nothing, but logs the name of a temporary file that it cannot remove."""
    new = await driver.create("x", 10)
    calls.fail["unlink temporary"] = errno.EROFS
    await new.abort()
    (left,) = os.listdir(tmp_path / "root")
    assert left in caplog.text


@asynchronous
async def test_a_close_that_fails_undoes_nothing(
    driver: LocalDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A failed close affects no durable data, raises nothing, and leaves no descriptor open."""
    close = os.close

    def failing(fd: int) -> None:
        is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        close(fd)
        if is_file:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "close", failing)
    await driver.put("x", b"content")
    await upload(driver, "y", 300_001)
    dropped = await driver.create("z", 300_001)
    await dropped.abort()
    await driver.read("x", 0, memoryview(bytearray(7)))
    await driver.close()
    monkeypatch.undo()
    assert "closing a file failed" in caplog.text
    after = LocalDriver(Path(driver.uri.removeprefix("file://")))
    assert await keys(after) == ["x", "y"]
    await after.close()


KINDS = {
    NotFoundError: ["ENOENT"],
    ExistsError: ["EEXIST"],
    AccessError: ["EACCES", "EPERM", "ELOOP", "EROFS"],
    FullError: ["ENOSPC", "EDQUOT", "EFBIG"],
    StorageDownError: ["EIO", "ESTALE", "ETIMEDOUT", "ENODEV", "ENOTCONN"],
    StorageError: ["EINVAL", "ENOTDIR", "EISDIR", "ENAMETOOLONG", "EMFILE", "ENOTEMPTY"],
}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in KINDS.items() for name in names]
)
def test_each_errno_has_its_error(kind: type[StorageError], name: str) -> None:
    """Each errno maps to the error class that tells a handler what to do, with its cause."""
    code = getattr(errno, name)
    with pytest.raises(StorageError) as caught, storage_errors("write", "file:///r", "k"):
        raise OSError(code, os.strerror(code))
    assert type(caught.value) is kind
    assert str(caught.value).startswith(
        f"write failed: {os.strerror(code)} [{name}] (key k, in file:///r)"
    )
    assert getattr(caught.value.__cause__, "errno", None) == code
    assert caught.value.temporary == (kind is StorageDownError)
