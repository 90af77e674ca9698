"""The part of a driver that is the same for every asynchronous client.

Each method of the contract has a twin with an underscore, which a driver writes: it makes the
client's requests, and raises the client's errors. The method itself checks the key, refuses the
call once the driver is closed, runs it to its end, and translates what it raised: see
:class:`Tasks`. Blocking clients have :class:`Threads`.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, ClassVar, Self

from ..errors import StorageError
from .contract import Buffer, Driver, ObjectInfo, Upload, check_key
from .options import Option
from .ranges import Ranges
from .tasks import Tasks, to_the_end
from .uri import Uri

__all__ = ["AsyncDriver", "AsyncUpload"]

CLOSE_TIMEOUT_S = 60.0
"""How long close() waits for calls that run, and then for unfinished uploads to be dropped."""


class AsyncDriver(Driver):
    """A driver of an asynchronous client. A subclass sets ``traits``, and writes what is abstract
    here.

    Twins may call each other, but not the public methods: those are refused once the driver is
    closing.
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = {}

    def __init__(
        self, uri: Uri, *, errors: Callable[[str, str, str], AbstractContextManager[Any]]
    ) -> None:
        """Does no I/O. For ``errors`` see :class:`Tasks`."""
        self.uri = uri.root
        self.tasks = Tasks(uri=self.uri, errors=errors)
        self._errors = errors
        self._uploads: set[AsyncUpload] = set()

    @classmethod
    def open(cls, uri: Uri) -> Self:
        """The driver for ``uri``; a subclass is made from that alone."""
        make: Callable[[Uri], Self] = cls
        return make(uri)

    @abstractmethod
    async def _fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        """See :meth:`Driver.fetch`."""

    @abstractmethod
    async def _get(self, key: str) -> bytes:
        """See :meth:`Driver.get`."""

    @abstractmethod
    async def _stat(self, key: str) -> ObjectInfo:
        """See :meth:`Driver.stat`."""

    @abstractmethod
    def _list(self, prefix: str) -> AsyncGenerator[Sequence[ObjectInfo], None]:
        """See :meth:`Driver.list`; in batches: an answer of the server, a folder."""

    @abstractmethod
    async def _delete(self, key: str) -> None:
        """See :meth:`Driver.delete`."""

    @abstractmethod
    async def _delete_all(self, prefix: str) -> None:
        """See :meth:`Driver.delete_all`."""

    @abstractmethod
    async def _sweep(self, prefix: str) -> None:
        """See :meth:`Driver.sweep`."""

    @abstractmethod
    def _upload(self, key: str, nbytes: int) -> AsyncUpload:
        """A new upload, of which the storage has not heard yet."""

    @abstractmethod
    async def _disconnect(self) -> None:
        """Let go of the client, if there is one. Safe to call twice."""

    async def read(self, key: str, start: int, into: Buffer) -> None:
        into[:] = await self.fetch(key, start, len(into))

    async def fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        return await self.tasks.run("read", key, self._fetch, key, start, nbytes)

    async def get(self, key: str) -> bytes:
        return await self.tasks.run("get", key, self._get, key)

    async def create(self, key: str, nbytes: int) -> AsyncUpload:
        upload = self._upload(check_key(key, uri=self.uri), nbytes)
        self._uploads.add(upload)
        try:
            await self.tasks.run("create", key, upload._begin)
        except BaseException:  # cancelled, too: by then the storage may have heard of it
            await upload.abort()
            raise
        return upload

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        """See :meth:`Driver.put`. An upload of one part; override it where the storage does that in
        one request."""
        upload = await self.create(key, len(data))
        try:
            await upload.write(0, memoryview(data))
            await upload.finish(None, exclusive=exclusive)
        except BaseException:
            await upload.abort()
            raise

    async def stat(self, key: str) -> ObjectInfo:
        return await self.tasks.run("stat", key, self._stat, key)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        batches = self._list(prefix)
        try:
            while (
                batch := await self.tasks.run("list", prefix or None, _next, batches)
            ) is not None:
                for found in batch:
                    yield found
        finally:
            await batches.aclose()

    async def delete(self, key: str) -> None:
        await self.tasks.run("delete", key, self._delete, key)

    async def delete_all(self, prefix: str) -> None:
        await self.tasks.run("delete", prefix, self._delete_all, prefix)

    async def sweep(self, prefix: str) -> None:
        await self.tasks.run("sweep", prefix, self._sweep, prefix)

    async def close(self) -> None:
        """See :meth:`Driver.close`. Raises StorageDownError where calls do not end, once all has
        been let go."""
        try:
            await self.tasks.close(CLOSE_TIMEOUT_S)
        finally:
            await to_the_end(self._release())

    async def _release(self) -> None:
        with suppress(TimeoutError):  # what is not dropped by then is left to a sweep
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                for upload in tuple(self._uploads):
                    with suppress(StorageError), self._errors("abort", self.uri, upload.key):
                        await upload.end()
        with self._errors("close", self.uri, ""):
            await self._disconnect()


class AsyncUpload(Upload):
    """One upload of an :class:`AsyncDriver`. A subclass writes what is abstract here."""

    def __init__(self, driver: AsyncDriver, key: str, nbytes: int) -> None:
        """Raises StorageError for a negative size."""
        self.key = key
        self.written = Ranges(nbytes, uri=driver.uri, key=key)
        """What has been written. When :meth:`_commit` is called it is complete, and has the size of
        the object."""
        self._made_by = driver
        self._over = False
        self._committed = False

    @abstractmethod
    async def _begin(self) -> None:
        """Have the storage begin the upload."""

    @abstractmethod
    async def _write(self, start: int, data: Buffer) -> None:
        """Send a part, which lies within the object. Not called for an empty one."""

    @abstractmethod
    async def _commit(self, *, exclusive: bool) -> None:
        """Make the object durable and visible, whole; with ``exclusive`` raise ExistsError where
        the key is taken."""

    @abstractmethod
    async def _drop(self) -> None:
        """Remove what the upload has left, if there is anything. May be called at any time but
        after a commit that succeeded, and more than once."""

    async def write(self, start: int, data: Buffer) -> None:
        self._check_open()
        self.written.check(start, len(data))
        if data:
            await self._made_by.tasks.run("write", self.key, self._write, start, data)
        self.written.add(start, len(data))

    async def commit(self, nbytes: int | None = None) -> None:
        await self.finish(nbytes, exclusive=False)

    async def finish(self, nbytes: int | None, *, exclusive: bool) -> None:
        """:meth:`commit`, or the end of an exclusive put."""
        self._check_open()
        self._over = True
        await self._made_by.tasks.run("commit", self.key, self._finish, nbytes, exclusive)

    async def abort(self) -> None:
        self._over = True
        # Either the driver is closed, which has dropped it, or a sweep will find what is left.
        with suppress(StorageError):
            await self._made_by.tasks.run("abort", self.key, self.end)

    async def _finish(self, nbytes: int | None, exclusive: bool) -> None:
        try:
            self.written.check_complete(nbytes)
            await self._commit(exclusive=exclusive)
            self._committed = True
        finally:
            await self.end()

    async def end(self) -> None:
        """Drop what is not committed. Raises the client's errors."""
        if not self._committed:
            await self._drop()
        self._made_by._uploads.discard(self)

    def _check_open(self) -> None:
        if self._over:
            message = "the upload is over: committed, failed or aborted"
            raise StorageError(message, uri=self._made_by.uri, key=self.key)


async def _next(batches: AsyncIterator[Sequence[ObjectInfo]]) -> Sequence[ObjectInfo] | None:
    return await anext(batches, None)
