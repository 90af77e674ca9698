"""The driver contract in terms of obstore; what differs between kinds of stores is left to subclasses.

A key lies below the root as it is: in ``s3://bucket/run`` the key ``a/b`` is the object ``run/a/b``, with what object
stores do not take in a name percent-encoded. A folder is nothing: a prefix that keys share.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, TypeVar
from urllib.parse import unquote
from weakref import WeakSet

import numpy as np

from ...errors import DamagedError, ExistsError, NotFoundError, StorageDownError, StorageError, UriError
from ..contract import Buffer, Driver, ObjectInfo, Traits, Upload, check_key, check_small
from ..threads import Threads
from ..uri import Uri
from . import runtime
from .common import Settings, encoded
from .failures import failures, missing_container
from .upload import PartsUpload, Target, WholeUpload, to_the_end

__all__ = ["ObjectDriver"]

T = TypeVar("T")

CLOSE_TIMEOUT_S = 60.0
SWEEP_QUIET_S = 3600.0
"""How long nothing must have come to an unfinished upload for it to be swept."""
_NBYTES_MAX = 1 << 62
"""Beyond the size of anything, and within what obstore takes for a number."""
_BATCH = 1000
"""Objects of one listing, and of one bulk delete."""


class ObjectDriver(Driver):
    """Objects in a bucket, below a root. Touches nothing before its first operation."""

    def __init__(self, uri: Uri, root: str, settings: Settings) -> None:
        self.uri = Uri(uri.scheme, uri.location).redacted
        self.traits = Traits(
            part_nbytes=settings.part_nbytes,
            part_min_nbytes=1,
            align_nbytes=1,
            concurrency=settings.concurrency,
            coalesce_nbytes=1 << 20,
            part_order="ascending",
            exclusive_is_atomic=settings.conditional,
            shared=True,
            hands_over=True,
            upload_nbytes=settings.part_nbytes,
        )
        self._root, self._settings = root, settings
        self._threads = Threads(4, uri=self.uri)
        self._connecting = asyncio.Lock()
        self._connected: Any = None
        self._container_seen = False
        self._uploads: WeakSet[PartsUpload | WholeUpload] = WeakSet()

    @property
    @abstractmethod
    def _container(self) -> tuple[str, ...]:
        """Names the bucket, for all drivers of this process alike."""

    @abstractmethod
    def _connect(self) -> Any:
        """An obstore store for the bucket. Blocks. Raises StorageError."""

    def _disconnect(self) -> None:
        """Let go of what :meth:`_connect` has opened besides. Does not block; safe to call twice."""

    async def _drop_unfinished(self, path: str, *, whole_key: bool, quiet_s: float, began_within_s: float) -> None:
        """Drop unfinished uploads at ``path``, or also below it, that have been quiet for so long, and began within so
        long. Where the store forgets them by itself, this does nothing."""

    async def read(self, key: str, start: int, into: Buffer) -> None:
        data = await self.fetch(key, start, len(into))
        if into:
            await self._threads.run(np.copyto, np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8))

    async def fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        """See :meth:`Driver.fetch`. One request; where it was received is where it stays."""
        path = self._path(key)
        if start < 0:
            raise StorageError(f"there are no bytes before the beginning, such as {start}", uri=self.uri, key=key)
        if not nbytes or start > _NBYTES_MAX:
            await self._check_reach(key, start + nbytes)
            return memoryview(b"")
        try:
            data = memoryview(await self._call("read", key, "get_range_async", path, start=start, length=nbytes))
        except StorageError as error:
            if not isinstance(error, NotFoundError | StorageDownError):
                await self._check_reach(key, start + nbytes)  # a range beyond the end is refused
            raise
        if len(data) < nbytes:
            raise self._short(key, start + len(data), start + nbytes)
        return data

    async def _check_reach(self, key: str, stop: int) -> None:
        nbytes = (await self.stat(key)).nbytes
        if stop > nbytes:
            raise self._short(key, nbytes, stop)

    def _short(self, key: str, nbytes: int, stop: int) -> DamagedError:
        return DamagedError(f"object ends at byte {nbytes}, before {stop}", uri=self.uri, key=key)

    async def create(self, key: str, nbytes: int) -> Upload:
        """See :meth:`Driver.create`. Up to a part's size it is one request, made by ``commit``; above, a multipart
        upload. Two uploads from one process to one key leave the cleaning up after a failure to the last of them."""
        path = self._path(key)
        await self._connection()

        async def put(data: Any, **how: Any) -> Any:
            return await self._ask("put_async", path, data, **how)

        async def stored_nbytes() -> int:
            return (await self.stat(key)).nbytes

        async def drop_unfinished(began_within_s: float) -> None:
            await self._drop_unfinished(path, whole_key=True, quiet_s=0, began_within_s=began_within_s)

        s = self._settings
        place = (*self._container, path)
        target = Target(
            self.uri, key, place, nbytes, s.part_nbytes, s.concurrency, s.limit_s, put, stored_nbytes, drop_unfinished
        )
        upload = PartsUpload(target) if nbytes > s.part_nbytes else WholeUpload(target)
        self._uploads.add(upload)
        await upload.begin()
        return upload

    async def get(self, key: str) -> bytes:
        path = self._path(key)
        response = await self._call("get", key, "get_async", path)
        check_small(response.meta["size"], self.uri, key)
        return bytes(await self._timed("get", key, response.bytes_async()))

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        """See :meth:`Driver.put`. ``exclusive`` is one conditional request. With ``conditional=off`` it is a look, then
        a put: two that race may both succeed, and the traits say so. Cancelled while it runs, it ends first."""
        path = self._path(key)
        conditional = self._settings.conditional
        if exclusive and not conditional:
            await self._look(key)
        mode = "create" if exclusive and conditional else "overwrite"
        try:
            await to_the_end(self._call("put", key, "put_async", path, data, mode=mode, use_multipart=False))
        except NotFoundError as error:  # there is nothing else that could be missing
            raise missing_container(self.uri, key) from error

    async def _look(self, key: str) -> None:
        with contextlib.suppress(NotFoundError):
            await self.stat(key)
            raise ExistsError("object exists already", uri=self.uri, key=key)

    async def stat(self, key: str) -> ObjectInfo:
        path = self._path(key)
        try:
            found = await self._call("stat", key, "head_async", path)
        except NotFoundError as error:
            await self._check_container(key)  # the answer to HEAD has no body that would say which is missing
            raise error from error.__cause__
        return ObjectInfo(key, found["size"], found["last_modified"].timestamp())

    async def _check_container(self, key: str) -> None:
        if not self._container_seen:
            await self._list_batch(key, await self._listing(self._root or None, 1))

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        path = self._path(prefix) if prefix else self._root
        if prefix:
            with contextlib.suppress(NotFoundError):
                yield await self.stat(prefix)
        batches = await self._listing(path or None, _BATCH)
        while batch := await self._list_batch(prefix, batches):
            for found in batch:
                yield ObjectInfo(self._key(found["path"]), found["size"], found["last_modified"].timestamp())

    async def _listing(self, path: str | None, batch: int) -> Any:
        await self._connection()
        return self._ask("list", path, chunk_size=batch)

    async def _list_batch(self, prefix: str, batches: Any) -> Any:
        batch = await self._timed("list", prefix, _next(batches))
        self._container_seen = True
        return batch

    async def delete(self, key: str) -> None:
        path = self._path(key)
        with contextlib.suppress(NotFoundError):
            await to_the_end(self._call("delete", key, "delete_async", path))

    async def delete_all(self, prefix: str) -> None:
        """See :meth:`Driver.delete_all`. Many at a time where the store can; unfinished uploads below go, too, alive or
        not."""
        path = self._path(prefix)
        keys = [info.key async for info in self.list(prefix)]
        lanes = self._settings.concurrency
        step = min(_BATCH, max(1, -(-len(keys) // lanes)))
        batches = iter([keys[begin : begin + step] for begin in range(0, len(keys), step)])

        async def lane() -> None:
            for batch in batches:
                await self._delete_batch(prefix, batch)

        for outcome in await asyncio.gather(*(lane() for _ in range(lanes)), return_exceptions=True):
            if outcome is not None:
                raise outcome
        await self._drop_unfinished(path, whole_key=False, quiet_s=0, began_within_s=float("inf"))

    async def _delete_batch(self, prefix: str, keys: Sequence[str]) -> None:
        try:
            await to_the_end(self._call("delete", prefix, "delete_async", [self._path(key) for key in keys]))
        except NotFoundError:  # somebody else deletes, too, and this store minds: one by one, then
            for key in keys:
                await self.delete(key)

    async def sweep(self, prefix: str) -> None:
        """See :meth:`Driver.sweep`. An unfinished upload to which nothing came for an hour, by the store's own clock, is
        taken for dead."""
        path = self._path(prefix)
        await self._drop_unfinished(path, whole_key=False, quiet_s=SWEEP_QUIET_S, began_within_s=float("inf"))

    async def close(self) -> None:
        """See :meth:`Driver.close`. Aborts uploads that are neither committed nor aborted."""
        for upload in tuple(self._uploads):
            await upload.abort()
        self._connected = None
        self._disconnect()
        await self._threads.close(CLOSE_TIMEOUT_S)

    def _path(self, key: str) -> str:
        check_key(key, uri=self.uri)
        try:
            name = encoded(key)
        except UnicodeEncodeError as error:
            raise UriError(f"key {key!r} is no Unicode text", uri=self.uri, key=key) from error
        return f"{self._root}/{name}" if self._root else name

    def _key(self, path: str) -> str:
        return unquote(path.removeprefix(f"{self._root}/" if self._root else ""))

    async def _connection(self) -> None:
        """See that there is one. Raises StorageError."""
        runtime.use(self.uri)
        async with self._connecting:
            if self._connected is None:
                self._connected = await self._threads.run(self._connect)

    def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a function of obstore. Nobody but this driver holds its store, so close() lets go of the connections."""
        import obstore

        if self._connected is None:
            raise StorageError("the driver is closed", uri=self.uri)
        return getattr(obstore, method)(self._connected, *args, **kwargs)

    async def _call(self, doing: str, key: str, method: str, *args: Any, **kwargs: Any) -> Any:
        await self._connection()
        with failures(doing, self.uri, key):
            work = self._ask(method, *args, **kwargs)
        return await self._timed(doing, key, work)

    async def _timed(self, doing: str, key: str, work: Awaitable[T]) -> T:
        """What ``work``, which is obstore's, gives. Raises StorageError."""
        limit_s = self._settings.limit_s
        with failures(doing, self.uri, key):
            try:
                return await asyncio.wait_for(work, limit_s)
            except TimeoutError as error:
                message = f"{doing} failed: no answer for {limit_s:g} s"
                raise StorageDownError(message, uri=self.uri, key=key) from error


async def _next(batches: Any) -> Any:
    """The next batch of a listing, or an empty one. (The builtin ``anext`` with a default cannot await obstore's.)"""
    try:
        return await anext(batches)
    except StopAsyncIteration:
        return ()
