"""Reads and writes between memory and an open file, bypassing the page cache where supported.

O_DIRECT requires offset, length and memory address to be multiples of 4096. So a range is split:
the unaligned head and tail go through the page cache, and the body between them goes directly, via
an aligned bounce buffer if the memory is unaligned. Each page of the file is accessed either
directly or through the cache, never both, as long as ranges do not overlap. At most two cached
pages per range remain for fsync to write.
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

ALIGN_NBYTES = 4096
"""The page size, and a multiple of the logical block size of all common disks."""
DIRECT_MIN_NBYTES = 64 << 10
"""Below this size the page cache is faster."""

_log = logging.getLogger(__name__)

_BOUNCE_NBYTES = 1 << 20
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)
_bounce = threading.local()


class OpenFile:
    """Descriptors of one file. They close after :meth:`close`, as soon as no ``with`` block uses
    them."""

    def __init__(self, plain: int, *owned: int) -> None:
        """Take ownership of the descriptor ``plain``, for access through the page cache, and of
        further descriptors to close with it."""
        self.plain = plain
        self.direct: int | None = None
        """Descriptor of the same file with O_DIRECT; None if refused or not wanted."""
        self.identity: tuple[float, ...] = ()
        """Set by the opener to recognize the file later."""
        self._must_be_direct = False
        self._fds = [plain, *owned]
        self._lock = new_lock()
        self._users = 0
        self._closing = False

    def open_direct(self, name: str, flags: int, *, folder: int, must: bool) -> None:
        """Also open ``name`` in ``folder`` with O_DIRECT. With ``must``, a refusal now or later
        raises OSError."""
        try:
            # Same flags as the first open: meanwhile the name may refer to a named pipe or a
            # terminal.
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
        # A different file has just replaced ours: keep using the one that is open.
        if os.path.sameopenfile(fd, self.plain):
            self.direct = fd

    def __enter__(self) -> OpenFile:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def acquire(self) -> OpenFile:
        """Keep the file open until a matching :meth:`release`. Raises OSError if it is already
        closed."""
        with self._lock:
            if not self._fds:
                raise OSError(errno.EBADF, "file is closed")
            self._users += 1
        return self

    def release(self) -> None:
        """Undo one :meth:`acquire`."""
        self._leave(users=1)

    def links(self) -> int:
        """Return the number of names the file has; 0 if it was removed or replaced. Raises
        OSError."""
        return links_of(self.plain)

    def close(self) -> None:
        """Close the file as soon as it has no users. Safe to call twice."""
        self._closing = True
        self._leave(users=0)

    def call_direct(self, call: Any, memory: Any, at: int) -> int:
        """Make one direct call and return its byte count. Returns 0 if direct I/O is optional
        and the file system does not support it; later calls then use the page cache. Raises OSError
        for other failures."""
        if self.direct is None:
            return 0
        try:
            return int(call(self.direct, memory, at))
        except OSError as error:
            if self._must_be_direct or error.errno not in _REFUSED:
                raise
        self.direct = None  # the descriptor stays open because another thread may be using it
        return 0

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
                # Linux has closed the descriptor anyway, and the data was fsynced before.
                _log.warning("closing a file failed: %s", error)


def status_of(fd: int) -> os.stat_result:
    """Return the status of an open file or folder. Raises OSError: ESTALE if it was replaced and
    the file system no longer knows it."""
    try:
        return os.fstat(fd)
    except FileNotFoundError as error:
        # FUSE reports ENOENT, which would look as if the file had never existed.
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE)) from error


def links_of(fd: int) -> int:
    """Return the number of names of an open file or folder; 0 if it has been removed or replaced.
    Raises OSError."""
    try:
        return status_of(fd).st_nlink
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return 0


def write_at(file: OpenFile, start: int, data: Buffer) -> None:
    """Write all of ``data`` at byte ``start``. Raises OSError."""
    head, body = _direct_part(file, start, len(data))
    _write_plain(file.plain, data[:head], start)
    done = head + _write_direct(file, data[head : head + body], start + head)
    _write_plain(file.plain, data[done:], start + done)


def read_at(file: OpenFile, start: int, into: Buffer) -> None:
    """Fill all of ``into`` from byte ``start``. Raises EOFError if the file is too short, and
    OSError."""
    head, body = _direct_part(file, start, len(into))
    _read_plain(file.plain, into[:head], start)
    done = head + _read_direct(file, into[head : head + body], start + head)
    _read_plain(file.plain, into[done:], start + done)


def copy_at(file: OpenFile, start: int, source: OpenFile, source_start: int, nbytes: int) -> None:
    """Copy bytes of ``source`` to byte ``start`` of ``file``, within the kernel or the file server.
    Raises EOFError if ``source`` is too short, and OSError.

    Where files can share blocks, the kernel first tries that (FICLONERANGE), for ranges aligned to
    the file system's blocks.
    """
    done = 0
    while done < nbytes:
        at = source_start + done
        count = os.copy_file_range(source.plain, file.plain, nbytes - done, at, start + done)
        if not count:
            raise EOFError(at)
        done += count


def _direct_part(file: OpenFile, start: int, nbytes: int) -> tuple[int, int]:
    head = -start % ALIGN_NBYTES
    body = (nbytes - head) // ALIGN_NBYTES * ALIGN_NBYTES
    if file.direct is not None and body >= DIRECT_MIN_NBYTES:
        return (head, body)
    return (0, 0)


def _write_plain(fd: int, data: Buffer, start: int) -> None:
    done = 0
    while done < len(data):
        if not (count := os.pwrite(fd, data[done:], start + done)):
            raise OSError(errno.EIO, "the device accepts no more bytes, and gives no reason")
        done += count


def _read_plain(fd: int, into: Buffer, start: int) -> None:
    done = 0
    while done < len(into):
        if not (count := os.preadv(fd, [into[done:]], start + done)):
            raise EOFError(start + done)
        done += count


def _write_direct(file: OpenFile, data: Buffer, start: int) -> int:
    """Write as much as possible with O_DIRECT and return the number of bytes, a multiple of the
    alignment."""
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
            # Unlike assignment to a memoryview, copyto releases the GIL.
            np.copyto(piece, source[done : done + len(piece)])
        count = file.call_direct(os.pwrite, piece, start + done)
        # After a short write, continue at an aligned offset and rewrite a few bytes.
        done += count - count % ALIGN_NBYTES
        if count < ALIGN_NBYTES:
            break  # the page cache takes over, and reports any error
    return done


def _read_direct(file: OpenFile, into: Buffer, start: int) -> int:
    """Read as much as possible with O_DIRECT and return the number of bytes: fewer than requested
    at the end of the file, or if refused."""
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
        count = file.call_direct(
            lambda fd, memory, at: os.preadv(fd, [memory], at), piece, start + done
        )
        if not aligned:
            np.copyto(target[done : done + count], piece[:count])
        done += count
        if not count or count % ALIGN_NBYTES:
            break  # end of file
    return done


def bounce_memory() -> npt.NDArray[np.uint8]:
    """Return this thread's page-aligned bounce buffer."""
    if not hasattr(_bounce, "memory"):
        _bounce.memory = np.frombuffer(mmap.mmap(-1, _BOUNCE_NBYTES), np.uint8)
    memory: npt.NDArray[np.uint8] = _bounce.memory
    return memory
