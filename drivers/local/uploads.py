"""One object on its way: a temporary file beside its target, renamed by the commit."""

from __future__ import annotations

import contextlib

from ...errors import StorageError
from ..contract import Buffer, Upload
from ..ranges import Ranges
from ..threads import OperationThreads
from .files import NewFile, OpenFiles

__all__ = ["LocalUpload"]


class LocalUpload(Upload):
    """An upload to a file. It is in ``live`` from its beginning to its end."""

    def __init__(
        self,
        key: str,
        file: NewFile,
        written: Ranges,
        threads: OperationThreads,
        open_files: OpenFiles,
        live: set[LocalUpload],
    ) -> None:
        self._key = key
        self._file = file
        self._written = written
        self._threads = threads
        self._open_files = open_files
        self._live = live

    async def begin(self) -> None:
        """Create the temporary file. Raises StorageError."""
        try:
            await self._threads.operate("create", self._key, self._begin)
        except BaseException:
            self._file.drop()  # cancelled, but the thread had already made it
            raise
        self._live.add(self)

    async def write(self, start: int, data: Buffer) -> None:
        self._written.check(start, len(data))
        await self._threads.operate("write", self._key, self._file.write, start, data)
        self._written.add(start, len(data))

    async def commit(self, nbytes: int | None = None) -> None:
        """See :meth:`Upload.commit`. Cancelled while it runs, it ends first: the object may be
        visible afterwards."""
        await self._threads.operate("commit", self._key, self._commit, nbytes)

    async def abort(self) -> None:
        with contextlib.suppress(StorageError):  # the driver is closed, and has dropped it already
            await self._threads.run(self.drop)

    def drop(self) -> None:
        """Blocks; raises nothing."""
        self._file.drop()
        self._live.discard(self)

    def _begin(self) -> None:
        self._open_files.forget_deleted()  # room for what is to come
        self._file.open()

    def _commit(self, nbytes: int | None) -> None:
        try:
            self._written.check_complete(nbytes)
            self._file.publish(self._written.nbytes)
        finally:
            self.drop()
            self._open_files.forget(self._key)
