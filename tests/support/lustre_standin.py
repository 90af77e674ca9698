"""A stand-in for Lustre, as a FUSE file system over a folder, that emulates layouts.

It has the extended attribute ``lustre.lov`` (set before the first byte, silently ignored
afterwards, inherited from the folder, composite where the folder's is), and it counts how often an
object passes from one writing process to another, which on Lustre moves a lock between hosts. It
has no targets and no locks, and statfs calls it FUSE. Run as ``python lustre_standin.py FOLDER
MOUNTPOINT OSTS [deaf|refusing]``. ``deaf`` ignores every layout, as an old client does whose files
have objects from the start. ``refusing`` rejects ``lustre.lov`` on regular files, but accepts
another attribute, which the tests' own ``lfs`` sets.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
import threading
from collections import Counter
from typing import Any

import mfusepy as fuse

V1, V3, COMPOSITE = 0x0BD10BD0, 0x0BD30BD0, 0x0BD60BD0
HEAD = struct.Struct("<IIQQIHH")
LOV, LOV_OF_LFS, SWITCHES = "lustre.lov", "user.lov", "user.switches"
STATUS = ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks", "st_ino")
TIMES = ("st_atime", "st_mtime", "st_ctime")
SPACE = (
    "f_bavail",
    "f_bfree",
    "f_blocks",
    "f_bsize",
    "f_files",
    "f_ffree",
    "f_frsize",
    "f_namemax",
)
HIDDEN = ".fuse_hidden"  # libfuse's names for files that are removed while they are open
DEFAULT = HEAD.pack(V1, 0, 0, 0, 1 << 20, 1, 0xFFFF)


def process_of(thread: int) -> int:
    """The process of a thread: FUSE tells the latter."""
    with open(f"/proc/{thread}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("Tgid:"))


class Standin(fuse.Operations):
    """Passes all on to ``folder``; layouts are kept by inode."""

    use_ns = True

    def __init__(self, folder: str, osts: int, mode: str) -> None:
        self.folder, self.osts, self.mode = os.path.realpath(folder), osts, mode
        self.counting = threading.Lock()
        self.files: dict[int, bytes] = {}  # layouts of files that have objects
        self.wanted: dict[int, bytes] = {}  # set, but no byte written yet
        self.folders: dict[int, bytes] = {}
        self.owners: dict[
            int, dict[int, int]
        ] = {}  # per file, which process wrote last to each of its objects
        self.switches: Counter[int] = Counter()

    def real(self, path: str) -> str:
        """Return the path in the underlying folder."""
        return self.folder + path

    def inode(self, path: str, fh: int | None = None) -> int:
        """The inode number of a path, or of an open file."""
        return (os.lstat(self.real(path)) if fh is None else os.fstat(fh)).st_ino

    def default(self, path: str) -> bytes:
        """Return the default layout of a new file: its folder's, or the root's."""
        folder = self.folders.get(self.inode(os.path.dirname(path)))
        return folder or self.folders.get(self.inode("/")) or DEFAULT

    def instantiate(self, fd: int) -> None:
        """Give a file its objects, as the first byte does."""
        inode = os.fstat(fd).st_ino
        if inode in self.files:
            return
        path = os.readlink(f"/proc/self/fd/{fd}").removeprefix(self.folder)
        layout = self.wanted.pop(inode, None) or self.default(path)
        if HEAD.unpack_from(layout)[0] != COMPOSITE:
            magic, pattern, a, b, size, count, _ = HEAD.unpack_from(layout)
            size, count = size or 1 << 20, count or 1
            count = self.osts if count == 0xFFFF else min(count, self.osts)
            layout = HEAD.pack(magic, pattern, a, b, size, count, 0) + layout[HEAD.size :]
        self.files[inode] = layout

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = os.lstat(self.real(path)) if fh is None else os.fstat(fh)
        return {name: getattr(found, name) for name in STATUS} | {
            name: getattr(found, name + "_ns") for name in TIMES
        }

    def readdir(self, path: str, fh: int) -> list[str]:
        return [
            ".",
            "..",
            *(name for name in os.listdir(self.real(path)) if not name.startswith(HIDDEN)),
        ]

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self.real(path), mode)
        above = self.folders.get(self.inode(os.path.dirname(path)))
        self.folders.pop(self.inode(path), None)
        if (
            above is not None and os.path.dirname(path) != "/"
        ):  # the root's is the default of all, and not copied
            self.folders[self.inode(path)] = above

    def rmdir(self, path: str) -> None:
        for name in os.listdir(self.real(path)):
            if name.startswith(HIDDEN):
                os.unlink(self.real(f"{path}/{name}"))
        os.rmdir(self.real(path))

    def unlink(self, path: str) -> None:
        os.unlink(self.real(path))

    def rename(self, old: str, new: str) -> None:
        os.rename(self.real(old), self.real(new))

    def link(self, target: str, source: str) -> None:
        os.link(self.real(source), self.real(target), follow_symlinks=False)

    def symlink(self, target: str, source: str) -> None:
        os.symlink(source, self.real(target))

    def readlink(self, path: str) -> str:
        return os.readlink(self.real(path))

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self.real(path), mode)

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> None:
        os.utime(self.real(path), ns=times)

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        fd = os.open(self.real(path), os.O_CREAT | os.O_RDWR, mode)
        for kept in (
            self.files,
            self.wanted,
            self.owners,
            self.switches,
        ):  # of an earlier file with this inode number
            kept.pop(os.fstat(fd).st_ino, None)
        if self.mode == "deaf":
            self.instantiate(fd)
        return fd

    def open(self, path: str, flags: int) -> int:
        return os.open(
            self.real(path), os.O_RDWR if flags & (os.O_RDWR | os.O_WRONLY) else os.O_RDONLY
        )

    def read(self, path: str, nbytes: int, start: int, fh: int) -> bytes:
        return os.pread(fh, nbytes, start)

    def write(self, path: str, data: bytes, start: int, fh: int) -> int:
        with self.counting:
            self.instantiate(fh)
            self.count(os.fstat(fh).st_ino, start, len(data))
        return os.pwrite(fh, data, start)

    def count(self, inode: int, start: int, nbytes: int) -> None:
        """Count how often an object of the file passes to another writing process."""
        magic, _, _, _, stripe_nbytes, count, _ = HEAD.unpack_from(self.files[inode])
        if magic == COMPOSITE:
            return
        writer, owners = process_of(fuse.fuse_get_context()[2]), self.owners.setdefault(inode, {})
        for stripe in range(start // stripe_nbytes, -(-(start + nbytes) // stripe_nbytes)):
            self.switches[inode] += owners.get(stripe % count, writer) != writer
            owners[stripe % count] = writer

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        os.truncate(self.real(path) if fh is None else fh, length)

    def flush(self, path: str, fh: int) -> int:
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        os.fsync(fh)

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        return 0

    def release(self, path: str, fh: int) -> None:
        os.close(fh)

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self.real(path))
        return {name: getattr(found, name) for name in SPACE}

    def setxattr(self, path: str, name: str, value: bytes, options: int, position: int = 0) -> None:
        is_folder = os.path.isdir(self.real(path))
        if name != (LOV_OF_LFS if self.mode == "refusing" and not is_folder else LOV):
            raise fuse.FuseOSError(errno.ENOTSUP)
        magic, _, _, _, size, count, _ = HEAD.unpack_from(value)
        if magic not in (V1, V3, COMPOSITE) or size % 65536 or (count > 2000 and count != 0xFFFF):
            raise fuse.FuseOSError(errno.EINVAL)
        inode = self.inode(path)
        if is_folder:
            self.folders[inode] = value
        elif inode not in self.files:  # else too late: Lustre ignores it and says nothing
            self.wanted[inode] = value
            fd = os.open(self.real(path), os.O_RDONLY)
            self.instantiate(fd)
            os.close(fd)

    def getxattr(self, path: str, name: str, position: int = 0) -> bytes:
        inode = self.inode(path)
        if name == SWITCHES:
            return str(self.switches[inode]).encode()
        found = self.files.get(inode) or self.folders.get(inode)
        if name != LOV or found is None:
            raise fuse.FuseOSError(errno.ENODATA)
        return found

    def listxattr(self, path: str) -> list[str]:
        return []


if __name__ == "__main__":
    served = Standin(sys.argv[1], int(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else "")
    kept = dict.fromkeys(("attr_timeout", "entry_timeout", "negative_timeout"), 0)
    fuse.FUSE(served, sys.argv[2], foreground=True, nothreads=False, direct_io=True, **kept)
