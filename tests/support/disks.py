"""File systems for one test, each in a file. A test can cut their power, or fill them up."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

FS_IOC_SHUTDOWN, NO_LOG_FLUSH = 0x8004587D, 2
SIZE_NBYTES = {"ext4": 64 << 20, "xfs": 300 << 20, "btrfs": 300 << 20}
"""XFS refuses smaller sizes. The files are sparse."""
MAKE = {
    "ext4": ["mkfs.ext4", "-q", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0"],
    "xfs": ["mkfs.xfs", "-q"],
    "btrfs": ["mkfs.btrfs", "-q"],
}


def run(*command: str | Path) -> str:
    """Return the output of a program. Raises OSError, with its message, if it fails."""
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        raise OSError(f"{command[0]}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def take(path: Path, nbytes: int) -> None:
    """Create a file of ``nbytes``, or as large as possible."""
    while True:
        try:
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)
            return
        except OSError as error:
            if error.errno != errno.ENOSPC or nbytes <= 65536:
                raise
            path.unlink()
            nbytes -= 65536


def needed(*programs: str) -> None:
    """Skip the test unless it runs as root and has these programs."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    for program in programs:
        if not shutil.which(program):
            pytest.skip(f"{program} is not installed")


@dataclass
class Disk:
    """A file system whose power can be cut. ``image``: a file, or a block device."""

    image: Path
    folder: Path

    def mount(self) -> None:
        """Attach and mount it. Raises OSError if that is impossible here."""
        run(
            "mount",
            *(() if self.image.is_block_device() else ("-o", "loop")),
            self.image,
            self.folder,
        )

    def unmount(self) -> None:
        """Unmount and detach it, in every mount namespace. A namespace made meanwhile may keep a
        copy. Mounting again would then only show the old file system, with its power still cut.

        Retried while it is busy: a save closes its files a moment after it has returned.
        """
        deadline_s = time.monotonic() + 20
        while namespaces := self._namespaces():
            try:
                for namespace in namespaces:
                    run("nsenter", f"--mount={namespace}", "umount", self.folder)
            except OSError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.005)

    def _namespaces(self) -> list[Path]:
        """Return the mount namespaces that it is mounted in."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # the process has ended
                if f" {self.folder} " in (process / "mountinfo").read_text():
                    found[os.readlink(process / "ns/mnt")] = process / "ns/mnt"
        return list(found.values())

    def cut_power(self) -> None:
        """Stop all writes to the disk, even those in progress."""
        fd = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, FS_IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(fd)

    def restart(self) -> None:
        """Mount it again, as after a power cut: everything unsynced is gone."""
        self.unmount()
        self.mount()

    def mend(self) -> None:
        """Check, repair and mount it again, as a machine does that starts after its disk has
        failed. Otherwise a file system that has aborted its journal comes back read-only, or not at
        all."""
        self.unmount()
        kind = run("blkid", "-o", "value", "-s", "TYPE", self.image)
        if kind == "ext4":
            done = subprocess.run(
                ["e2fsck", "-f", "-y", self.image],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            if done.returncode > 1:  # 1: errors were found and corrected
                raise OSError(f"e2fsck: {done.stdout.strip()}")
        self.mount()

    @contextlib.contextmanager
    def mounted(self) -> Iterator[Disk]:
        """Mount it for the length of a ``with`` block, even if the block fails. Skips the test if
        it cannot be mounted."""
        self.folder.mkdir(exist_ok=True)
        try:
            self.mount()
        except OSError as error:
            pytest.skip(f"cannot mount a file here: {error}")
        try:
            yield self
        finally:
            run("umount", "--lazy", self.folder)  # a failed test may have left files open there


def new_disk(kind: str, folder: Path, nbytes: int | None = None) -> Disk:
    """Create a file system in ``folder``, not mounted yet. Skips the test if that is impossible."""
    needed(MAKE[kind][0])
    disk = Disk(folder / f"{kind}.image", folder / kind)
    with disk.image.open("wb") as file:
        file.truncate(nbytes or SIZE_NBYTES[kind])
    run(*MAKE[kind], disk.image)
    return disk


@contextlib.contextmanager
def tmpfs(folder: Path, nbytes: int) -> Iterator[Path]:
    """Mount a file system in memory, of that size. Skips the test if that is impossible."""
    needed()
    folder.mkdir()
    try:
        run("mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", folder)
    except OSError as error:
        pytest.skip(f"cannot mount a tmpfs here: {error}")
    try:
        yield folder
    finally:
        run("umount", "--lazy", folder)
