"""A folder tree accessed only through descriptors, so that symbolic links below the root are never
followed.

Each part of a key is opened relative to its parent (``openat``, ``O_NOFOLLOW``). A user who can
write below the root cannot lead us out of it, not even by replacing a folder with a link during the
walk. All functions block.
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
from .io import links_of, status_of
from .names import is_hidden, is_reserved, is_temporary, split

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)
"""Errors of flock on file systems without (working) locks."""

_NO_ENTRY = (errno.EACCES, errno.EPERM, errno.ELOOP)

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def sync_folder(fd: int) -> None:
    """Make the names in a folder durable. Raises OSError."""
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems do not support fsync on folders; their names are always durable.
        if error.errno != errno.EINVAL:
            raise
    # After XFS shuts down because it could not write its log, the names are lost, yet fsync of a
    # folder (unlike that of a file) reports success. fstat fails.
    os.fstat(fd)


def sync_path(path: str, flags: int = os.O_DIRECTORY) -> None:
    """Make the names in the folder at ``path`` durable, or with other ``flags`` a file. Raises
    OSError."""
    fd = os.open(path, os.O_RDONLY | flags)
    try:
        sync_folder(fd)
    finally:
        os.close(fd)


class Tree:
    """The files below ``root``. The root is opened on first use, and its own path may contain
    links.

    Methods raise OSError: ELOOP if a part of a key is a symbolic link, ENOENT if nothing exists
    there.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._fd: int | None = None
        self._lock = new_lock()
        self._made: set[str] = set()
        """Folders that need not be made: they existed after a mkdir."""
        self._durable: set[str] = set()
        """Folders whose names in their parents are known to be durable."""
        self._unsynced: list[str] | None = None
        """Paths of folders that hold the root's name, or those above it, and may not be durable
        yet; None until the root is made, or found by a writer."""

    def close(self) -> None:
        """Close the root. The next use reopens it."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
            self._fd = None
            self._forget()

    def _forget(self) -> None:
        # New sets: other threads may still be adding folders of the tree that is gone.
        self._made = set()
        self._durable = set()
        self._unsynced = None

    def open_folder(self, key: str, *, make: bool = False) -> int:
        """Return a descriptor of a folder, for the caller to close. With ``make``, create missing
        folders, which :meth:`sync_above` makes durable; otherwise raise ENOENT."""
        reached, *below = key.split("/")
        with self._lock:
            root = self._opened_root(make)
            # Not a dup of the root: duplicates share the position of a directory listing.
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
        """Force the next :meth:`open_folder` to create ``key`` and the folders above it again. A
        network file system's client may open a folder from its cache although another host has
        removed it; only mkdir asks the server."""
        doubted = set(_prefixes(key))
        self._made = self._made - doubted
        self._durable = self._durable - doubted

    def sync_above(self, key: str) -> None:
        """Make the names of the folder ``key`` and of all folders above it durable. Raises OSError.

        The lowest is synced first: that writes the journal, so the others find nothing to do.
        Folders of others are synced, too: another process may have just made them.
        """
        durable = self._durable
        unsynced = self._unsynced or []
        for prefix in reversed(_prefixes(key)):
            if prefix not in durable:
                with self.folder(split(prefix)[0]) as above:
                    sync_folder(above)
                durable.add(prefix)
        for path in tuple(unsynced):
            # None of our processes can have created a folder that we cannot open.
            with contextlib.suppress(PermissionError):
                sync_path(path)
        unsynced.clear()

    @contextlib.contextmanager
    def folder(self, key: str) -> Iterator[int]:
        """Open an existing folder for the duration of a ``with`` block."""
        fd = self.open_folder(key)
        try:
            yield fd
        finally:
            os.close(fd)

    def info(self, key: str) -> ObjectInfo:
        """Return size and time of an object. Raises ENOENT or ELOOP for anything but a regular
        file."""
        return _info(key, self.status(key))

    def status(self, key: str) -> os.stat_result:
        """Return the current status of an object's name. Raises ENOENT or ELOOP for anything but a
        regular file."""
        above, name = split(key)
        with self.folder(above) as fd:
            return self._regular(os.stat(name, dir_fd=fd, follow_symlinks=False), key)

    def open_object(self, key: str) -> tuple[int, int]:
        """Open an object for reading and return descriptors of its folder and of itself, for the
        caller to close. Raises ESTALE if it is replaced meanwhile and the file system (NFS, FUSE)
        forgets the opened file."""
        above, name = split(key)
        folder = self.open_folder(above)
        fd = -1
        try:
            try:
                # O_NONBLOCK: opening a named pipe must not wait for a writer.
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
        """Yield every object at or below ``prefix``. Omits links, temporary files and files that
        vanish meanwhile. Subfolders that may not be entered, such as ``lost+found``, are added to
        ``refused``."""
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
        """Remove one object durably. A missing object is not an error."""
        above, name = split(key)
        with contextlib.suppress(FileNotFoundError), self.folder(above) as fd:
            self._regular(os.stat(name, dir_fd=fd, follow_symlinks=False), key)
            _unlink(fd, name)
            sync_folder(fd)

    def remove_all(self, prefix: str) -> None:
        """Remove everything at or below ``prefix`` durably, including links and temporary files. A
        missing prefix is not an error.

        Files that were removed earlier but are still open in some process (:func:`is_hidden`) stay,
        and so do the folders above them.
        """
        above, name = split(prefix)
        with contextlib.suppress(FileNotFoundError), self.folder(above) as fd:
            self._forget()
            if stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                self._remove_folder(prefix)
            else:
                _unlink(fd, name)
            sync_folder(fd)

    def sweep(self, prefix: str, quiet_s: float) -> None:
        """Remove dead temporary files of the object ``prefix`` and below the folder ``prefix``, and
        then the empty folders at and below it.

        A file is dead if no process holds its lock and it has not changed for ``quiet_s`` seconds.
        Without locks only the age counts, and if ``quiet_s`` is 0, everything stays.
        """
        above, name = split(prefix)
        own = re.compile(rf"\.{re.escape(name[:48])}\.[0-9a-f]{{16}}\.tmp", re.DOTALL)
        with contextlib.suppress(FileNotFoundError), self.folder(above) as fd:
            for entry, status in _entries(fd):
                if own.fullmatch(entry):
                    _unlink_dead(fd, entry, status, quiet_s)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            folders = [prefix]
            for folder in folders:  # grows during iteration
                folders += self._sweep_folder(folder, quiet_s)
            for folder in reversed(folders):
                self._remove_if_empty(folder)

    def _sweep_folder(self, key: str, quiet_s: float) -> list[str]:
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
        for folder in folders:  # grows during iteration
            with contextlib.suppress(FileNotFoundError), self.folder(folder) as fd:
                folders += [f"{folder}/{name}" for name in _unlink_files(fd)]
        kept: set[str] = set()
        for folder in reversed(folders):
            if not self._removed(folder, kept):
                kept.add(folder)

    def _removed(self, key: str, kept: Set[str]) -> bool:
        """Remove a folder whose files are already removed. Returns False if it stays because it
        contains hidden files or folders in ``kept``. Raises OSError: ENOTEMPTY if somebody stored
        something there meanwhile."""
        above, name = split(key)
        for last in (False, True):  # twice, because a hidden file may vanish before we look
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
        """Open the folder ``name`` in ``above``, creating it if ``make``. ``key`` is its key."""
        if make and key not in self._made:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, dir_fd=above)
            self._made.add(key)
        try:
            return os.open(name, _FOLDER, dir_fd=above)
        except NotADirectoryError as error:
            if stat.S_ISLNK(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name) from error
            if make:
                raise
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name) from error
        except FileNotFoundError:
            if make and key in self._made:  # another process has removed it since
                self._made.discard(key)
                self._durable.discard(key)
                return self._descend(above, name, key, make)
            raise

    def _opened_root(self, make: bool) -> int:
        """Return the descriptor of the root, valid while the caller holds the lock."""
        # Another process may have removed and recreated the folder.
        if self._fd is not None and not links_of(self._fd):
            os.close(self._fd)
            self._fd = None
            self._forget()
        if make and self._unsynced is None:  # a reader may have opened the root before
            self._unsynced = _make_root(self._root)
        if self._fd is None:
            self._fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
        return self._fd

    @staticmethod
    def _regular(status: os.stat_result, key: str) -> os.stat_result:
        if stat.S_ISLNK(status.st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), key)
        if not stat.S_ISREG(status.st_mode):
            raise NotAnObject(status.st_mode, key)
        return status


def _info(key: str, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key, status.st_size, status.st_mtime)


def _entries(folder: int) -> list[tuple[str, os.stat_result]]:
    found: list[tuple[str, os.stat_result]] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                found.append((entry.name, entry.stat(follow_symlinks=False)))
    return found


def lock(fd: int, *, unknown: bool) -> bool:
    """Take the lock that marks a live upload, until ``fd`` is closed. Returns False if it is taken,
    and ``unknown`` if the file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return unknown
    return True


def _unlink_dead(folder: int, name: str, status: os.stat_result, quiet_s: float) -> None:
    if time.time() - status.st_mtime < quiet_s:
        return
    try:
        # Open for writing: NFS implements an exclusive lock as a byte-range lock, which requires
        # write access.
        fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.EACCES, errno.ENXIO, errno.EISDIR):
            return  # gone, not one of our files, or not accessible to us
        raise
    try:
        if lock(fd, unknown=quiet_s > 0):
            os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass  # its upload has just ended
    finally:
        os.close(fd)


def _unlink_files(folder: int) -> list[str]:
    """Remove everything that is neither a folder nor hidden, and return the names of the
    folders."""
    folders = []
    for name, status in _entries(folder):
        if stat.S_ISDIR(status.st_mode):
            folders.append(name)
        elif not is_hidden(name):
            _unlink(folder, name)
    return folders


def _unlink(folder: int, name: str) -> None:
    """Remove a file that existed a moment ago. It may already be gone: removed by somebody else, or
    by our own request whose reply was lost (see :mod:`.files`)."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def _make_root(path: str) -> list[str]:
    """Create a folder and any missing folders above it; return the folders to sync, the lowest
    first.

    They include all above it, even if it exists: another process may just have created any of them,
    and died.
    """
    above = os.path.dirname(path)
    try:
        os.mkdir(path)
    except FileNotFoundError:
        _make_root(above)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
    except FileExistsError:
        pass
    return _folders_above(path)


def _folders_above(path: str) -> list[str]:
    above = os.path.dirname(path)
    return [] if above == path else [above, *_folders_above(above)]


def _prefixes(key: str) -> list[str]:
    """Return the keys of a folder and of all folders above it, the highest first."""
    return list(itertools.accumulate(key.split("/"), "{}/{}".format)) if key else []
