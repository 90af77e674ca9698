"""An upload to a local file: written to a temporary file next to its target and renamed on
commit."""

from __future__ import annotations

import contextlib

from ...errors import StorageError
from ..contract import Buffer, Upload
from ..ranges import Ranges
from ..threads import OperationThreads
from .files import NewFile, OpenFiles

__all__ = ["LocalUpload"]


class LocalUpload(Upload):
    """An upload to a file. Member of ``live`` from begin to end."""

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
            self._file.drop()  # on cancellation, the thread may already have created the file
            raise
        self._live.add(self)

    async def write(self, start: int, data: Buffer) -> None:
        self._written.check(start, len(data))
        await self._threads.operate("write", self._key, self._file.write, start, data)
        self._written.add(start, len(data))

    async def commit(self, nbytes: int | None = None) -> None:
        """See :meth:`Upload.commit`. If cancelled, it still runs to completion, so the object may
        become visible."""
        await self._threads.operate("commit", self._key, self._commit, nbytes)

    async def abort(self) -> None:
        with contextlib.suppress(StorageError):  # the driver is closed, and has already dropped it
            await self._threads.run(self.drop)

    def drop(self) -> None:
        """Remove the temporary file. Blocks; never raises."""
        self._file.drop()
        self._live.discard(self)

    def _begin(self) -> None:
        self._open_files.forget_deleted()  # frees space for the new file
        self._file.open()

    def _commit(self, nbytes: int | None) -> None:
        try:
            self._written.check_complete(nbytes)
            self._file.publish(self._written.nbytes)
        finally:
            self.drop()
            self._open_files.forget(self._key)
