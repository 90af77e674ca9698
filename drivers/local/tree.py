"""A folder and what lies below it, reached by descriptors only: no symbolic link below the root is
ever followed.

Every part of a key is opened relative to the part before it (``openat``, ``O_NOFOLLOW``), so no
user that may write below the root can lead us out of it, not even by replacing a folder by a link
during the walk. All functions block.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import stat
import time
from collections.abc import Iterator, Set

from ...core.forks.renewal import new_lock
from ..contract import ObjectInfo
from .errors import NotAnObject
from .io import is_deleted, status_of
from .names import is_hidden, is_reserved, is_temporary, split

__all__ = ["NO_LOCKS", "Tree", "lock", "sync_folder"]

NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)
"""What flock fails with where the file system knows no locks, or none that it can give."""

_NO_ENTRY = (errno.EACCES, errno.EPERM, errno.ELOOP)

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def sync_folder(fd: int) -> None:
    """Make the names in a folder durable. Raises OSError."""
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems have no fsync of a folder: there names are always durable.
        if error.errno != errno.EINVAL:
            raise
    # XFS that has shut down, since it could not write its log, has forgotten the names, and calls
    # this fsync of a folder, though of no file, a success. It does not answer this.
    os.fstat(fd)


class Tree:
    """What lies below ``root``. The root is opened at first use, and may itself be reached through
    links.

    Methods raise OSError: ELOOP where a part of a key is a symbolic link, ENOENT where nothing is
    there.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._fd: int | None = None
        self._lock = new_lock()
        self._durable: set[str] = set()
        """Folders whose name in their parent is known to be durable."""

    def close(self) -> None:
        """Let go of the root. The next use opens it again."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
            self._fd = None
            self._durable.clear()

    def open_folder(self, key: str, *, make: bool = False) -> int:
        """A descriptor, for the caller to close. ``make``: create what is missing, durably; else
        that is ENOENT."""
        reached, *below = key.split("/")
        with self._lock:
            root = self._opened_root(make)
            # Not a duplicate of the root: that would share the position at which a folder is being
            # listed.
            if key:
                fd = self._descend(root, reached, reached, make)
            else:
                fd = os.open(".", _FOLDER, dir_fd=root)
        try:
            for name in below:
                reached = f"{reached}/{name}"
                above = fd
                fd = self._descend(fd, name, reached, make)
                os.close(above)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def doubt(self, key: str) -> None:
        """Make the folder ``key`` and those above it anew at the next :meth:`open_folder`: a client
        of a network file system may open a folder that another host has removed, from its cache.
        Only making it asks the server."""
        self._durable -= set(itertools.accumulate(key.split("/"), "{}/{}".format))

    def folder(self, key: str) -> _Folder:
        """:meth:`open_folder` of one that exists, for the length of a ``with`` block."""
        return _Folder(self.open_folder(key))

    def info(self, key: str) -> ObjectInfo:
        """Of an object: anything but a regular file is ENOENT, or ELOOP."""
        return _info(key, self.status(key))

    def status(self, key: str) -> os.stat_result:
        """Of what has an object's name now: anything but a regular file is ENOENT, or ELOOP."""
        above, name = split(key)
        with self.folder(above) as fd:
            return self._regular(os.stat(name, dir_fd=fd, follow_symlinks=False), key)

    def open_object(self, key: str) -> tuple[int, int]:
        """Open for reading: a descriptor of the folder and one of the object, both for the caller
        to close. ESTALE where another takes its name meanwhile, and the file system (NFS, FUSE)
        forgets what was opened."""
        above, name = split(key)
        folder = self.open_folder(above)
        fd = -1
        try:
            try:
                # O_NONBLOCK: a named pipe must not make us wait for its writer.
                fd = os.open(
                    name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, dir_fd=folder
                )
            except OSError as error:
                if error.errno == errno.ENXIO:  # a socket, or a device without a driver
                    self._regular(os.stat(name, dir_fd=folder, follow_symlinks=False), key)
                raise
            self._regular(status_of(fd), key)
        except BaseException:
            for opened in (folder, fd):
                if opened >= 0:
                    os.close(opened)
            raise
        return folder, fd

    def walk(self, prefix: str, refused: dict[str, OSError]) -> Iterator[ObjectInfo]:
        """Yield every object at or below ``prefix``. Links, temporary files and whatever vanishes
        meanwhile are left out. Folders below it that may not be entered, such as ``lost+found``,
        go to ``refused``."""
        if prefix:
            with contextlib.suppress(FileNotFoundError):
                yield self.info(prefix)
                return
        pending = [prefix]
        while pending:
            folder = pending.pop()
            try:
                entries = self._look_into(folder)
            except OSError as error:
                if folder == prefix or error.errno not in _NO_ENTRY:
                    raise
                refused[folder] = error
                continue
            for name, status in entries:
                if folder:
                    key = f"{folder}/{name}"
                else:
                    key = name
                if stat.S_ISDIR(status.st_mode):
                    pending.append(key)
                elif stat.S_ISREG(status.st_mode) and not is_reserved(name):
                    yield _info(key, status)

    def remove(self, key: str) -> None:
        """Remove one object, durably. Nothing there is no error."""
        above, name = split(key)
        with contextlib.suppress(FileNotFoundError), self.folder(above) as fd:
            self._regular(os.stat(name, dir_fd=fd, follow_symlinks=False), key)
            _unlink(fd, name)
            sync_folder(fd)

    def remove_all(self, prefix: str) -> None:
        """Remove whatever lies at or below ``prefix``, also links and temporary files; durably.
        Nothing there: no error.

        A file that was removed before, and that some process still has open (:func:`is_hidden`),
        stays for it, as do the folders above.
        """
        above, name = split(prefix)
        with contextlib.suppress(FileNotFoundError), self.folder(above) as fd:
            self._durable.clear()
            if stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                self._remove_folder(prefix)
            else:
                _unlink(fd, name)
            sync_folder(fd)

    def sweep(self, prefix: str, quiet_s: float) -> None:
        """Remove dead temporary files of the object ``prefix``, and those below the folder
        ``prefix``; and this folder, and those in it, where they are empty.

        Dead: no process holds a lock on it, and it has not changed for ``quiet_s`` seconds. Where
        there are no locks, the latter decides; if it is 0, that cannot be, and everything stays.
        """
        above, name = split(prefix)
        own = re.compile(rf"\.{re.escape(name[:48])}\.[0-9a-f]{{16}}\.tmp", re.DOTALL)
        with contextlib.suppress(FileNotFoundError), self.folder(above) as fd:
            for entry, status in _entries(fd):
                if own.fullmatch(entry):
                    _unlink_dead(fd, entry, status, quiet_s)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            folders = [prefix]
            for folder in folders:  # grows while it is gone through
                folders += self._sweep_folder(folder, quiet_s)
            for folder in reversed(folders):
                self._remove_if_empty(folder)

    def _sweep_folder(self, key: str, quiet_s: float) -> list[str]:
        """Sweep the files of one folder; return the keys of the folders in it."""
        folders = []
        with contextlib.suppress(FileNotFoundError), self.folder(key) as fd:
            for name, status in _entries(fd):
                if stat.S_ISDIR(status.st_mode):
                    folders.append(f"{key}/{name}")
                elif is_temporary(name):
                    _unlink_dead(fd, name, status, quiet_s)
        return folders

    def _remove_if_empty(self, key: str) -> None:
        above, name = split(key)
        try:
            with self.folder(above) as fd:
                os.rmdir(name, dir_fd=fd)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise

    def _remove_folder(self, prefix: str) -> None:
        folders = [prefix]
        for folder in folders:  # grows while it is gone through
            with contextlib.suppress(FileNotFoundError), self.folder(folder) as fd:
                folders += [f"{folder}/{name}" for name in _unlink_files(fd)]
        kept: set[str] = set()
        for folder in reversed(folders):
            if not self._removed(folder, kept):
                kept.add(folder)

    def _removed(self, key: str, kept: Set[str]) -> bool:
        """Remove a folder whose files are removed; False where it stays, because only hidden files,
        and the folders ``kept``, are in it. Raises OSError, ENOTEMPTY where somebody has stored
        something there meanwhile."""
        above, name = split(key)
        for last in (False, True):  # a hidden file may be gone before it is looked at
            try:
                with contextlib.suppress(FileNotFoundError), self.folder(above) as fd:
                    os.rmdir(name, dir_fd=fd)
                return True
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                found = [entry for entry, _ in self._look_into(key)]
                if not all(is_hidden(entry) or f"{key}/{entry}" in kept for entry in found) or (
                    last and not found
                ):
                    raise
                if found:
                    return False
        return True

    def _look_into(self, folder: str) -> list[tuple[str, os.stat_result]]:
        with contextlib.suppress(FileNotFoundError), self.folder(folder) as fd:
            return _entries(fd)
        return []

    def _descend(self, above: int, name: str, key: str, make: bool) -> int:
        """Open, or make, the folder ``name`` in ``above``; ``key`` is its key."""
        if make and key not in self._durable:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, dir_fd=above)
            # Also where the folder is there: another process may have made it a moment ago.
            sync_folder(above)
            self._durable.add(key)
        try:
            return os.open(name, _FOLDER, dir_fd=above)
        except NotADirectoryError as error:
            if stat.S_ISLNK(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name) from error
            if make:
                raise
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name) from error
        except FileNotFoundError:
            if make and key in self._durable:  # another process has removed it since
                self._durable.discard(key)
                return self._descend(above, name, key, make)
            raise

    def _opened_root(self, make: bool) -> int:
        """The descriptor of the root, for as long as the caller holds the lock."""
        # Another process may have removed the folder that is open here, and made it anew.
        if self._fd is not None and is_deleted(self._fd):
            os.close(self._fd)
            self._fd = None
            self._durable.clear()
        if self._fd is None:
            if make:
                _make_root(self._root)
            self._fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
        return self._fd

    @staticmethod
    def _regular(status: os.stat_result, key: str) -> os.stat_result:
        if stat.S_ISLNK(status.st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), key)
        if not stat.S_ISREG(status.st_mode):
            raise NotAnObject(status.st_mode, key)
        return status


class _Folder:
    """The descriptor of a folder, closed at the end of a ``with`` block."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)


def _info(key: str, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key, status.st_size, status.st_mtime)


def _entries(folder: int) -> list[tuple[str, os.stat_result]]:
    found: list[tuple[str, os.stat_result]] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                found.append((entry.name, entry.stat(follow_symlinks=False)))
    return found


def lock(fd: int) -> bool:
    """Take the lock by which a live upload is known, until ``fd`` is closed. False where somebody
    else has it.

    Raises OSError where the file system knows no locks.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unlink_dead(folder: int, name: str, status: os.stat_result, quiet_s: float) -> None:
    """Remove a temporary file whose upload is dead."""
    if time.time() - status.st_mtime < quiet_s:
        return
    try:
        # For writing: NFS makes an exclusive lock one of the whole range of bytes, and that wants a
        # writer.
        fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.EACCES, errno.ENXIO, errno.EISDIR):
            return  # gone, no file of ours, or not ours to judge
        raise
    try:
        if _is_free(fd, unknown=quiet_s > 0):
            os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass  # its upload has just ended
    finally:
        os.close(fd)


def _is_free(fd: int, *, unknown: bool) -> bool:
    """Whether a file is not locked; ``unknown`` if the file system has no locks."""
    try:
        return lock(fd)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return unknown


def _unlink_files(folder: int) -> list[str]:
    """Remove whatever is neither a folder nor hidden; return the names of the folders."""
    folders = []
    for name, status in _entries(folder):
        if stat.S_ISDIR(status.st_mode):
            folders.append(name)
        elif not is_hidden(name):
            _unlink(folder, name)
    return folders


def _unlink(folder: int, name: str) -> None:
    """Remove a file that was there a moment ago. That it is gone is what was wanted: somebody else
    has removed it, or a network file system, which was not heard (see :mod:`.files`)."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def _make_root(path: str) -> None:
    """Make a folder and those above it where they are missing, each durable in its own parent."""
    try:
        os.mkdir(path)
    except FileNotFoundError:
        _make_root(os.path.dirname(path))
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
    except FileExistsError:
        pass  # perhaps made by another process a moment ago, so its name may not be durable yet
    try:
        fd = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # a folder that we cannot open is none that one of us has just made
        return
    try:
        sync_folder(fd)
    finally:
        os.close(fd)
