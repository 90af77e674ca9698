"""A block device that logs requests and injects failures, and the images a crash could leave.

A FUSE file system with one file, attached to a loop device, logs every write and flush of the file
system on it. Writes before the last flush are durable. A power cut may keep any later sectors, in
any order. Run as ``python blockdevice.py IMAGE MOUNTPOINT LOG``. The file ``control`` next to the
disk accepts "fail write N", "fail flush N" (the N-th from now, and all later ones), "fail write N
once", and "work".
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from .disks import Disk, needed, new_disk, run

SECTOR_NBYTES = 512
HEAD = struct.Struct("<QQ")
FLUSH = (1 << 64) - 1
BOOT_S = 30.0


@dataclass(frozen=True)
class Record:
    """Bytes written at ``start``, or a flush if empty. ``position``: the end of the log then."""

    start: int
    data: bytes
    position: int

    @property
    def is_flush(self) -> bool:
        """True for a flush: all earlier writes are durable."""
        return self.start == FLUSH


@dataclass
class BlockDevice:
    """The device, and the file system on it."""

    disk: Disk
    before: Path
    """The disk before the first record."""
    log: Path
    control: Path

    @property
    def position(self) -> int:
        """The current length of the log."""
        return self.log.stat().st_size

    def tell(self, words: str) -> None:
        """Write a command to the control file; see the module."""
        self.control.write_text(words)


def records(log: Path) -> list[Record]:
    """Read the requests that reached the device, in order."""
    found, data, at = [], log.read_bytes(), 0
    while at < len(data):
        start, nbytes = HEAD.unpack_from(data, at)
        at += HEAD.size + nbytes
        found.append(Record(start, data[at - nbytes : at], at))
    return found


@contextlib.contextmanager
def new_block_device(kind: str, folder: Path) -> Iterator[BlockDevice]:
    """Mount a new device with this file system; skip the test if that is impossible here."""
    needed("losetup", "fusermount3")
    pytest.importorskip("mfusepy", reason="mfusepy is not installed", exc_type=ImportError)
    if not os.path.exists("/dev/fuse"):
        pytest.skip("no /dev/fuse here")
    made, served = new_disk(kind, folder), folder / "served"
    before = folder / "before.image"
    run("cp", "--sparse=always", made.image, before)
    served.mkdir()
    log = folder / "log"
    log.touch()
    server = subprocess.Popen(
        [sys.executable, "-m", "support.blockdevice", made.image, served, log],
        cwd=Path(__file__).parents[1],
    )
    try:
        _until_served(served, server)
        # Use direct I/O and small requests, so that each arrives as one request. FUSE splits
        # buffered requests and those above 1 MiB. If only a later part fails, Linux's loop device
        # reports a complete write (seen with 6.18), which no real disk does.
        loop = Path(run("losetup", "--find", "--show", "--direct-io=on", served / "disk"))
        try:
            Path(f"/sys/block/{loop.name}/queue/max_sectors_kb").write_text("128")
            disk = Disk(loop, made.folder)
            with disk.mounted():
                yield BlockDevice(disk, before, log, served / "control")
        finally:
            run("losetup", "--detach", loop)
    finally:
        run("fusermount3", "-u", "-z", served)
        server.wait(BOOT_S)


def _until_served(served: Path, server: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + BOOT_S
    while not (served / "disk").exists():
        if server.poll() is not None or time.monotonic() > deadline_s:
            pytest.skip("FUSE does not work here")
        time.sleep(0.01)


def crash_disks(
    before: Path, log: Sequence[Record], points: Sequence[int], into: Path, rng: Random
) -> Iterator[tuple[int, str, Path]]:
    """Yield the disks that a power cut could leave after each of ``points``.

    A point is a number of logged requests; they ascend. Each item is the point, which unflushed
    writes survived, and an image that the caller may modify.
    """
    durable, state, applied, flushed = into / "durable.image", into / "state.image", 0, 0
    run("cp", "--sparse=always", before, durable)
    for point in points:
        flushed = max((i + 1 for i in range(flushed, point) if log[i].is_flush), default=flushed)
        _apply(durable, log[applied:flushed])
        applied = flushed
        pending = [r for r in log[flushed:point] if not r.is_flush]
        for how in (
            ("nothing", "everything", "some writes", "some sectors") if pending else ("nothing",)
        ):
            run("cp", "--sparse=always", "--remove-destination", durable, state)
            _apply(state, _part(pending, how, rng))
            yield point, how, state


def _part(pending: Sequence[Record], how: str, rng: Random) -> list[Record]:
    if how == "nothing":
        return []
    if how == "everything":
        return list(pending)
    if how == "some sectors":
        pending = [
            Record(r.start + at, r.data[at : at + SECTOR_NBYTES], r.position)
            for r in pending
            for at in range(0, len(r.data), SECTOR_NBYTES)
        ]
    likely = rng.random()
    return [r for r in pending if rng.random() < likely]


def _apply(image: Path, writes: Sequence[Record]) -> None:
    with image.open("r+b") as file:
        for r in writes:
            if not r.is_flush:
                file.seek(r.start)
                file.write(r.data)


def serve(image: str, mountpoint: str, log: str) -> None:
    """Serve the device until it is unmounted."""
    import mfusepy as fuse

    disk, notes = os.open(image, os.O_RDWR), os.open(log, os.O_WRONLY | os.O_APPEND)
    nbytes = os.fstat(disk).st_size
    failing: dict[str, Any] = {"what": "", "after": 0, "once": False}

    def check(what: str) -> None:
        if failing["what"] == what:
            failing["after"] -= 1
            if failing["after"] == 0 or (failing["after"] < 0 and not failing["once"]):
                raise fuse.FuseOSError(errno.EIO)

    class Device(fuse.Operations):  # type: ignore[misc]
        """The FUSE file system with two files: disk and control."""

        use_ns = True

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            if path == "/":
                return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2}
            if path not in ("/disk", "/control"):
                raise fuse.FuseOSError(errno.ENOENT)
            return {
                "st_mode": stat.S_IFREG | 0o644,
                "st_nlink": 1,
                "st_size": nbytes if path == "/disk" else 0,
            }

        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", "disk", "control"]

        def open(self, path: str, flags: int) -> int:
            return 0

        def truncate(self, path: str, length: int, fh: int | None = None) -> None:
            pass

        def read(self, path: str, count: int, start: int, fh: int) -> bytes:
            return os.pread(disk, count, start)

        def write(self, path: str, data: bytes, start: int, fh: int) -> int:
            if path == "/control":
                words = data.decode().split()
                failing.update(what="", after=0, once=words[-1] == "once")
                if words[0] == "fail":
                    failing.update(what=words[1], after=int(words[2]))
                return len(data)
            check("write")
            os.write(notes, HEAD.pack(start, len(data)) + data)
            return os.pwrite(disk, data, start)

        def fsync(self, path: str, datasync: int, fh: int) -> None:
            check("flush")
            os.write(notes, HEAD.pack(FLUSH, 0))

    fuse.FUSE(Device(), mountpoint, foreground=True, nothreads=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])
