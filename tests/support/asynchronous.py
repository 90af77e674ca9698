"""A driver of an asynchronous client, as an outside author would write one. The client is a memory
driver whose answers take time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar

from holdfast.drivers.asynchronous import AsyncDriver, AsyncUpload
from holdfast.drivers.contract import Buffer, Driver, ObjectInfo
from holdfast.drivers.memory import MemoryDriver
from holdfast.drivers.options import Option, integer, option_values
from holdfast.drivers.uri import Uri
from holdfast.errors import HoldfastError, StorageError


@contextmanager
def dict_errors(doing: str, uri: str, key: str) -> Iterator[None]:
    """Translate the client's errors."""
    try:
        yield
    except HoldfastError as error:
        error.uri = uri
        raise
    except ValueError as error:
        raise StorageError(f"{doing} failed: {error}", uri=uri, key=key) from error


async def answer() -> None:
    """Yield to the event loop a few times, as a slow server would."""
    for _ in range(3):
        await asyncio.sleep(0)


class DictDriver(AsyncDriver):
    """Objects in a dict of this process."""

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "concurrency": Option(integer(1, 64), 8, "operations in flight")
    }
    remote = False

    def __init__(self, uri: Uri) -> None:
        super().__init__(uri, errors=dict_errors)
        option_values(self.OPTIONS, uri)
        self.client = MemoryDriver(uri.location)
        self.traits = self.client.traits
        self.stuck: set[str] = set()
        """Keys whose uploads cannot be dropped."""
        self.dropped: list[str] = []

    async def _fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        await answer()
        return await self.client.fetch(key, start, nbytes)

    async def _get(self, key: str) -> bytes:
        await answer()
        return await self.client.get(key)

    async def _stat(self, key: str) -> ObjectInfo:
        await answer()
        return await self.client.stat(key)

    async def _list(self, prefix: str) -> AsyncGenerator[list[ObjectInfo], None]:
        async for found in self.client.list(prefix):
            await answer()
            yield [found]

    def copies_from(self, source: Driver) -> bool:
        return isinstance(source, DictDriver) and self.client.copies_from(source.client)

    links_from = copies_from

    async def _link(self, key: str, source: Driver, source_key: str) -> None:
        await answer()
        assert isinstance(source, DictDriver)
        await self.client.link(key, source.client, source_key)

    async def _delete(self, key: str) -> None:
        await answer()
        await self.client.delete(key)

    async def _delete_all(self, prefix: str) -> None:
        await answer()
        await self.client.delete_all(prefix)

    async def _sweep(self, prefix: str) -> None:
        await answer()

    def _upload(self, key: str, nbytes: int) -> AsyncUpload:
        return _DictUpload(self, key, nbytes)

    async def _disconnect(self) -> None:
        await answer()


class _DictUpload(AsyncUpload):
    def __init__(self, driver: DictDriver, key: str, nbytes: int) -> None:
        super().__init__(driver, key, nbytes)
        self._driver = driver
        self._content = bytearray(nbytes)

    async def _begin(self) -> None:
        await answer()

    async def _write(self, start: int, data: Buffer) -> None:
        await answer()
        self._content[start : start + len(data)] = data

    async def _copy_range(
        self, start: int, source: Driver, key: str, key_start: int, nbytes: int
    ) -> None:
        await self._write(start, await source.fetch(key, key_start, nbytes))

    async def _commit(self, *, exclusive: bool) -> None:
        await answer()
        content = bytes(self._content[: self.written.nbytes])
        await self._driver.client.put(self.key, content, exclusive=exclusive)

    async def _drop(self) -> None:
        await answer()
        if self.key in self._driver.stuck:
            raise ValueError("the client fails")
        self._driver.dropped.append(self.key)
