"""Files of the local driver: one that is being written, and those that are being read. All
functions block.

A network file system may do a request whose reply is lost, be asked again by its client, and refuse
the second: then link says EEXIST, rename ENOENT and open EEXIST of their own success (link(2),
open(2)). So what they say then is not believed before a look at the file.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ...core.forks.renewal import new_lock
from ..contract import AtMost, Buffer
from .io import DIRECT_MIN_NBYTES, OpenFile, write_at
from .names import split, temporary_name
from .room import ASKED_MIN_NBYTES, TakeRoom
from .tree import NO_LOCKS, Tree, lock, sync_folder

__all__ = ["CreateFile", "NewFile", "OpenFiles", "create_file"]

_log = logging.getLogger(__name__)

CreateFile = Callable[[int, str, int], int]
"""Creates a file that is to have so many bytes: (folder, name, size) → a descriptor for writing.
Raises OSError, EEXIST among them, and then leaves nothing."""

_SWEPT_S = 5.0
"""How long a file is created again in a folder that is gone. Clients of network file systems
believe their caches for about a second."""
_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


def create_file(folder: int, name: str, nbytes: int) -> int:
    """A :data:`CreateFile` for any file system."""
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666, dir_fd=folder)


class NewFile:
    """An object being written under a temporary name, until :meth:`publish` gives it its own.
    Methods raise OSError."""

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
        """``direct``: "auto", "off", or "on" (that O_DIRECT is refused is an error). ``take_room``:
        asked when the file is opened. Touches nothing yet."""
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
        """Create the temporary file, and the folders above it. ``exclusive``: EEXIST where the key
        is taken. ENOSPC where there is no room, and that can be told now."""
        end_s = time.monotonic() + _SWEPT_S
        pause_s = 0.001
        while (plain := self._create(exclusive)) is None:
            if time.monotonic() > end_s:
                raise OSError(errno.EAGAIN, "its folder was swept away again and again", self._name)
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
        """The temporary file, created and locked; None where a sweep came between, and took it or
        its folder away."""
        self._folder = self._tree.open_folder(self._above, make=True)
        plain = -1
        try:
            self._check_target(exclusive)
            plain = self._create_temporary()
            if self._locked(plain) and os.fstat(plain).st_nlink:
                return plain
        except FileNotFoundError:
            pass
        except BaseException:
            self._close(plain)
            raise
        self._close(plain)
        return None

    def _create_temporary(self) -> int:
        """A file of a name that no other process draws: if it is taken, it is our own, and the
        reply to its creation was lost."""
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

    @staticmethod
    def _locked(fd: int) -> bool:
        try:
            return lock(fd)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return True  # nor can a sweep lock it, and so leaves it alone

    def write(self, start: int, data: Buffer) -> None:
        """Write all of ``data`` at byte ``start``."""
        with self._opened() as file:
            write_at(file, start, data)

    def publish(self, nbytes: int, *, exclusive: bool = False) -> None:
        """Make the content, which has ``nbytes``, durable, then give it its name, then make that
        durable. ``exclusive``: EEXIST where taken.

        Followed by :meth:`drop`, whatever happens, and never repeated: after a failed fsync the
        kernel may take lost pages for clean ones, and call the next fsync a success. If the last
        step fails, a new object is taken back; one that replaced another stays, whole, and it is
        open which of the two a power cut would leave.
        """
        with self._opened() as file:
            if nbytes < self._reserved_nbytes:
                os.ftruncate(file.plain, nbytes)
            os.fsync(file.plain)
            was_free = self._give_name(exclusive)
            self._sync_name(file, take_back=was_free)

    def drop(self) -> None:
        """Remove the temporary file, if it still has that name. Safe at any time, and again; raises
        nothing."""
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
        # Direct writes that extend a file wait for each other; so it has its size at once.
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
        """Move the file to its name; return whether that was free."""
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
        """Whether the file that is being written is what the object's name names."""
        status = self._status_of_name()
        return status is not None and os.path.samestat(status, os.fstat(self._opened().plain))

    def _claim_and_rename(self) -> None:
        """Exclusive without hard links (FAT, some network file systems): an empty file takes the
        name, and is replaced.

        Still exactly one of several succeeds; but for a moment, or after a crash at that moment,
        the object is there and empty. Whose an empty file is cannot be seen: here a reply that is
        lost fails the put.
        """
        os.close(
            os.open(
                self._name,
                os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW,
                0o666,
                dir_fd=self._folder,
            )
        )
        try:
            self._rename()
        except BaseException:
            self._unlink_name()
            raise

    def _sync_name(self, file: OpenFile, *, take_back: bool) -> None:
        try:
            sync_folder(self._folder)
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
            pass  # it has its own name by now, or somebody removed it with its folder
        except OSError as error:
            _log.warning("temporary file %s is left behind: %s", self._temporary, error)


class OpenFiles:
    """Objects open for reading: at most ``most`` that are idle, the longest unused closed first.
    Thread-safe.

    A file that was deleted or replaced meanwhile, by whomever, is noticed by its link count, and
    opened anew. Where the attributes of an open file may be a memory of this host's, and other
    hosts change what is there, its name is looked up too: what opens the folders above it (NFS's
    close-to-open) asks the server.
    """

    def __init__(self, tree: Tree, *, direct: str, look_up: bool = False, most: int = 64) -> None:
        """``direct``: see :class:`NewFile`. ``look_up``: the name, before each use."""
        self._tree = tree
        self._direct = direct
        self._look_up = look_up
        self._most = most
        self._files: OrderedDict[str, OpenFile] = OrderedDict()
        self._lock = new_lock()

    @contextmanager
    def use(self, key: str) -> Iterator[OpenFile]:
        """The file of ``key``, open for the length of a ``with`` block. Raises OSError, ENOENT and
        ELOOP among them."""
        file = self._cached(key) or self._opened(key)
        try:
            yield file
        finally:
            file.release()

    def forget(self, prefix: str) -> None:
        """Let go of every file at or below ``prefix``."""
        self._forget(lambda key, file: key == prefix or key.startswith(prefix + "/"))

    def forget_deleted(self) -> None:
        """Let go of files that are deleted: only then is their space free."""
        self._forget(lambda key, file: file.is_deleted())

    def close(self) -> None:
        """Let go of all."""
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
        if file.is_deleted():
            return False
        try:
            return not self._look_up or _identity(self._tree.status(key)) == file.identity
        except OSError:
            return False  # opening it says what is wrong

    def _opened(self, key: str) -> OpenFile:
        folder, plain = self._tree.open_object(key)
        file = OpenFile(plain)
        try:
            if self._look_up:
                file.identity = _identity(os.fstat(plain))
            if self._direct != "off":
                file.open_direct(
                    split(key)[1], os.O_RDONLY, folder=folder, must=self._direct == "on"
                )
            # Only a few pages here and there still go through the cache.
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
            if older := self._files.pop(key, None):
                surplus = [older]
            else:
                surplus = []
            self._files[key] = file
            while len(self._files) > self._most:
                surplus.append(self._files.popitem(last=False)[1])
        for other in surplus:
            other.close()

    def _drop(self, key: str, file: OpenFile) -> None:
        """Let go of one file, unless another thread has done so, and opened the next one."""
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
    """What differs between two files of one name, and between a file and the same one that was
    changed in place."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime)
