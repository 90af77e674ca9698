"""Base class of all layers: a driver that forwards everything to the one below."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Container, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ..contract import Buffer, Driver, ObjectInfo, TakePiece, Traits, Upload

_running: ContextVar[asyncio.Timeout | None] = ContextVar("holdfast-deadline", default=None)


@asynccontextmanager
async def deadline(timeout_s: float | None) -> AsyncIterator[asyncio.Timeout]:
    """Cancel the body after ``timeout_s`` seconds (None: never), not counting time in
    :func:`waiting_for_a_turn`, and raise TimeoutError. The timeout's ``expired()`` is then true."""
    async with asyncio.timeout(timeout_s) as timeout:
        token = _running.set(timeout)
        try:
            yield timeout
        finally:
            _running.reset(token)


@contextmanager
def waiting_for_a_turn() -> Iterator[None]:
    """Pause the deadline of this task, if it has one, during the body."""
    timeout = _running.get()
    if timeout is None or (when_s := timeout.when()) is None or timeout.expired():
        yield
        return
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    timeout.reschedule(None)
    try:
        yield
    finally:
        timeout.reschedule(when_s + loop.time() - began_s)


LIST_BATCH = 1000
"""Entries of a listing that count as one operation: one request on most storages."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Operation:
    """One call on its way down. ``name`` is the method; ``nbytes`` is the amount of data, 0 if not
    yet known."""

    name: str
    key: str
    nbytes: int = 0

    def __str__(self) -> str:
        if self.key:
            return f"{self.name} of {self.key}"
        return self.name


class Layer(Driver):
    """Forwards every method of a driver and of its uploads. Layers override :meth:`around`, through
    which they all pass, or single methods."""

    def __init__(self, inner: Driver) -> None:
        self.inner = inner
        self.uri = inner.uri
        # Instance attributes that shadow the class variables.
        self.deviations = inner.deviations  # type: ignore[misc]
        self.remote = inner.remote  # type: ignore[misc]

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Traits of the driver below."""
        return self.inner.traits

    async def around(self, operation: Operation, call: Callable[[], Awaitable[T]]) -> T:
        """Perform one operation. Each ``call`` performs it again, except for ``list``, where it
        continues after the previous batch."""
        return await call()

    async def read(self, key: str, start: int, into: Buffer) -> None:
        await self.around(
            Operation("read", key, len(into)), partial(self.inner.read, key, start, into)
        )

    async def fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        """See :meth:`Driver.fetch`. Counts as a read."""
        return await self.around(
            Operation("read", key, nbytes), partial(self.inner.fetch, key, start, nbytes)
        )

    async def read_pieces(self, key: str, start: int, nbytes: int, take: TakePiece) -> None:
        """See :meth:`Driver.read_pieces`. Counts as a read. If a layer retries it, it resumes after
        the bytes already taken."""
        taken_nbytes = 0

        def take_and_count(piece: Buffer) -> None:
            nonlocal taken_nbytes
            take(piece)
            taken_nbytes += len(piece)

        async def rest() -> None:
            left_nbytes = nbytes - taken_nbytes
            await self.inner.read_pieces(key, start + taken_nbytes, left_nbytes, take_and_count)

        await self.around(Operation("read", key, nbytes), rest)

    async def create(self, key: str, nbytes: int) -> Upload:
        return await self._created(key, partial(self.inner.create, key, nbytes))

    def copies_from(self, source: Driver) -> bool:
        return self.inner.copies_from(bottom(source))

    async def compose(self, key: str, nbytes: int) -> Upload:
        """See :meth:`Driver.compose`. Counts as a create."""
        return await self._created(key, partial(self.inner.compose, key, nbytes))

    def links_from(self, source: Driver) -> bool:
        return self.inner.links_from(bottom(source))

    async def link(self, key: str, source: Driver, source_key: str) -> None:
        call = partial(self.inner.link, key, bottom(source), source_key)
        await self.around(Operation("link", key), call)

    async def _created(self, key: str, create: Callable[[], Awaitable[Upload]]) -> Upload:
        return LayeredUpload(self, key, await self.around(Operation("create", key), create))

    async def get(self, key: str) -> bytes:
        return await self.around(Operation("get", key), partial(self.inner.get, key))

    async def watch(self, key: str, known: bytes | None, timeout_s: float) -> bytes | None:
        call = partial(self.inner.watch, key, known, timeout_s)
        return await self.around(Operation("watch", key), call)

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        call = partial(self.inner.put, key, data, exclusive=exclusive)
        await self.around(Operation("put", key, len(data)), call)

    async def stat(self, key: str) -> ObjectInfo:
        return await self.around(Operation("stat", key), partial(self.inner.stat, key))

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        entries = self.inner.list(prefix)
        try:
            while batch := await self.around(
                Operation("list", prefix), partial(next_batch, entries)
            ):
                for info in batch:
                    yield info
        finally:
            await end(entries)

    async def delete(self, key: str) -> None:
        await self.around(Operation("delete", key), partial(self.inner.delete, key))

    async def delete_all(self, prefix: str) -> None:
        await self.around(Operation("delete_all", prefix), partial(self.inner.delete_all, prefix))

    async def sweep(self, prefix: str) -> None:
        await self.around(Operation("sweep", prefix), partial(self.inner.sweep, prefix))

    async def close(self) -> None:
        """See :meth:`Driver.close`. Bypasses :meth:`around`, so nothing can delay it."""
        await self.inner.close()


class LayeredUpload(Upload):
    """An upload whose methods pass through :meth:`Layer.around`."""

    def __init__(self, layer: Layer, key: str, inner: Upload) -> None:
        self._layer = layer
        self._key = key
        self._inner = inner

    async def write(self, start: int, data: Buffer) -> None:
        operation = Operation("write", self._key, len(data))
        await self._layer.around(operation, partial(self._inner.write, start, data))

    async def copy(self, start: int, source: Driver, key: str, key_start: int, nbytes: int) -> None:
        call = partial(self._inner.copy, start, bottom(source), key, key_start, nbytes)
        await self._layer.around(Operation("copy", self._key), call)

    async def commit(self, nbytes: int | None = None) -> None:
        await self._layer.around(
            Operation("commit", self._key), partial(self._inner.commit, nbytes)
        )

    async def abort(self) -> None:
        await self._layer.around(Operation("abort", self._key), self._inner.abort)


def bottom(driver: Driver) -> Driver:
    """Return the driver below all layers."""
    while isinstance(driver, Layer):
        driver = driver.inner
    return driver


async def next_batch(
    entries: AsyncIterator[ObjectInfo], shown: Container[str] = ()
) -> list[ObjectInfo]:
    """Return the next entries of a listing, skipping keys in ``shown``; empty at the end."""
    batch: list[ObjectInfo] = []
    async for info in entries:
        if info.key not in shown:
            batch.append(info)
        if len(batch) == LIST_BATCH:
            break
    return batch


async def end(entries: AsyncIterator[ObjectInfo]) -> None:
    """Let an abandoned listing clean up."""
    if isinstance(entries, AsyncGenerator):
        await entries.aclose()
