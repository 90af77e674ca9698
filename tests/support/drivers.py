"""Drivers around drivers, with hooks to fail, halt or count operations."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

import holdfast
from holdfast.drivers.contract import Buffer, Driver, ObjectInfo
from holdfast.drivers.layers.layer import Layer, Operation
from holdfast.drivers.layers.retry import RetryLayer, RetryPolicy
from holdfast.drivers.memory import MemoryDriver
from holdfast.drivers.registry import driver_class, open_driver
from holdfast.drivers.uri import Uri, parse

from .given import Serve

T = TypeVar("T")
Hook = Callable[[str, str], Awaitable[None]]
"""Function called with the operation and its key. The operation raises its errors."""


async def nothing(operation: str, key: str) -> None:
    """Do nothing, as a hook."""


def dying_after(commits: int) -> Hook:
    """Return a hook for ``before`` that fails once this many uploads are committed."""
    done = 0

    async def die(operation: str, key: str) -> None:
        nonlocal done
        if operation == "commit":
            done += 1
            if done > commits:
                raise holdfast.StorageDownError("injected")

    return die


class HookedDriver(Layer):
    """Calls ``before`` and ``after`` around each operation that it passes on to ``inner``."""

    def __init__(
        self,
        inner: Driver,
        before: Hook = nothing,
        after: Hook = nothing,
    ) -> None:
        super().__init__(inner)
        self.remote = True  # type: ignore[misc]
        self.before, self.after = before, after
        self.closed = 0

    async def around(self, operation: Operation, call: Callable[[], Awaitable[T]]) -> T:
        if operation.name == "abort":
            return await call()
        await self.before(operation.name, operation.key)
        result = await call()
        await self.after(operation.name, operation.key)
        return result

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        await self.before("list", prefix)
        async for info in self.inner.list(prefix):
            yield info
            await self.after("list", info.key)

    async def delete_all(self, prefix: str) -> None:
        for key in await keys(self.inner, prefix):
            await self.around(Operation("delete_all", key), lambda key=key: self.inner.delete(key))
        await super().delete_all(prefix)

    async def close(self) -> None:
        self.closed += 1


class Counting(MemoryDriver):
    """Records its reads: key, start and end."""

    def __init__(self, **traits: int) -> None:
        super().__init__()
        self.traits = replace(self.traits, **traits)  # type: ignore[arg-type]
        self.reads: list[tuple[str, int, int]] = []

    async def read(self, key: str, start: int, into: Buffer) -> None:
        self.reads.append((key, start, start + len(memoryview(into))))
        await super().read(key, start, into)


def asynchronous(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a coroutine function as a test, for at most 100 seconds."""
    return functools.wraps(test)(
        lambda *args, **kwargs: asyncio.run(asyncio.wait_for(test(*args, **kwargs), 100))
    )


async def keys(driver: Driver, prefix: str = "") -> list[str]:
    """Return the keys at or below ``prefix``, sorted."""
    return sorted([info.key async for info in driver.list(prefix)])


def bare(uri: str, **options: str) -> Driver:
    """Open a driver without the layers that users get around it."""
    parsed = parse(uri)
    cls = driver_class(parsed.scheme)
    return cls.open(Uri(parsed.scheme, parsed.location, parsed.options | options))


def used(uri: str, use: Callable[[Driver], Awaitable[T]], **options: object) -> T:
    """Run ``use`` on a driver, which is closed afterwards, for at most a minute."""

    async def work() -> T:
        driver = open_driver(uri, **options)
        try:
            return await use(driver)
        finally:
            await driver.close()

    return asyncio.run(asyncio.wait_for(work(), 60))


async def stored(driver: Driver, key: str, content: bytes | memoryview) -> None:
    """Upload an object in one write."""
    view = memoryview(content)
    upload = await driver.create(key, view.nbytes)
    await upload.write(0, view)
    await upload.commit()


def storage_at(uri: str) -> MemoryDriver:
    """Return a driver of a URI in memory, without options and layers."""
    return MemoryDriver(uri.removeprefix("memory://"))


def retried(driver: Driver) -> Driver:
    """Return the driver within a layer that retries."""
    return RetryLayer(driver, RetryPolicy(3, 60.0, 0.001))


class Halting:
    """Storage in memory that halts before an operation while ``go`` is not set."""

    def __init__(self, serve: Serve, operation: str, key_end: str = "") -> None:
        self.operation, self.key_end = operation, key_end
        self.reached, self.go = threading.Event(), threading.Event()
        self.uri = serve(lambda path: HookedDriver(MemoryDriver(path), before=self._before))

    async def _before(self, operation: str, key: str) -> None:
        if operation == self.operation and key.endswith(self.key_end):
            self.reached.set()
            await asyncio.to_thread(self.go.wait, 60)


def reads(driver: Driver, key: str) -> list[Awaitable[object]]:
    """Return a call of each method that looks at one object."""
    return [driver.get(key), driver.stat(key), driver.read(key, 0, memoryview(bytearray(1)))]


def changes(driver: Driver, key: str) -> list[Awaitable[object]]:
    """Return a call of each method that changes objects."""
    puts = [driver.put(key, b"y"), driver.put(key, b"y", exclusive=True), driver.create(key, 1)]
    return [*puts, driver.delete(key), driver.delete_all(key), driver.sweep(key)]


async def contents(driver: Driver) -> dict[str, bytes]:
    """Return every visible object and its bytes."""
    return {info.key: await driver.get(info.key) async for info in driver.list()}


def age(storage: MemoryDriver, by_s: float) -> None:
    """Make everything in ``storage``, and in its named store, ``by_s`` older."""
    objects = storage.objects
    for path, (data, modified_s) in objects.items():
        objects[path] = (data, modified_s - by_s)


class Fault:
    """Fails the n-th access, before or after it was done; ``for_good``: all later ones too."""

    def __init__(self, n: int, *, after: bool, for_good: bool) -> None:
        self.n, self.after, self.for_good = n, after, for_good
        self.seen = -1
        self.hit: tuple[str, str] | None = None

    async def on_before(self, operation: str, key: str) -> None:
        self.seen += 1
        if self.seen == self.n or (self.for_good and self.seen > self.n):
            self.hit = self.hit or (operation, key)
            if self.seen > self.n or not self.after:
                raise holdfast.StorageDownError("injected", key=key)

    async def on_after(self, operation: str, key: str) -> None:
        if self.seen == self.n and self.after:
            raise holdfast.StorageDownError("injected", key=key)
