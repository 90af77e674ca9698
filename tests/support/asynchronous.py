"""A driver of an asynchronous client, as an outside author would write one: the client is a dict
whose answers take time."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar

from holdfast.drivers.asynchronous import AsyncDriver, AsyncUpload
from holdfast.drivers.contract import Buffer, ObjectInfo, Traits, check_small
from holdfast.drivers.options import Option, integer, option_values
from holdfast.drivers.uri import Uri
from holdfast.errors import DamagedError, ExistsError, HoldfastError, NotFoundError, StorageError

__all__ = ["DictDriver"]

_STORES: dict[str, dict[str, tuple[bytes, float]]] = {}


@contextmanager
def dict_errors(doing: str, uri: str, key: str) -> Iterator[None]:
    """Translate the errors of the client into Holdfast's."""
    try:
        yield
    except HoldfastError:
        raise
    except KeyError as error:
        raise NotFoundError("no such object", uri=uri, key=key) from error
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
        name, _, prefix = uri.location.partition("/")
        self.objects = _STORES.setdefault(name, {})
        self.prefix = f"{prefix}/" if prefix else ""
        self.stuck: set[str] = set()
        """Keys whose uploads cannot be dropped."""
        self.dropped: list[str] = []
        concurrency = option_values(self.OPTIONS, uri)["concurrency"]
        self.traits = Traits(
            1 << 20, 1, 1, concurrency, 0, "any", exclusive_is_atomic=True, shared=False
        )

    async def _fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        await answer()
        data = self.objects[self.prefix + key][0]
        if not 0 <= start <= start + nbytes <= len(data):
            raise DamagedError("the object ends before that", uri=self.uri, key=key)
        return memoryview(data)[start : start + nbytes]

    async def _get(self, key: str) -> bytes:
        check_small((await self._stat(key)).nbytes, self.uri, key)
        return self.objects[self.prefix + key][0]

    async def _stat(self, key: str) -> ObjectInfo:
        await answer()
        data, modified_s = self.objects[self.prefix + key]
        return ObjectInfo(key, len(data), modified_s)

    async def _list(self, prefix: str) -> AsyncGenerator[list[ObjectInfo], None]:
        below = self._below(prefix)
        while batch := list(itertools.islice(below, 100)):
            await answer()
            yield [
                ObjectInfo(path.removeprefix(self.prefix), len(data), at_s)
                for path, (data, at_s) in batch
            ]

    def _below(self, prefix: str) -> Iterator[tuple[str, tuple[bytes, float]]]:
        at = self.prefix + prefix
        begin = f"{at}/" if prefix else at
        found = [
            (path, held)
            for path, held in self.objects.items()
            if path == at or path.startswith(begin)
        ]
        return iter(found)

    async def _delete(self, key: str) -> None:
        await answer()
        self.objects.pop(self.prefix + key, None)

    async def _delete_all(self, prefix: str) -> None:
        for path, _ in self._below(prefix):
            await self._delete(path.removeprefix(self.prefix))

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

    async def _commit(self, *, exclusive: bool) -> None:
        await answer()
        path = self._driver.prefix + self.key
        if exclusive and path in self._driver.objects:
            raise ExistsError("the object already exists", uri=self._driver.uri, key=self.key)
        self._driver.objects[path] = (bytes(self._content[: self.written.nbytes]), time.time())

    async def _drop(self) -> None:
        await answer()
        if self.key in self._driver.stuck:
            raise ValueError("the client fails")
        self._driver.dropped.append(self.key)
