"""Room for a file, asked for before its first byte: what does not fit fails at once, and not after
an hour of writing.

fallocate(2) itself, and not posix_fallocate(3): where a file system cannot, the latter writes a
zero into every block.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable

__all__ = ["ASKED_MIN_NBYTES", "TakeRoom", "take_room_on"]

ASKED_MIN_NBYTES = 1 << 20
"""Smaller files are written before anybody could have asked."""

TakeRoom = Callable[[int, int], bool]
"""(descriptor of an empty file, bytes that it will have) → whether it has its size and its room
now. Blocks. Raises OSError where there is no room: ENOSPC, EDQUOT and EFBIG among them, which say
how much is wanted."""

_CANNOT = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.ENODEV)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


def take_room_on(fs_type: str) -> TakeRoom:
    """How room is asked for on a file system of this type."""
    return _ASKED.get(fs_type, _unasked)


def _reserve(fd: int, nbytes: int) -> bool:
    """Take the room. It counts quotas, and what other processes have taken."""
    _look(fd, nbytes)  # else the attempt would take, for a moment, all that there is
    while _libc.fallocate(fd, 0, 0, nbytes):
        code = ctypes.get_errno()
        if code in _CANNOT:
            return False
        if code != errno.EINTR:
            os.ftruncate(fd, 0)  # of what it did get
            raise _no_room(fd, nbytes, code)
    return True


def _look(fd: int, nbytes: int) -> bool:
    """Take nothing, and see that there is room now."""
    room = os.fstatvfs(fd)
    if nbytes > room.f_bfree * room.f_frsize:  # not f_bavail: root may use what is kept for root
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


# Writes to room that was taken are faster on ext4, and slower on XFS. Others are not asked:
# transparent compression (Btrfs, ZFS) makes room where there seems to be none, and what an
# answer means is unknown for many a network file system.
_ASKED: dict[str, TakeRoom] = {"ext4": _reserve, "xfs": _look, "tmpfs": _look}
