"""Files of the local driver: new files, whose space is reserved before the first write, so that a
file that does not fit fails at once and not after an hour; and files open for reading. All
functions block.

A network file system may perform a request, lose the reply, repeat the request and reject the
repetition. Then link reports EEXIST, rename ENOENT and open EEXIST because of their own success
(link(2), open(2)). So these errors are only believed after checking the file itself.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import stat
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from ...core.forks.renewal import new_lock
from ..contract import AtMost, Buffer
from .io import DIRECT_MIN_NBYTES, OpenFile, copy_at, write_at
from .names import split, temporary_name
from .tree import Tree, lock, sync_folder

ASKED_MIN_NBYTES = 1 << 20
"""Smaller files are written faster than space could be checked."""

TakeRoom = Callable[[int, int], bool]
"""(descriptor of an empty file, final size) → whether the file now has that size and its space
reserved. Blocks. Raises OSError, with the required size, if space is insufficient: ENOSPC, EDQUOT
or EFBIG, among others."""

_CANNOT = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.ENODEV)

# Not posix_fallocate(3), which writes a zero into every block if the file system lacks support.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


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


def _no_room(fd: int, nbytes: int, code: int) -> OSError:
    text = f"{os.strerror(code)}: the file takes {nbytes:,} bytes"
    if code == errno.ENOSPC:
        room = os.fstatvfs(fd)
        text += f", {room.f_bavail * room.f_frsize:,} are free"
    return OSError(code, text)


# Writes to reserved space are faster on ext4 and slower on XFS. Other file systems are not checked:
# with transparent compression (Btrfs, ZFS) more may fit than is free, and the answers of many
# network file systems are unreliable.
TAKE_ROOM: Mapping[str, TakeRoom] = {"ext4": _reserve, "xfs": _look, "tmpfs": _look}
"""Check of the space for a new file, by type of the file system."""


_log = logging.getLogger(__name__)

CreateFile = Callable[[int, str, int], int]
"""Creates a file of the given size: (folder, name, size) → a descriptor for writing. On failure,
raises OSError (including EEXIST) and leaves nothing behind."""

_SWEPT_S = 5.0
"""Seconds to retry creating a file whose folder keeps vanishing. Network file system clients trust
their caches for about a second."""
_IDLE_MAX = 64
_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


def create_file(folder: int, name: str, nbytes: int) -> int:
    """Create a file on any file system. A :data:`CreateFile`."""
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666, dir_fd=folder)


class NewFile:
    """An object written under a temporary name until :meth:`publish` renames it. Methods raise
    OSError."""

    def __init__(
        self,
        tree: Tree,
        key: str,
        nbytes: int,
        *,
        direct: str,
        create: CreateFile = create_file,
        take_room: TakeRoom | None = None,
    ) -> None:
        """Do no I/O. ``direct`` is "auto", "off", or "on" (fail if O_DIRECT is refused).
        ``take_room`` is called when the file is opened."""
        self._create_file = create
        if nbytes < ASKED_MIN_NBYTES or isinstance(nbytes, AtMost):
            self._take_room = None
        else:
            self._take_room = take_room
        self._tree = tree
        self._nbytes = nbytes
        self._direct = direct
        self._above, self._name = split(key)
        self._temporary = temporary_name(self._name)
        self._folder = -1
        self._reserved_nbytes = 0
        self._file: OpenFile | None = None  # None before open() and after drop()
        self._lock = new_lock()

    def open(self, *, exclusive: bool = False) -> None:
        """Create the temporary file and its folders. Raises EEXIST if the key is taken and
        ``exclusive`` is set, and ENOSPC if it is already known that space is insufficient."""
        end_s = time.monotonic() + _SWEPT_S
        pause_s = 0.001
        while (plain := self._create(exclusive)) is None:
            if time.monotonic() > end_s:
                raise OSError(errno.EAGAIN, "its folder was removed repeatedly", self._name)
            self._tree.doubt(self._above)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)
        self._file = OpenFile(plain, self._folder)
        try:
            if self._take_room is not None and self._take_room(plain, self._nbytes):
                self._reserved_nbytes = self._nbytes
            if self._direct != "off" and self._nbytes >= DIRECT_MIN_NBYTES:
                self._open_direct(self._file)
        except BaseException:
            self.drop()
            raise

    def _create(self, exclusive: bool) -> int | None:
        """Create and lock the temporary file. Returns None if a concurrent sweep removed it or its
        folder."""
        self._folder = self._tree.open_folder(self._above, make=True)
        plain = -1
        try:
            self._check_target(exclusive)
            plain = self._create_temporary()
            # Without locks, a sweep cannot lock the file either, so it leaves it alone.
            if lock(plain, unknown=True) and os.fstat(plain).st_nlink:
                return plain
        except FileNotFoundError:
            pass
        except BaseException:
            self._close(plain)
            raise
        self._close(plain)
        return None

    def _create_temporary(self) -> int:
        """Create the temporary file. Its name is unique, so if it exists, it is ours: the reply to
        its creation was lost."""
        try:
            return self._create_file(self._folder, self._temporary, self._nbytes)
        except FileExistsError:
            self._unlink_temporary()
            self._temporary = temporary_name(self._name)
            return self._create_file(self._folder, self._temporary, self._nbytes)

    def _close(self, plain: int) -> None:
        os.close(self._folder)
        if plain >= 0:
            os.close(plain)

    def write(self, start: int, data: Buffer) -> None:
        """Write all of ``data`` at byte ``start``."""
        with self._opened() as file:
            write_at(file, start, data)

    def copy(self, start: int, source: OpenFile, source_start: int, nbytes: int) -> None:
        """Copy ``nbytes`` bytes from byte ``source_start`` of ``source`` to byte ``start``. Raises
        EOFError if ``source`` is too short."""
        with self._opened() as file:
            copy_at(file, start, source, source_start, nbytes)

    def publish(self, nbytes: int, *, exclusive: bool = False) -> None:
        """Make the content of ``nbytes`` durable, give the file its name, and make the name
        durable. With ``exclusive``, raise EEXIST if the name is taken.

        Always followed by :meth:`drop`, and never retried: after a failed fsync the kernel may
        consider the lost pages clean, so that the next fsync succeeds. If the final fsync fails, a
        new object is removed again. An object that replaced another stays, whole; after a power
        cut, either may remain.
        """
        with self._opened() as file:
            if nbytes < self._reserved_nbytes:
                os.ftruncate(file.plain, nbytes)
            os.fsync(file.plain)
            was_free = self._give_name(exclusive)
            self._sync_name(file, take_back=was_free)

    def drop(self) -> None:
        """Remove the temporary file if it still exists. Never raises; safe at any time and more
        than once."""
        with self._lock:
            file = self._file
            self._file = None
        if file is not None:
            self._unlink_temporary()
            file.close()

    def _opened(self) -> OpenFile:
        file = self._file
        if file is None:
            raise OSError(errno.EBADF, "the upload is over: committed, failed or aborted")
        return file

    def _open_direct(self, file: OpenFile) -> None:
        file.open_direct(
            self._temporary, os.O_WRONLY, folder=self._folder, must=self._direct == "on"
        )
        # Direct writes that extend a file are serialized, so set the size now.
        if file.direct is not None and not self._reserved_nbytes:
            os.ftruncate(file.plain, self._nbytes)
            self._reserved_nbytes = self._nbytes

    def _check_target(self, exclusive: bool) -> None:
        status = self._status_of_name()
        if status is None:
            return
        for wrong, code in (
            (stat.S_ISLNK(status.st_mode), errno.ELOOP),
            (stat.S_ISDIR(status.st_mode), errno.EISDIR),
            (exclusive, errno.EEXIST),
        ):
            if wrong:
                raise OSError(code, os.strerror(code), self._name)

    def _status_of_name(self) -> os.stat_result | None:
        try:
            return os.stat(self._name, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def _give_name(self, exclusive: bool) -> bool:
        if not exclusive:
            free = self._status_of_name() is None
            self._rename()
            return free
        try:
            self._link()
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            self._claim_and_rename()
        else:
            self._unlink_temporary()
        return True

    def _link(self) -> None:
        try:
            os.link(
                self._temporary,
                self._name,
                src_dir_fd=self._folder,
                dst_dir_fd=self._folder,
                follow_symlinks=False,
            )
        except FileExistsError:
            if not self._has_its_name():
                raise

    def _rename(self) -> None:
        try:
            os.rename(self._temporary, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except FileNotFoundError:
            if not self._has_its_name():
                raise

    def _has_its_name(self) -> bool:
        status = self._status_of_name()
        return status is not None and os.path.samestat(status, os.fstat(self._opened().plain))

    def _claim_and_rename(self) -> None:
        """Create exclusively without hard links (FAT, some network file systems): claim the name
        with an empty file, then replace it.

        Still exactly one of several attempts succeeds. But the object is visible and empty for a
        moment, or permanently after a crash at that moment. The owner of an empty file is unknown,
        so here a lost reply fails the put.
        """
        os.close(create_file(self._folder, self._name, 0))
        try:
            self._rename()
        except BaseException:
            self._unlink_name()
            raise

    def _sync_name(self, file: OpenFile, *, take_back: bool) -> None:
        try:
            sync_folder(self._folder)
            self._tree.sync_above(self._above)
        except OSError:
            if take_back and self._has_its_name():
                self._unlink_name()
            raise

    def _unlink_name(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._name, dir_fd=self._folder)

    def _unlink_temporary(self) -> None:
        try:
            os.unlink(self._temporary, dir_fd=self._folder)
        except FileNotFoundError:
            pass  # already renamed, or removed together with its folder
        except OSError as error:
            _log.warning("temporary file %s is left behind: %s", self._temporary, error)


def link_file(tree: Tree, key: str, source: Tree, source_key: str, status: os.stat_result) -> bool:
    """Give the object ``source_key`` of ``source``, which has this status, the further name ``key``
    durably. Returns False if the object or a folder has vanished meanwhile. Raises OSError: EEXIST
    if ``key`` is another file."""
    above, name = split(key)
    source_above, source_name = split(source_key)
    try:
        folder = tree.open_folder(above, make=True)
        try:
            with source.folder(source_above) as fd, suppress(FileExistsError):
                os.link(source_name, name, src_dir_fd=fd, dst_dir_fd=folder, follow_symlinks=False)
            linked = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if not os.path.samestat(linked, status):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), key)
            sync_folder(folder)
            tree.sync_above(above)
        finally:
            os.close(folder)
    except FileNotFoundError:
        tree.doubt(above)
        return False
    return True


class OpenFiles:
    """LRU cache of files open for reading, with at most 64 idle ones. Thread-safe.

    A deleted or replaced file is recognized by its link count and reopened. The name is looked up
    before each use if the file has several, and on file systems where this host may cache the
    attributes of open files while other hosts change them: opening the folders above it asks the
    server (NFS close-to-open).
    """

    def __init__(self, tree: Tree, *, direct: str, look_up: bool) -> None:
        """``direct`` is described in :class:`NewFile`. ``look_up`` enables the lookup of names
        before each use."""
        self._tree = tree
        self._direct = direct
        self._look_up = look_up
        self._files: OrderedDict[str, OpenFile] = OrderedDict()
        self._lock = new_lock()

    @contextmanager
    def use(self, key: str) -> Iterator[OpenFile]:
        """Open the file of ``key`` for the duration of the ``with`` body. Raises OSError, including
        ENOENT and ELOOP."""
        file = self._cached(key) or self._opened(key)
        try:
            yield file
        finally:
            file.release()

    def forget(self, prefix: str) -> None:
        """Close every file at or below ``prefix``."""
        self._forget(lambda key, file: key == prefix or key.startswith(prefix + "/"))

    def forget_deleted(self) -> None:
        """Close deleted files, because their space is freed only then."""
        self._forget(lambda key, file: not file.links())

    def close(self) -> None:
        """Close all files."""
        self._forget(lambda key, file: True)

    def _cached(self, key: str) -> OpenFile | None:
        with self._lock:
            file = self._files.get(key)
            if file is None:
                return None
            self._files.move_to_end(key)
            file.acquire()
        if self._is_current(key, file):
            return file
        file.release()
        self._drop(key, file)
        self.forget_deleted()
        return None

    def _is_current(self, key: str, file: OpenFile) -> bool:
        links = file.links()
        # A file that has several names may have lost this one.
        if links == 1 and not self._look_up:
            return True
        try:
            return links > 0 and _identity(self._tree.status(key)) == file.identity
        except OSError:
            return False  # opening the file will raise the error

    def _opened(self, key: str) -> OpenFile:
        folder, plain = self._tree.open_object(key)
        file = OpenFile(plain)
        try:
            file.identity = _identity(os.fstat(plain))
            if self._direct != "off":
                file.open_direct(
                    split(key)[1], os.O_RDONLY, folder=folder, must=self._direct == "on"
                )
            # Only a few scattered pages still go through the cache.
            if file.direct is not None:
                os.posix_fadvise(plain, 0, 0, os.POSIX_FADV_RANDOM)
        except BaseException:
            file.close()
            raise
        finally:
            os.close(folder)
        file.acquire()
        self._keep(key, file)
        return file

    def _keep(self, key: str, file: OpenFile) -> None:
        with self._lock:
            surplus = []
            if older := self._files.pop(key, None):
                surplus.append(older)
            self._files[key] = file
            while len(self._files) > _IDLE_MAX:
                surplus.append(self._files.popitem(last=False)[1])
        for other in surplus:
            other.close()

    def _drop(self, key: str, file: OpenFile) -> None:
        """Close a file, unless another thread has already replaced it in the cache."""
        with self._lock:
            if self._files.get(key) is file:
                del self._files[key]
        file.close()

    def _forget(self, which: Callable[[str, OpenFile], bool]) -> None:
        with self._lock:
            gone = [key for key, file in self._files.items() if which(key, file)]
            files = [self._files.pop(key) for key in gone]
        for file in files:
            file.close()


def _identity(status: os.stat_result) -> tuple[float, ...]:
    """Return attributes that differ between two files of the same name, and change when a file is
    modified in place."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime)
