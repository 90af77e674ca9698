"""Objects that the processes of a host fetch only once."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.drivers import Counting, asynchronous, bare, stored

from holdfast.drivers.contract import Driver
from holdfast.drivers.layers.host_cache import HostCache, default_folder
from holdfast.drivers.memory import MemoryDriver
from holdfast.errors import DamagedError, NotFoundError, StorageDownError, StorageError

MIB = 1 << 20

READER = """
import asyncio, sys
from holdfast.drivers.layers.host_cache import HostCache
from holdfast.drivers.registry import open_driver

async def read():
    driver = HostCache(open_driver(sys.argv[1]), sys.argv[2], immutable=lambda key: True)
    into = memoryview(bytearray(int(sys.argv[3])))
    await driver.read("data/x", 0, into)
    await driver.close()
    sys.stdout.buffer.write(into)

asyncio.run(read())
"""
"""A program that reads an object through the cache in a folder, and writes it out."""


def cached(below: Driver, folder: Path, **options: Any) -> HostCache:
    """Return a cache of the objects below ``data/``."""
    return HostCache(below, folder / "cache", immutable=lambda key: "data/" in key, **options)


def files(folder: Path) -> list[int]:
    """Return the sizes of all files of the cache."""
    return sorted(path.stat().st_size for path in (folder / "cache").iterdir())


@pytest.mark.nightly(10)
def test_eight_processes_fetch_an_object_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them read the right bytes, which leave the server once."""
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    from holdfast.storage.serving.store import MemoryStore

    content = random.randbytes(40 * MIB + 5)
    with MemoryStore(budget_nbytes=64 * MIB) as store:
        monkeypatch.setenv("HOLDFAST_PEER_TOKEN", store.token)

        async def put() -> None:
            driver = bare(store.uri, token=store.token)
            await stored(driver, "data/x", content)
            await driver.close()

        asyncio.run(put())
        command = [sys.executable, "-c", READER, store.uri, str(tmp_path / "c"), str(len(content))]
        readers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(8)]
        outputs = [reader.communicate(timeout=90)[0] for reader in readers]
        assert [reader.returncode for reader in readers] == [0] * 8
        assert all(output == content for output in outputs)
        assert store.sent_nbytes == len(content)
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "c").iterdir()] == [0o600]
    assert (tmp_path / "c").stat().st_mode & 0o777 == 0o700


@asynchronous
async def test_every_way_to_read_is_served_from_one_fetch(tmp_path: Path) -> None:
    """Ranges, whole objects and pieces are right, by many tasks at once; a range beyond the end is
    an error. Objects that may change are read from the storage each time."""
    below = Counting(part_nbytes=1000)
    content = random.randbytes(10_001)
    await below.put("v/data/x", content)
    await below.put("v/data/empty", b"")
    await below.put("head", b"1")
    driver, other = cached(below, tmp_path), cached(below, tmp_path)
    assert await asyncio.gather(*(d.get("v/data/x") for d in (driver, other) * 4)) == [content] * 8
    assert len(below.reads) == 11
    into = memoryview(bytearray(100))
    await driver.read("v/data/x", 7, into)
    assert into == content[7:107]
    assert await other.fetch("v/data/x", 9_000, 1_001) == content[9_000:]
    pieces: list[bytes] = []
    await other.read_pieces("v/data/x", 5, 9_000, lambda piece: pieces.append(bytes(piece)))
    assert b"".join(pieces) == content[5:9_005]
    assert await driver.get("v/data/empty") == b""
    assert len(below.reads) == 11
    for start, nbytes in [(9_999, 3), (-1, 2)]:
        with pytest.raises(DamagedError):
            await driver.fetch("v/data/x", start, nbytes)
    assert await driver.get("head") == b"1"
    await below.put("head", b"2")
    assert await driver.get("head") == b"2"
    await driver.close()
    with pytest.raises(StorageError, match="closed"):
        await driver.get("v/data/x")


@asynchronous
async def test_a_failed_download_leaves_nothing_and_is_made_again(tmp_path: Path) -> None:
    """An error of the storage, or a cancellation, is the reader's, and no part of the object is
    ever shown. A damaged object can be dropped."""
    below = MemoryDriver()
    driver = cached(below, tmp_path)
    with pytest.raises(NotFoundError):
        await driver.get("data/x")
    assert files(tmp_path) == []

    class Failing(MemoryDriver):
        async def read(self, key: str, start: int, into: memoryview) -> None:
            into[:1] = b"?"
            raise StorageDownError("injected")

    failing = Failing()
    failing.uri, failing.objects = below.uri, below.objects
    await below.put("data/x", b"content")
    with pytest.raises(StorageDownError, match="injected"):
        await cached(failing, tmp_path).get("data/x")
    assert files(tmp_path) == []
    assert await driver.get("data/x") == b"content"
    (path,) = (tmp_path / "cache").iterdir()
    path.write_bytes(b"damaged")
    assert await driver.get("data/x") == b"damaged"
    driver.drop("data/x")
    driver.drop("data/x")
    assert await driver.get("data/x") == b"content"


@asynchronous
async def test_waiting_ends_with_the_holder_or_at_the_deadline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """While a process holds the lock, others wait, and then read from the storage, with one
    warning. When it dies, its part is downloaded again."""
    below = Counting()
    await below.put("data/x", b"content")
    driver = cached(below, tmp_path, wait_s=0.3)
    part = driver._path("data/x").with_suffix(".part")
    part.parent.mkdir(0o700)
    code = "import fcntl,sys,time; f=open(sys.argv[1],'wb'); fcntl.flock(f,2); f.write(b'par'); f.flush(); print(1,flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code, str(part)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        for _ in range(2):
            assert await driver.get("data/x") == b"content"
        assert [r.levelno for r in caplog.records] == [logging.WARNING]
        assert "another process" in caplog.text
        patient = asyncio.create_task(cached(below, tmp_path).get("data/x"))
        await asyncio.sleep(0.1)
        assert not patient.done()
    finally:
        holder.kill()
        holder.communicate()
    assert await patient == b"content"
    assert files(tmp_path) == [7]


@asynchronous
async def test_the_least_recently_used_make_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All files together stay within the budget. An object that cannot fit is read from the
    storage, and evicts nothing; dead processes lose their parts, live ones do not."""
    below = Counting()
    for name in "abcdL":
        await below.put(f"data/{name}", name.encode() * (400 if name != "L" else 1200))
    driver = cached(below, tmp_path, budget_nbytes=1000)
    for name in "ab":
        await driver.get(f"data/{name}")
        time.sleep(0.02)
    assert await driver.get("data/a") == b"a" * 400
    await driver.get("data/c")  # in place of b
    before = len(below.reads)
    await driver.get("data/a")
    await driver.get("data/c")
    assert len(below.reads) == before
    assert await driver.get("data/L") == b"L" * 1200
    assert files(tmp_path) == [400, 400]
    assert "no room for 1,200 bytes within 1,000" in caplog.text
    dead, live = (driver._path(name).with_suffix(".part") for name in ("data/1", "data/2"))
    dead.write_bytes(bytes(300))
    live.write_bytes(bytes(300))
    for age_s, path in ((90, dead), (80, live)):
        os.utime(path, (time.time() - age_s, time.time() - age_s))
    with live.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        await driver.get("data/d")
    assert not dead.exists()
    assert files(tmp_path) == [300, 400]


@pytest.mark.parametrize("kind", ["open to others", "a link", "a file", "no space"])
@asynchronous
async def test_a_folder_that_cannot_be_used(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads go to the storage, with one warning."""
    folder = tmp_path / "cache"
    if kind == "open to others":
        folder.mkdir()
        folder.chmod(0o755)
    elif kind == "a link":
        (tmp_path / "real").mkdir(0o700)
        folder.symlink_to(tmp_path / "real")
    elif kind == "a file":
        folder.write_bytes(b"")
    below = Counting()
    await below.put("data/x", b"content")
    driver = cached(below, tmp_path, budget_nbytes=3 if kind == "no space" else None)
    for _ in range(3):
        assert await driver.get("data/x") == b"content"
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "without the cache" in caplog.text


def test_the_folder_is_in_memory_if_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default folder has the user's number and lies below the first place that exists."""
    name = f"holdfast-{os.geteuid()}"
    assert default_folder() == Path("/dev/shm", name)
    monkeypatch.setattr(os, "access", lambda path, mode: path != "/dev/shm")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/")
    assert default_folder() == Path("/", name)
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_folder().name == name
