"""An upload through fsspec: a file written front to back, under a temporary name if an unfinished
file would be visible."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from ...errors import ExistsError, StorageError
from ..asynchronous import AsyncDriver, AsyncUpload
from ..contract import Buffer
from ..local.names import temporary_name
from ..local.tree import sync_path
from ..threads import Threads
from .tree import Tree


class FsspecUpload(AsyncUpload):
    """One file being written, under a temporary name if an unfinished file would be visible."""

    def __init__(
        self, driver: AsyncDriver, key: str, nbytes: int, tree: Tree, threads: Threads
    ) -> None:
        super().__init__(driver, key, nbytes)
        self._tree = tree
        self._threads = threads
        self._part_nbytes = driver.traits.part_nbytes
        self._target = self._tree.path(key)
        self._folder, _, name = self._target.rpartition("/")
        self._staged = self._tree.kind.appears != "closed"
        self._path = self._target
        if self._staged:
            self._path = f"{self._folder}/{temporary_name(name)}"
        self._position = 0
        self._file: Any = None

    async def _begin(self) -> None:
        """Create the file, and the folders above it if the file system has folders."""
        await self._threads.run(self._open)

    async def _write(self, start: int, data: Buffer) -> None:
        if start != self._position:
            raise self._wrong(f"bytes come in order: {self._position} is next, not {start}")
        await self._threads.run(self._append, data)

    async def _commit(self, *, exclusive: bool) -> None:
        """See :meth:`AsyncUpload._commit`. ``exclusive`` checks before it publishes: of two
        concurrent puts, both may succeed. If cancelled, this still runs to completion, so the
        object may become visible."""
        await self._threads.run(self._publish, exclusive)

    async def _drop(self) -> None:
        await self._threads.run(self._discard)

    # The methods below block.

    def _open(self) -> None:
        tree = self._tree
        if tree.kind.folders:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                if tree.fs.info(self._target)["type"] == "directory":
                    raise self._wrong("a folder has this name; objects lie below it")
            tree.fs.makedirs(self._folder, exist_ok=True)
        self._file = tree.fs.open(self._path, "wb", block_size=self._part_nbytes)

    def _append(self, data: Buffer) -> None:
        file = self._file
        if file is None:
            raise self.written.over()
        try:
            done = 0
            while done < len(data):
                count = file.write(data[done:])
                done += len(data) - done if count is None else count
        except BaseException:
            self._discard()  # an unknown part of it was written
            raise
        self._position += len(data)

    def _publish(self, exclusive: bool) -> None:
        """Make the file visible, whole and durable."""
        file = self._file
        tree = self._tree
        if file is None:
            raise self.written.over()
        if exclusive:
            with contextlib.suppress(FileNotFoundError):
                tree.info(self.key)
                raise ExistsError("the object already exists", uri=tree.uri, key=self.key)
        file.close()
        self._file = None
        if getattr(tree.fs, "local_file", False):
            sync_path(self._path, 0)
        if tree.kind.appears == "copied":
            tree.fs.cp_file(self._path, self._target)
            self._discard()
        elif self._staged:
            tree.fs.mv(self._path, self._target)
        if getattr(tree.fs, "local_file", False):
            _sync_names(self._folder, tree.root)
        if tree.kind.appears == "unknown" and tree.stat(self.key).nbytes != self.written.nbytes:
            raise self._wrong(
                "the file system did not put the new file in the place of the old one"
            )

    def _discard(self) -> None:
        """Discard the file unless it is published. Never raises."""
        tree = self._tree
        file = self._file
        self._file = None
        if file is not None:
            _close(file, staged=self._staged)
        if self._staged and tree.is_connected:
            with contextlib.suppress(Exception):
                tree.remove(self._path)

    def _wrong(self, message: str) -> StorageError:
        return StorageError(message, uri=self._tree.uri, key=self.key)


def _close(file: Any, *, staged: bool) -> None:
    """Close an unwanted file. Closing a file that is not ``staged`` would make it visible, so it is
    discarded and marked as closed, which keeps garbage collection from closing it."""
    with contextlib.suppress(Exception):
        if staged:
            file.close()
        else:
            file.discard()
    with contextlib.suppress(Exception):
        file.closed = True


def _sync_names(folder: str, root: str) -> None:
    """Make the names of the file, its folder, and all folders up to the root durable."""
    while len(folder) >= len(os.path.dirname(root)):
        sync_path(folder)
        if folder == os.path.dirname(folder):
            return
        folder = os.path.dirname(folder)
