"""Bytes between memory and an open file, past the page cache where the file system lets us.

O_DIRECT wants offset, length and memory address to be multiples of 4096. A range is therefore
split: an unaligned head and tail go through the page cache, the body between them goes directly,
from the caller's memory if that is aligned as the file is, else through a bounce buffer. So a page
is touched directly or through the cache, never both, as long as ranges do not overlap; and the
cache holds at most two pages per range that fsync has to write.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from ...core.forks.renewal import new_lock
from ..contract import Buffer

__all__ = [
    "ALIGN_NBYTES",
    "DIRECT_MIN_NBYTES",
    "OpenFile",
    "bounce_memory",
    "is_deleted",
    "read_at",
    "status_of",
    "write_at",
]

ALIGN_NBYTES = 4096
"""A multiple of the logical block size of every disk in use, and the size of a page."""
DIRECT_MIN_NBYTES = 64 << 10
"""Below this the page cache is faster."""

_log = logging.getLogger(__name__)

_BOUNCE_NBYTES = 1 << 20
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)
_bounce = threading.local()


class OpenFile:
    """Descriptors of one file. They are closed once :meth:`close` was called and no ``with`` block
    uses them any more."""

    def __init__(self, plain: int, *owned: int) -> None:
        """``plain`` goes through the page cache; ``owned`` are descriptors to be closed together
        with it."""
        self.plain = plain
        self.direct: int | None = None
        """The same file with O_DIRECT; None where that is refused or not wanted."""
        self.identity: tuple[float, ...] = ()
        """Set by the opener, to recognize the file again."""
        self._must_be_direct = False
        self._fds = [plain, *owned]
        self._lock = new_lock()
        self._users = 0
        self._closing = False

    def open_direct(self, name: str, flags: int, *, folder: int, must: bool) -> None:
        """Open ``name`` in ``folder`` for direct access, too. ``must``: a refusal, now or later, is
        an OSError."""
        try:
            # As the first time: another process may have put a named pipe, or a terminal, in its
            # place meanwhile.
            fd = os.open(
                name,
                flags | os.O_DIRECT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY,
                dir_fd=folder,
            )
        except OSError as error:
            if must or error.errno not in _REFUSED:
                raise
            return
        self._fds.append(fd)
        self._must_be_direct = must
        # Otherwise it has just been replaced, and the one that is open stays in use.
        if os.path.sameopenfile(fd, self.plain):
            self.direct = fd

    def __enter__(self) -> OpenFile:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def acquire(self) -> OpenFile:
        """Keep it open until :meth:`release`, which follows exactly once. Raises OSError where it
        is closed already."""
        with self._lock:
            if not self._fds:
                raise OSError(errno.EBADF, "file is closed")
            self._users += 1
        return self

    def release(self) -> None:
        """The other end of :meth:`acquire`."""
        self._leave(users=1)

    def is_deleted(self) -> bool:
        """Whether the file has lost its last name: it was removed, or another one took its
        place."""
        return is_deleted(self.plain)

    def close(self) -> None:
        """Close once there are no users left; at once if there are none. Safe to call twice."""
        self._closing = True
        self._leave(users=0)

    def refused(self, error: OSError) -> bool:
        """Whether a direct call failed because the file system does not support direct I/O. Unless
        it was demanded, later calls go through the page cache."""
        if self._must_be_direct or error.errno not in _REFUSED:
            return False
        self.direct = None  # its descriptor stays open: another thread may be using it
        return True

    def _leave(self, *, users: int) -> None:
        fds: list[int] = []
        with self._lock:
            self._users -= users
            if self._closing and not self._users:
                fds = self._fds
                self._fds = []
        for fd in fds:
            try:
                os.close(fd)
            except OSError as error:
                # Linux closes it all the same, and what had to be durable was fsynced before.
                _log.warning("closing a file failed: %s", error)


def status_of(fd: int) -> os.stat_result:
    """Of an open file or folder. Raises OSError: ESTALE where another has its name, and the file
    system has forgotten it."""
    try:
        return os.fstat(fd)
    except FileNotFoundError as error:
        # FUSE says so; it must not be taken for a file that was never there.
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE)) from error


def is_deleted(fd: int) -> bool:
    """Whether an open file, or folder, has lost its last name. Raises OSError."""
    try:
        return status_of(fd).st_nlink == 0
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return True


def write_at(file: OpenFile, start: int, data: Buffer) -> None:
    """Write all of ``data`` at byte ``start``. Raises OSError."""
    head, body = _direct_part(file, start, len(data))
    _write_plain(file.plain, data[:head], start)
    done = head + _write_direct(file, data[head : head + body], start + head)
    _write_plain(file.plain, data[done:], start + done)


def read_at(file: OpenFile, start: int, into: Buffer) -> None:
    """Fill all of ``into`` from byte ``start``. Raises EOFError where the file ends too early, and
    OSError."""
    head, body = _direct_part(file, start, len(into))
    _read_plain(file.plain, into[:head], start)
    done = head + _read_direct(file, into[head : head + body], start + head)
    _read_plain(file.plain, into[done:], start + done)


def _direct_part(file: OpenFile, start: int, nbytes: int) -> tuple[int, int]:
    """Where in the range the direct part begins, and its length, in bytes."""
    head = -start % ALIGN_NBYTES
    body = (nbytes - head) // ALIGN_NBYTES * ALIGN_NBYTES
    if file.direct is not None and body >= DIRECT_MIN_NBYTES:
        return (head, body)
    return (0, 0)


def _write_plain(fd: int, data: Buffer, start: int) -> None:
    done = 0
    while done < len(data):
        if not (count := os.pwrite(fd, data[done:], start + done)):
            raise OSError(errno.EIO, "the device takes no more bytes, and does not say why")
        done += count


def _read_plain(fd: int, into: Buffer, start: int) -> None:
    done = 0
    while done < len(into):
        if not (count := os.preadv(fd, [into[done:]], start + done)):
            raise EOFError(start + done)
        done += count


def _write_direct(file: OpenFile, data: Buffer, start: int) -> int:
    """Write what can be written directly; return how many bytes, a multiple of the alignment. The
    rest is left."""
    if not len(data):
        return 0
    source = np.frombuffer(data, np.uint8)
    aligned = source.ctypes.data % ALIGN_NBYTES == 0
    done = 0
    while done < len(data):
        piece: Any
        if aligned:
            piece = data[done:]
        else:
            piece = bounce_memory()[: len(data) - done]
        if not aligned:
            # Unlike an assignment to a memoryview, this releases the GIL.
            np.copyto(piece, source[done : done + len(piece)])
        count = _direct(file, os.pwrite, piece, start + done)
        # After a short write it goes on at a boundary, and writes some bytes again.
        done += count - count % ALIGN_NBYTES
        if count < ALIGN_NBYTES:
            break  # the page cache will do, or will know why not
    return done


def _read_direct(file: OpenFile, into: Buffer, start: int) -> int:
    """Read what can be read directly; return how many bytes. Less than asked for at the end of the
    file, or refused."""
    if not len(into):
        return 0
    target = np.frombuffer(into, np.uint8)
    aligned = target.ctypes.data % ALIGN_NBYTES == 0
    done = 0
    while done < len(into):
        piece: Any
        if aligned:
            piece = into[done:]
        else:
            piece = bounce_memory()[: len(into) - done]
        count = _direct(
            file, lambda fd, memory, at: os.preadv(fd, [memory], at), piece, start + done
        )
        if not aligned:
            np.copyto(target[done : done + count], piece[:count])
        done += count
        if not count or count % ALIGN_NBYTES:
            break  # the end of the file
    return done


def _direct(file: OpenFile, call: Any, memory: Any, at: int) -> int:
    """Bytes done by one direct call; 0 where the file turns out to refuse it. Raises OSError for
    anything else."""
    if file.direct is None:
        return 0
    try:
        return int(call(file.direct, memory, at))
    except OSError as error:
        if file.refused(error):
            return 0
        raise


def bounce_memory() -> npt.NDArray[np.uint8]:
    """This thread's page-aligned memory."""
    if not hasattr(_bounce, "memory"):
        _bounce.memory = np.frombuffer(mmap.mmap(-1, _BOUNCE_NBYTES), np.uint8)
    memory: npt.NDArray[np.uint8] = _bounce.memory
    return memory
