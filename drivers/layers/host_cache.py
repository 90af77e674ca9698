"""Objects that the processes of one host fetch once, and share in a private folder.

The process that locks an object's temporary file downloads the object into it and renames it; the
others wait and read the result. The lock ends with its process.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import logging
import mmap
import os
import stat
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from ...core.aio import at_most, to_the_end
from ...errors import DamagedError, HoldfastError, StorageError
from ..contract import Buffer, Driver, TakePiece, check_key, check_small
from .layer import Layer

P = ParamSpec("P")
T = TypeVar("T")

_PAUSE_S_MAX = 0.2
_PART = ".part"
_SHARE = 4
"""A cache takes one part in so many of its file system."""

_log = logging.getLogger(__name__)


def default_folder() -> Path:
    """Return a folder for this user, in memory if possible: below ``/dev/shm``,
    ``$XDG_RUNTIME_DIR`` or the folder for temporary files."""
    for base in ("/dev/shm", os.environ.get("XDG_RUNTIME_DIR", "")):
        if base and os.path.isdir(base) and os.access(base, os.W_OK | os.X_OK):
            return Path(base, f"holdfast-{os.geteuid()}")
    return Path(tempfile.gettempdir(), f"holdfast-{os.geteuid()}")


class HostCache(Layer):
    """Reads immutable objects through files that the processes of this host share. Put it around
    the other layers.

    An object is fetched whole, even if only a part of it is read. Nothing is verified here: callers
    have digests, and :meth:`drop` an object that does not match them. If the folder cannot be used,
    or has no room for an object, reads go to the storage, and one warning says why.
    """

    def __init__(
        self,
        inner: Driver,
        folder: str | os.PathLike[str] | None = None,
        *,
        immutable: Callable[[str], bool],
        budget_nbytes: int | None = None,
        wait_s: float = 60.0,
    ) -> None:
        """Do no I/O. ``immutable`` tells whether the object of a key, once it exists, never
        changes. ``folder`` is created if missing, and must then belong to this user alone; the
        default is :func:`default_folder`. All files in it have at most ``budget_nbytes``, by
        default a quarter of its file system; the least recently used are evicted. A process reads
        from the storage if it has waited for another's download for ``wait_s`` seconds."""
        super().__init__(inner)
        self._folder = Path(folder) if folder is not None else default_folder()
        self._immutable = immutable
        self._budget_nbytes = budget_nbytes
        self._wait_s = wait_s
        self._has_warned = False
        self._is_closed = False

    async def read(self, key: str, start: int, into: Buffer) -> None:
        async with self._opened(key) as file:
            if file is None:
                await super().read(key, start, into)
                return
            end = os.fstat(file).st_size
            if not 0 <= start <= start + len(into) <= end:
                message = f"object ends at byte {end}, before {start + len(into)}"
                raise DamagedError(message, uri=self.uri, key=key)
            await _in_thread(_fill, file, start, into)

    async def fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        if self._immutable(key):
            return await Driver.fetch(self, key, start, nbytes)
        return await super().fetch(key, start, nbytes)

    async def read_pieces(self, key: str, start: int, nbytes: int, take: TakePiece) -> None:
        if self._immutable(key):
            await Driver.read_pieces(self, key, start, nbytes, take)
        else:
            await super().read_pieces(key, start, nbytes, take)

    async def get(self, key: str) -> bytes:
        async with self._opened(key) as file:
            if file is None:
                return await super().get(key)
            nbytes = os.fstat(file).st_size
            check_small(nbytes, self.uri, key)
            content = bytearray(nbytes)
            await _in_thread(_fill, file, 0, memoryview(content))
            return bytes(content)

    def drop(self, key: str) -> None:
        """Remove an object from the cache, if it is there, because its content is damaged. The next
        read fetches it again; reads in progress are not affected."""
        with suppress(FileNotFoundError):
            self._path(key).unlink()

    async def close(self) -> None:
        """See :meth:`Driver.close`. Files stay, for other processes."""
        self._is_closed = True
        await super().close()

    def _path(self, key: str) -> Path:
        check_key(key, uri=self.uri)
        name = hashlib.sha256(f"{self.uri}\0{key}".encode("utf-8", "surrogateescape"))
        return self._folder / name.hexdigest()

    @asynccontextmanager
    async def _opened(self, key: str) -> AsyncIterator[int | None]:
        """Yield a descriptor of the object's file, downloaded if necessary; None if the caller has
        to read from the storage."""
        if self._is_closed:
            raise StorageError("the driver is closed", uri=self.uri, key=key)
        file = None
        if self._immutable(key):
            try:
                file = await self._shared(key, self._path(key))
            except HoldfastError:
                raise
            except OSError as error:
                self._warn(error.strerror or str(error))
        try:
            yield file
        finally:
            if file is not None:
                os.close(file)

    async def _shared(self, key: str, path: Path) -> int | None:
        _make_private(self._folder)
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._wait_s
        pause_s = 0.005
        while True:
            file = _opened(path)
            if file is not None:
                return file
            locked = _locked(_part_of(path))
            if locked is not None and await self._downloaded(key, locked, path):
                return locked
            if loop.time() > end_s:
                self._warn(f"another process has been downloading for {self._wait_s:g} s")
                return None
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    async def _downloaded(self, key: str, file: int, path: Path) -> bool:
        """Download an object into its temporary file, which is locked, and rename that to ``path``.
        Returns False if another process has just done so. Closes ``file`` unless it returns
        True."""
        is_done = False
        try:
            if not os.access(path, os.F_OK):
                nbytes = (await self.inner.stat(key)).nbytes
                await _in_thread(self._reserve, file, nbytes)
                if nbytes:
                    await self._fetch_into(key, memoryview(mmap.mmap(file, nbytes)))
                os.rename(_part_of(path), path)
                is_done = True
        finally:
            if not is_done:
                with suppress(FileNotFoundError):
                    os.unlink(_part_of(path))
            fcntl.flock(file, fcntl.LOCK_UN)  # a forked child may have the descriptor, too
            if not is_done:
                os.close(file)
        return is_done

    async def _fetch_into(self, key: str, memory: memoryview) -> None:
        part_nbytes = self.traits.part_nbytes
        starts = range(0, len(memory), part_nbytes)
        reads = (
            self.inner.read(key, start, memory[start : start + part_nbytes]) for start in starts
        )
        await at_most(self.traits.concurrency, reads)

    def _reserve(self, file: int, nbytes: int) -> None:
        """Make room in the folder and allocate ``nbytes`` to a locked file: writing to a mapping of
        a full file system would end the process. Blocks. Raises OSError if there is no room."""
        budget_nbytes = self._budget_nbytes
        if budget_nbytes is None:
            space = os.statvfs(self._folder)
            budget_nbytes = space.f_blocks * space.f_frsize // _SHARE
        os.ftruncate(file, 0)  # a process that died may have left a part of it
        used_nbytes = 0
        found = []
        for entry in os.scandir(self._folder):
            with suppress(FileNotFoundError):
                info = entry.stat(follow_symlinks=False)
                used_nbytes += info.st_size
                found.append((info.st_mtime_ns, info.st_size, Path(entry.path)))
        if nbytes <= budget_nbytes:
            for _, size, path in sorted(found):
                if used_nbytes + nbytes <= budget_nbytes:
                    break
                if _evicted(path):
                    used_nbytes -= size
        if used_nbytes + nbytes > budget_nbytes:
            reason = f"there is no room for {nbytes:,} bytes within {budget_nbytes:,}"
            raise OSError(errno.ENOSPC, reason)
        if nbytes:
            os.posix_fallocate(file, 0, nbytes)

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("%s is read without the cache in %s: %s", self.uri, self._folder, reason)


def _make_private(folder: Path) -> None:
    """Create a folder for this user alone. Raises PermissionError if it is another user's, or open
    to others: they could give this process other bytes."""
    folder.mkdir(0o700, parents=True, exist_ok=True)
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise PermissionError(errno.EPERM, "it is not a private folder of this user (mode 0700)")


def _part_of(path: Path) -> Path:
    return path.with_suffix(_PART)


def _opened(path: Path) -> int | None:
    """Open a file and note its use; None if it does not exist."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    os.utime(file)
    return file


def _locked(part: Path) -> int | None:
    """Create a temporary file if missing, and lock it. Returns its descriptor, or None if another
    process has the lock."""
    file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if part.stat().st_ino == os.fstat(file).st_ino:  # not yet renamed or removed
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(file)
        raise
    os.close(file)
    return None


def _evicted(path: Path) -> bool:
    """Remove a file. Returns False for a temporary file that a live process has locked."""
    if path.suffix != _PART:
        path.unlink(missing_ok=True)
        return True
    locked = _locked(path)
    if locked is None:
        return False
    path.unlink()
    os.close(locked)
    return True


def _fill(file: int, start: int, into: memoryview) -> None:
    while into:
        nbytes = os.preadv(file, [into], start)
        if not nbytes:
            raise OSError(errno.EIO, "a file of the cache is shorter than before")
        start += nbytes
        into = into[nbytes:]


async def _in_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    work = asyncio.get_running_loop().run_in_executor(None, partial(call, *args, **kwargs))
    return await to_the_end(work)
