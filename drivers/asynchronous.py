"""Base classes that handle cancellation, closing and errors for drivers.

Each public method of the contract has an abstract counterpart with a leading underscore, which the
driver implements with plain client calls. The public method checks the key, rejects calls after
close(), runs the call to completion and translates the client's errors (:class:`Tasks`). Calls of
blocking clients run through :class:`Threads`.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, ClassVar, Self

from ..errors import StorageError
from .contract import Buffer, Driver, ObjectInfo, Upload, check_key
from .options import Option
from .ranges import Ranges
from .tasks import GRACE_S, Tasks, to_the_end
from .uri import Uri

__all__ = ["AsyncDriver", "AsyncUpload"]

CLOSE_TIMEOUT_S = 60.0
"""Seconds that close() waits for running calls, and then again for open uploads to be dropped."""


class AsyncDriver(Driver):
    """A driver on top of an asynchronous client. Subclasses set ``traits`` and implement the
    abstract methods.

    Underscore methods may call each other, but not the public methods, which are rejected as soon
    as the driver starts closing.
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = {}

    def __init__(
        self,
        uri: Uri,
        *,
        errors: Callable[[str, str, str], AbstractContextManager[Any]] = lambda *_: nullcontext(),
        grace_s: float = GRACE_S,
    ) -> None:
        """Do no I/O. ``errors`` and ``grace_s`` are described in :class:`Tasks`."""
        self.uri = uri.root
        self.tasks = Tasks(uri=self.uri, errors=errors, grace_s=grace_s)
        self._errors = errors
        self._uploads: set[AsyncUpload] = set()

    @classmethod
    def open(cls, uri: Uri) -> Self:
        """Return the driver for ``uri``. Works for subclasses whose constructor takes only the
        URI."""
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
        """See :meth:`Driver.list`. Yields batches: one server response, or one folder."""

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
        """Return a new upload. Makes no request yet."""

    @abstractmethod
    async def _disconnect(self) -> None:
        """Close the client if it is open. Safe to call twice."""

    async def read(self, key: str, start: int, into: Buffer) -> None:
        into[:] = await self.fetch(key, start, len(into))

    async def fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        return await self.tasks.run("read", key, self._fetch, key, start, nbytes)

    async def _link(self, key: str, source: Driver, source_key: str) -> None:
        """See :meth:`Driver.link`; ``links_from`` has accepted ``source``. Override it if
        ``traits.links`` is set."""
        raise NotImplementedError

    async def link(self, key: str, source: Driver, source_key: str) -> None:
        check_key(key, uri=self.uri)
        if not self.links_from(source):
            message = f"cannot link to {source.uri}: not the same storage"
            raise StorageError(message, uri=self.uri, key=key)
        await self.tasks.run("link", key, self._link, key, source, source_key)

    async def get(self, key: str) -> bytes:
        return await self.tasks.run("get", key, self._get, key)

    async def create(self, key: str, nbytes: int) -> AsyncUpload:
        upload = self._upload(check_key(key, uri=self.uri), nbytes)
        self._uploads.add(upload)
        try:
            await self.tasks.run("create", key, upload._begin)
        except BaseException:  # also on cancellation: the storage may already know of the upload
            await upload.abort()
            raise
        return upload

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        """See :meth:`Driver.put`. Uploads a single part; override where the storage can do it in
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
        """See :meth:`Driver.close`. Raises StorageDownError if calls are stuck, after releasing
        everything."""
        try:
            await self.tasks.close(CLOSE_TIMEOUT_S)
        finally:
            await to_the_end(self._release())

    async def _release(self) -> None:
        with suppress(TimeoutError):  # a later sweep collects the rest
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                for upload in tuple(self._uploads):
                    with suppress(StorageError), self._errors("abort", self.uri, upload.key):
                        await upload.end()
        with self._errors("close", self.uri, ""):
            await self._disconnect()


class AsyncUpload(Upload):
    """One upload of an :class:`AsyncDriver`. Subclasses implement the abstract methods."""

    def __init__(self, driver: AsyncDriver, key: str, nbytes: int) -> None:
        """Raise StorageError if the size is negative."""
        self.key = key
        self.written = Ranges(nbytes, uri=driver.uri, key=key)
        """Byte ranges written so far. Complete, with the final object size, when :meth:`_commit` is
        called."""
        self._made_by = driver
        self._committed = False

    @abstractmethod
    async def _begin(self) -> None:
        """Start the upload on the storage."""

    @abstractmethod
    async def _write(self, start: int, data: Buffer) -> None:
        """Send one non-empty part that lies within the object."""

    async def _copy_range(
        self, start: int, source: Driver, key: str, key_start: int, nbytes: int
    ) -> None:
        """Copy one range, which lies within the object, from a driver that ``copies_from``
        accepts. Override it if ``traits.copies`` is set."""
        raise NotImplementedError

    @abstractmethod
    async def _commit(self, *, exclusive: bool) -> None:
        """Make the whole object durable and visible. With ``exclusive``, raise ExistsError if the
        key is taken."""

    @abstractmethod
    async def _drop(self) -> None:
        """Remove everything the upload left behind. May be called more than once, and at any time
        except after a successful commit."""

    async def write(self, start: int, data: Buffer) -> None:
        self.written.check(start, len(data))
        if data:
            await self._made_by.tasks.run("write", self.key, self._write, start, data)
        self.written.add(start, len(data))

    async def copy(self, start: int, source: Driver, key: str, key_start: int, nbytes: int) -> None:
        self.written.check(start, nbytes)
        if not self._made_by.copies_from(source):
            message = f"cannot copy from {source.uri}: not the same storage"
            raise StorageError(message, uri=self._made_by.uri, key=self.key)
        call = partial(self._copy_range, start, source, key, key_start, nbytes)
        await self._made_by.tasks.run("copy", self.key, call)
        self.written.add(start, nbytes)

    async def commit(self, nbytes: int | None = None) -> None:
        await self.finish(nbytes, exclusive=False)

    async def finish(self, nbytes: int | None, *, exclusive: bool) -> None:
        """Commit the upload; with ``exclusive``, only if the key is free."""
        self.written.check_open()
        self.written.end()
        await self._made_by.tasks.run("commit", self.key, self._finish, nbytes, exclusive)

    async def abort(self) -> None:
        self.written.end()
        # On failure, close() has already dropped the upload, or a sweep will.
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
        """Drop the upload unless it was committed. Raises the client's errors."""
        if not self._committed:
            await self._drop()
        self._made_by._uploads.discard(self)


async def _next(batches: AsyncIterator[Sequence[ObjectInfo]]) -> Sequence[ObjectInfo] | None:
    return await anext(batches, None)
