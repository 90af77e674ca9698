"""An upload through fsspec: a file written front to back, under a temporary name if an unfinished
file would be visible."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from ...errors import StorageError
from ..contract import Buffer, Upload
from ..local.names import temporary_name
from ..local.tree import sync_folder
from ..ranges import Ranges
from ..threads import OperationThreads
from .tree import Tree


class FsspecUpload(Upload):
    """One file being written, under a temporary name if an unfinished file would be visible."""

    def __init__(
        self,
        key: str,
        tree: Tree,
        written: Ranges,
        threads: OperationThreads,
        live: set[FsspecUpload],
        *,
        part_nbytes: int,
    ) -> None:
        """Take the target's ``key`` and the number of bytes ``written``. The upload leaves ``live``
        when it ends."""
        self._key = key
        self._tree = tree
        self._written = written
        self._threads = threads
        self._live = live
        self._part_nbytes = part_nbytes
        self._target = tree.path(key)
        self._folder, _, name = self._target.rpartition("/")
        self._staged = tree.kind.appears != "closed"
        self._path = self._target
        if self._staged:
            self._path = f"{self._folder}/{temporary_name(name)}"
        self._position = 0
        self._file: Any = None

    async def write(self, start: int, data: Buffer) -> None:
        self._written.check(start, len(data))
        if start != self._position:
            raise self._wrong(f"bytes come in order: {self._position} is next, not {start}")
        await self._threads.operate("write", self._key, self.append, data)

    async def commit(self, nbytes: int | None = None) -> None:
        """See :meth:`Upload.commit`. If cancelled, it still runs to completion, so the object may
        become visible."""
        try:
            self._written.check_complete(nbytes)
            await self._threads.operate("commit", self._key, self.publish)
        finally:
            await self.abort()

    async def abort(self) -> None:
        with contextlib.suppress(StorageError):  # the driver is closed, and has already dropped it
            await self._threads.run(self.drop)

    # The methods below block.

    def begin(self) -> None:
        """Create the file, and the folders above it if the file system has folders."""
        tree = self._tree
        if tree.kind.folders:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                if tree.fs.info(self._target)["type"] == "directory":
                    raise self._wrong("a folder has this name; objects lie below it")
            tree.fs.makedirs(self._folder, exist_ok=True)
        self._file = tree.fs.open(self._path, "wb", block_size=self._part_nbytes)

    def append(self, data: Buffer) -> None:
        """Append ``data``."""
        file = self._file
        if file is None:
            raise self._wrong("the upload is over: committed, failed or aborted")
        try:
            done = 0
            while done < len(data):
                count = file.write(data[done:])
                done += len(data) - done if count is None else count
        except BaseException:
            self.drop()  # an unknown part of it was written
            raise
        self._written.add(self._position, len(data))
        self._position += len(data)

    def publish(self) -> None:
        """Make the file visible, whole and durable."""
        file = self._file
        tree = self._tree
        if file is None:
            raise self._wrong("the upload is over: committed, failed or aborted")
        file.close()
        self._file = None
        if getattr(tree.fs, "local_file", False):
            _sync_file(self._path)
        if tree.kind.appears == "copied":
            tree.fs.cp_file(self._path, self._target)
        elif self._staged:
            tree.fs.mv(self._path, self._target)
        if getattr(tree.fs, "local_file", False):
            _sync_names(self._folder, tree.root)
        if tree.kind.appears == "unknown" and tree.stat(self._key).nbytes != self._written.nbytes:
            raise self._wrong(
                "the file system did not put the new file in the place of the old one"
            )

    def drop(self) -> None:
        """Discard the file unless it is published. Never raises."""
        tree = self._tree
        file = self._file
        self._file = None
        self._live.discard(self)
        if file is not None:
            _discard(file, staged=self._staged)
        if self._staged and tree.is_connected:
            with contextlib.suppress(Exception):
                tree.remove(self._path)

    def _wrong(self, message: str) -> StorageError:
        return StorageError(message, uri=self._tree.uri, key=self._key)


def _discard(file: Any, *, staged: bool) -> None:
    """Close an unwanted file. Closing a file that is not ``staged`` would make it visible, so it is
    discarded and marked as closed, which keeps garbage collection from closing it."""
    with contextlib.suppress(Exception):
        if staged:
            file.close()
        else:
            file.discard()
    with contextlib.suppress(Exception):
        file.closed = True


def _sync_file(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_names(folder: str, root: str) -> None:
    """Make the names of the file, its folder, and all folders up to the root durable."""
    while len(folder) >= len(os.path.dirname(root)):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            sync_folder(fd)
        finally:
            os.close(fd)
        if folder == os.path.dirname(folder):
            return
        folder = os.path.dirname(folder)
