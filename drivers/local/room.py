"""Space reservation before the first write, so that a file that does not fit fails at once and not
after an hour.

Uses fallocate(2) rather than posix_fallocate(3), which writes a zero into every block if the file
system lacks support.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable

__all__ = ["ASKED_MIN_NBYTES", "TakeRoom", "take_room_on"]

ASKED_MIN_NBYTES = 1 << 20
"""Smaller files are written faster than space could be checked."""

TakeRoom = Callable[[int, int], bool]
"""(descriptor of an empty file, final size) → whether the file now has that size and its space
reserved. Blocks. Raises OSError, with the required size, if space is insufficient: ENOSPC, EDQUOT
or EFBIG, among others."""

_CANNOT = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.ENODEV)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


def take_room_on(fs_type: str) -> TakeRoom:
    """Return the check for a file system of this type."""
    return _ASKED.get(fs_type, _unasked)


def _reserve(fd: int, nbytes: int) -> bool:
    """Reserve the space. Respects quotas, and space taken by other processes."""
    _look(fd, nbytes)  # otherwise a failing attempt would briefly take all free space
    while _libc.fallocate(fd, 0, 0, nbytes):
        code = ctypes.get_errno()
        if code in _CANNOT:
            return False
        if code != errno.EINTR:
            os.ftruncate(fd, 0)  # release what was allocated
            raise _no_room(fd, nbytes, code)
    return True


def _look(fd: int, nbytes: int) -> bool:
    room = os.fstatvfs(fd)
    if nbytes > room.f_bfree * room.f_frsize:  # not f_bavail: root may use the reserved blocks
        raise _no_room(fd, nbytes, errno.ENOSPC)
    return False


def _unasked(fd: int, nbytes: int) -> bool:
    return False


def _no_room(fd: int, nbytes: int, code: int) -> OSError:
    text = f"{os.strerror(code)}: the file takes {nbytes:,} bytes"
    if code == errno.ENOSPC:
        room = os.fstatvfs(fd)
        text += f", {room.f_bavail * room.f_frsize:,} are free"
    return OSError(code, text)


# Writes to reserved space are faster on ext4 and slower on XFS. Other file systems are not checked:
# with transparent compression (Btrfs, ZFS) more may fit than is free, and the answers of many
# network file systems are unreliable.
_ASKED: dict[str, TakeRoom] = {"ext4": _reserve, "xfs": _look, "tmpfs": _look}
