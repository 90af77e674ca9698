"""``file:///folder``: a local file system, at the device's own speed.

Threads call ``pwrite`` and ``preadv``, with O_DIRECT to bypass the page cache where it is
supported. An upload is a temporary file next to its target: fsync, rename, fsync of the folder.
This module provides the asynchronous interface; ``io`` moves bytes, ``tree`` resolves names,
``files`` manages new and open files.

A key is a path below the root, so ``a`` and ``a/b`` cannot both be objects. Names that look like
our temporary files are rejected, and so are the names under which NFS and FUSE keep removed files
that are still open. Symbolic links below the root are not objects: listings omit them, and a key
that passes through one is an error.
"""

from __future__ import annotations

import errno
import io
import itertools
import os
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar, Self

from ...errors import AccessError, DamagedError, StorageError
from ..asynchronous import AsyncDriver, AsyncUpload
from ..contract import (
    AtMost,
    Buffer,
    CopyTraits,
    Driver,
    ObjectInfo,
    Traits,
    check_name,
    check_small,
)
from ..mounts import Mount, can_clone, can_copy, can_link, is_shared, may_be_stale, mount_of
from ..options import Option, choice, integer, option_values
from ..threads import Threads
from ..uri import Uri
from .errors import storage_errors
from .files import TAKE_ROOM, CreateFile, NewFile, OpenFiles, create_file, link_file
from .io import ALIGN_NBYTES, OpenFile, read_at
from .names import is_reserved
from .tree import Tree


class LocalUpload(AsyncUpload):
    """An upload to a file. If its commit is cancelled, it still runs to completion, so the object
    may become visible."""

    def __init__(self, driver: LocalDriver, key: str, nbytes: int) -> None:
        super().__init__(driver, key, nbytes)
        self._file = driver._new_file(key, nbytes)
        self._threads = driver._threads
        self._open_files = driver._open_files

    async def _begin(self) -> None:
        await self._threads.run(self._open)

    async def _write(self, start: int, data: Buffer) -> None:
        await self._threads.run(self._file.write, start, data)

    async def _copy_range(
        self, start: int, source: Driver, key: str, key_start: int, nbytes: int
    ) -> None:
        assert isinstance(source, LocalDriver)  # copies_from has accepted it
        key = source._checked(key)
        await source._threads.run(self._copy_from, start, source, key, key_start, nbytes)

    async def _commit(self, *, exclusive: bool) -> None:
        await self._threads.run(self._publish, exclusive)

    async def _drop(self) -> None:
        await self._threads.run(self._file.drop)

    # The methods below block.

    def _open(self) -> None:
        self._open_files.forget_deleted()  # frees space for the new file
        self._file.open()

    def _copy_from(
        self, start: int, source: LocalDriver, key: str, key_start: int, nbytes: int
    ) -> None:
        with (
            storage_errors("copy", source.uri, key),
            source._reading(key, key_start, nbytes) as file,
            storage_errors("copy", self._made_by.uri, self.key),
        ):
            self._file.copy(start, file, key_start, nbytes)

    def _publish(self, exclusive: bool) -> None:
        try:
            self._file.publish(self.written.nbytes, exclusive=exclusive)
        finally:
            self._file.drop()
            self._open_files.forget(self.key)


SHARED_QUIET_S = 3600.0
"""Age without changes after which a temporary file is swept, if other hosts may be writing it."""

CLOSE_TIMEOUT_S = 60.0
"""Seconds that close() waits for running operations."""

OPENED_AGAIN = 3
"""Retries when an object is replaced between open and read, which NFS and FUSE report as ESTALE."""

LINK_PAUSES_S = (0.0, 0.001, 0.01, 0.1, 1.0, 2.0)
"""Seconds between attempts to link while another process sweeps the empty folder."""

_LIST_BATCH = 1000
_OFFSET_MAX = 1 << 63  # larger than any file offset


class LocalDriver(AsyncDriver):
    """Objects stored as files below a folder. Does no I/O before the first operation.

    A root that does not exist is empty. :meth:`create` and :meth:`put` create it, as well as the
    folders that a key needs, with permissions according to the umask. If operations are still
    running a minute after :meth:`close`, their descriptors stay open.
    """

    remote: ClassVar[bool] = False
    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "direct": Option(
            choice("auto", "on", "off"),
            "auto",
            "O_DIRECT: auto (if supported), on (else fail), or off",
        ),
        "threads": Option(integer(1, 256), 8, "operations in flight"),
    }

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        direct: str = "auto",
        threads: int = 8,
        mount_of: Callable[[str], Mount] = mount_of,
        create: CreateFile = create_file,
        scheme: str = "file",
    ) -> None:
        """Take options and hooks: ``mount_of`` returns the mount that holds a path, ``create``
        creates the file of an upload, and ``scheme`` is the scheme of ``uri``."""
        uri = Uri(scheme, os.fspath(root))
        super().__init__(uri, errors=storage_errors)
        mount = mount_of(uri.location)
        kind = mount.fs_type
        copies = None
        if can_copy(mount):
            copies = CopyTraits(align_nbytes=ALIGN_NBYTES, shares=can_clone(kind))
        self.traits = Traits(
            part_nbytes=16 << 20,
            part_min_nbytes=1,
            align_nbytes=1 if direct == "off" else ALIGN_NBYTES,
            concurrency=threads,
            coalesce_nbytes=64 << 10,
            part_order="any",
            exclusive_is_atomic=True,
            shared=is_shared(kind),
            copies=copies,
            links=can_link(kind),
        )
        self._file_system = mount.device
        self._direct = direct
        self._create_file = create
        self._take_room = TAKE_ROOM.get(kind)
        self._tree = Tree(uri.location)
        self._open_files = OpenFiles(self._tree, direct=direct, look_up=may_be_stale(kind))
        self._threads = Threads(threads, uri=self.uri)
        self._finalizer: weakref.finalize[..., Self] | None = None

    @classmethod
    def open(cls, uri: Uri) -> Self:
        """Return the driver for ``uri``. Raises UriError for an unknown option or an invalid
        value."""
        driver = cls(uri.location, scheme=uri.scheme, **option_values(cls.OPTIONS, uri))
        return driver._closed_when_collected()

    def _closed_when_collected(self) -> Self:
        """Arrange that open files are closed when the driver is garbage-collected in this process,
        and return it."""
        self._finalizer = weakref.finalize(
            self, _close_files, os.getpid(), self._tree, self._open_files
        )
        self._finalizer.atexit = False
        return self

    # These two need no task of their own, which would take half as long as a small read.

    async def read(self, key: str, start: int, into: Buffer) -> None:
        with storage_errors("read", self.uri, key):
            await self._threads.run(self._read, self._checked(key), start, into)

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        with storage_errors("put", self.uri, key):
            await self._threads.run(self._put, self._checked(key), data, exclusive)

    def copies_from(self, source: Driver) -> bool:
        """See :meth:`Driver.copies_from`. Accepts other folders of the same file system."""
        return self.traits.copies is not None and self._shares_files_with(source)

    def links_from(self, source: Driver) -> bool:
        """See :meth:`Driver.links_from`. Accepts other folders of the same file system."""
        return self.traits.links and self._shares_files_with(source)

    def _shares_files_with(self, source: Driver) -> bool:
        return isinstance(source, LocalDriver) and source._file_system == self._file_system

    async def compose(self, key: str, nbytes: int) -> AsyncUpload:
        """See :meth:`Driver.compose`. Never fails for lack of space beforehand: copies may need
        none."""
        return await self.create(key, AtMost(nbytes))

    async def _link(self, key: str, source: Driver, source_key: str) -> None:
        assert isinstance(source, LocalDriver)  # links_from has accepted it
        source_key = source._checked(source_key)
        await self._threads.run(self._link_to, self._checked(key), source, source_key)

    async def _fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        into = memoryview(bytearray(nbytes))
        await self._threads.run(self._read, self._checked(key), start, into)
        return into.toreadonly()

    async def _get(self, key: str) -> bytes:
        return await self._threads.run(self._content, self._checked(key))

    async def _stat(self, key: str) -> ObjectInfo:
        return await self._threads.run(self._tree.info, self._checked(key))

    async def _list(self, prefix: str) -> AsyncGenerator[Sequence[ObjectInfo], None]:
        refused: dict[str, OSError] = {}
        walk = self._tree.walk(self._checked(prefix) if prefix else "", refused)
        while batch := await self._threads.run(list, itertools.islice(walk, _LIST_BATCH)):
            yield batch
        for key, error in refused.items():
            raise AccessError(
                f"list failed: {error.strerror}; everything else was listed",
                unlisted=tuple(refused),
                uri=self.uri,
                key=key,
                advice="Check owner and mode of the folder.",
            ) from error

    async def _delete(self, key: str) -> None:
        await self._threads.run(self._remove, self._tree.remove, self._checked(key))

    async def _delete_all(self, prefix: str) -> None:
        """See :meth:`Driver.delete_all`. Durable on return. Removes symbolic links, but not their
        targets."""
        await self._threads.run(self._remove, self._tree.remove_all, self._checked(prefix))

    async def _sweep(self, prefix: str) -> None:
        """See :meth:`Driver.sweep`. A live upload holds a lock (flock) on its temporary file. Locks
        may not work across hosts, so on shared file systems a file only counts as dead after an
        hour without changes."""
        quiet_s = 0.0
        if self.traits.shared:
            quiet_s = SHARED_QUIET_S
        await self._threads.run(self._tree.sweep, self._checked(prefix), quiet_s)

    def _upload(self, key: str, nbytes: int) -> LocalUpload:
        return LocalUpload(self, self._checked(key), nbytes)

    async def _disconnect(self) -> None:
        await self._threads.close(CLOSE_TIMEOUT_S)
        if self._finalizer is not None:
            self._finalizer.detach()
        self._open_files.close()
        self._tree.close()

    def _new_file(self, key: str, nbytes: int) -> NewFile:
        return NewFile(
            self._tree,
            key,
            nbytes,
            direct=self._direct,
            create=self._create_file,
            take_room=self._take_room,
        )

    def _checked(self, key: str) -> str:
        return check_name(key, uri=self.uri, is_reserved=is_reserved, encode=os.fsencode)

    # The methods below block, and run in threads.

    def _read(self, key: str, start: int, into: Buffer) -> None:
        with self._reading(key, start, len(into)) as file:
            read_at(file, start, into)

    @contextmanager
    def _reading(self, key: str, start: int, nbytes: int) -> Iterator[OpenFile]:
        """Open an object to read these bytes in the ``with`` body, whose EOFError is translated."""
        stop = start + nbytes
        with self._open_files.use(key) as file:
            # An empty read does not notice where the file ends.
            beyond = not nbytes and stop > os.fstat(file.plain).st_size
            if beyond or not 0 <= start <= stop < _OFFSET_MAX:
                raise DamagedError(f"no object has bytes {start}:{stop}", uri=self.uri, key=key)
            try:
                yield file
            except EOFError as error:
                raise DamagedError(
                    f"object ends at byte {error}, before {stop}", uri=self.uri, key=key
                ) from error

    def _content(self, key: str) -> bytes:
        for _ in range(OPENED_AGAIN):
            try:
                return self._got(key)
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
        return self._got(key)

    def _got(self, key: str) -> bytes:
        folder, fd = self._tree.open_object(key)
        os.close(folder)
        with io.FileIO(fd) as file:
            check_small(os.fstat(fd).st_size, self.uri, key)
            return file.readall()

    def _put(self, key: str, data: bytes, exclusive: bool) -> None:
        file = self._new_file(key, len(data))
        file.open(exclusive=exclusive)
        try:
            file.write(0, memoryview(data))
            file.publish(len(data), exclusive=exclusive)
        finally:
            file.drop()
            self._open_files.forget(key)

    def _link_to(self, key: str, source: LocalDriver, source_key: str) -> None:
        for pause_s in LINK_PAUSES_S:
            with storage_errors("link", source.uri, source_key):
                status = source._tree.status(source_key)
            with storage_errors("link", self.uri, key):
                if link_file(self._tree, key, source._tree, source_key, status):
                    return
            time.sleep(pause_s)
        message = "link failed: its folder was removed repeatedly"
        raise StorageError(message, uri=self.uri, key=key)

    def _remove(self, remove: Callable[[str], None], prefix: str) -> None:
        self._open_files.forget(prefix)
        remove(prefix)


def _close_files(process: int, tree: Tree, open_files: OpenFiles) -> None:
    """Close what a collected driver left open. No other thread can use it, so no lock is contended.
    A forked child may have inherited a locked lock, so only the owning process does this."""
    if process == os.getpid():
        open_files.close()
        tree.close()
