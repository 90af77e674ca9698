"""``memory://name``: objects in a dict. The reference model that every other driver is tested
against.

Drivers with the same name share their objects for the life of the process; ``memory://`` is private
to its driver. ``memory://name/a/b`` is rooted at the key ``a/b`` of ``memory://name``.

Scope: correct and simple. It copies all data, and is only as durable as the process.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import ClassVar

from ..errors import DamagedError, ExistsError, NotFoundError, StorageError
from .contract import Buffer, CopyTraits, Driver, ObjectInfo, Traits, Upload, check_key, check_small
from .options import Option
from .ranges import Ranges
from .uri import Uri, root_key

_Store = dict[str, tuple[bytes, float]]
"""Key → content and time of the last write."""

STORES: dict[str, _Store] = {}
"""Every named store of this process. Tests use it to bypass the driver."""


class MemoryDriver(Driver):
    """Objects in a dict of this process. Tests may read and modify ``objects``."""

    remote: ClassVar[bool] = False
    OPTIONS: ClassVar[Mapping[str, Option]] = {}

    def __init__(self, location: str = "") -> None:
        """Bind to the store named by ``location``: a name, or a name and prefix; empty for a
        private store."""
        name, _, prefix = location.partition("/")
        self.uri = f"memory://{location}"
        self.traits = Traits(
            part_nbytes=16 << 20,
            part_min_nbytes=1,
            align_nbytes=1,
            concurrency=8,  # brings no throughput, but exercises concurrency in callers
            coalesce_nbytes=0,
            part_order="any",
            exclusive_is_atomic=True,
            shared=False,
            copies=CopyTraits(),
            links=True,
            in_process=True,
        )
        root = root_key(prefix, Uri("memory", location))
        self._prefix = f"{root}/" if root else ""
        if name:
            self.objects: _Store = STORES.setdefault(name, {})
        else:
            self.objects = {}
        self._closed = False

    @classmethod
    def open(cls, uri: Uri) -> MemoryDriver:
        """Return the driver for ``uri``. There are no options."""
        return cls(uri.location)

    async def read(self, key: str, start: int, into: Buffer) -> None:
        data, _ = self._lookup(key)
        stop = start + len(into)
        if not 0 <= start <= stop <= len(data):
            raise DamagedError(
                f"object ends at byte {len(data)}, before {stop}", uri=self.uri, key=key
            )
        into[:] = data[start:stop]

    async def create(self, key: str, nbytes: int) -> Upload:
        self._path(key)
        return _MemoryUpload(self, key, nbytes)

    def copies_from(self, source: Driver) -> bool:
        return isinstance(source, MemoryDriver) and source.objects is self.objects

    links_from = copies_from

    async def link(self, key: str, source: Driver, source_key: str) -> None:
        """See :meth:`Driver.link`. Objects never change, so both keys share one."""
        if not (isinstance(source, MemoryDriver) and self.links_from(source)):
            message = f"cannot link to {source.uri}: not the same storage"
            raise StorageError(message, uri=self.uri, key=key)
        found = source._lookup(source_key)
        path = self._path(key)
        if self.objects.setdefault(path, found)[0] is not found[0]:
            raise ExistsError("the key is another object", uri=self.uri, key=key)

    async def get(self, key: str) -> bytes:
        data, _ = self._lookup(key)
        check_small(len(data), self.uri, key)
        return data

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        path = self._path(key)
        if exclusive and path in self.objects:
            raise ExistsError("the object already exists", uri=self.uri, key=key)
        self.objects[path] = (bytes(data), time.time())

    async def stat(self, key: str) -> ObjectInfo:
        data, modified_s = self._lookup(key)
        return ObjectInfo(key, len(data), modified_s)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        for path in self._below(prefix):
            if path in self.objects:  # the caller may have deleted it during iteration
                data, modified_s = self.objects[path]
                yield ObjectInfo(path.removeprefix(self._prefix), len(data), modified_s)

    async def delete(self, key: str) -> None:
        self.objects.pop(self._path(key), None)

    async def delete_all(self, prefix: str) -> None:
        self._path(prefix)
        for path in self._below(prefix):
            del self.objects[path]

    async def sweep(self, prefix: str) -> None:
        """See :meth:`Driver.sweep`. Dropped uploads leave nothing behind here."""
        self._path(prefix)

    async def close(self) -> None:
        """See :meth:`Driver.close`. Named stores outlive their drivers."""
        self._closed = True

    def _path(self, key: str) -> str:
        """Return the object's key in the dict. Raises UriError for an unsafe key, and StorageError
        after close()."""
        self._check_open(key)
        return self._prefix + check_key(key, uri=self.uri)

    def _check_open(self, key: str) -> None:
        if self._closed:
            raise StorageError("the driver is closed", uri=self.uri, key=key)

    def _lookup(self, key: str) -> tuple[bytes, float]:
        path = self._path(key)
        try:
            return self.objects[path]
        except KeyError as error:
            raise NotFoundError("no such object", uri=self.uri, key=key) from error

    def _below(self, prefix: str) -> tuple[str, ...]:
        if not prefix:
            self._check_open(prefix)
            return tuple(path for path in self.objects if path.startswith(self._prefix))
        whole = self._path(prefix)
        return tuple(path for path in self.objects if path == whole or path.startswith(whole + "/"))


class _MemoryUpload(Upload):
    def __init__(self, driver: MemoryDriver, key: str, nbytes: int) -> None:
        self._driver = driver
        self._key = key
        self._written = Ranges(nbytes, uri=driver.uri, key=key)
        self._content = bytearray(nbytes)

    async def write(self, start: int, data: Buffer) -> None:
        self._driver._check_open(self._key)
        self._written.check(start, len(data))
        self._content[start : start + len(data)] = data
        self._written.add(start, len(data))

    async def copy(self, start: int, source: Driver, key: str, key_start: int, nbytes: int) -> None:
        data = await source.fetch(key, key_start, nbytes)
        await self.write(start, data)

    async def commit(self, nbytes: int | None = None) -> None:
        self._written.check_open()
        content = memoryview(self._content)
        await self.abort()
        self._written.check_complete(nbytes)
        await self._driver.put(self._key, bytes(content[: self._written.nbytes]))

    async def abort(self) -> None:
        self._written.end()
        self._content = bytearray()
