"""The scratch folder of a check: test objects, two drivers, and assertions about stored objects."""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from ...core.aio import side_by_side
from ...errors import HoldfastError, NotFoundError
from ..contract import Buffer, Driver, Traits, Upload
from ..layers.layer import Layer, Operation
from .findings import UnkeptError

T = TypeVar("T")


def bytes_of(nbytes: int, seed: int = 0) -> bytes:
    """Return ``nbytes`` pseudo-random bytes, reproducible by ``seed``."""
    return random.Random(seed).randbytes(nbytes)


def parts_of(nbytes: int, part_nbytes: int, traits: Traits, seed: int = 0) -> list[tuple[int, int]]:
    """Return the (start, stop) of an object's parts, in an order that ``traits`` allow: random if
    any order will do."""
    part_nbytes = max(part_nbytes, traits.part_min_nbytes)
    parts = [(start, min(start + part_nbytes, nbytes)) for start in range(0, nbytes, part_nbytes)]
    if traits.part_order == "any":
        random.Random(seed).shuffle(parts)
    return parts


async def write_parts(
    upload: Upload, content: Buffer, parts: list[tuple[int, int]], traits: Traits
) -> None:
    """Write these parts, in parallel if ``traits`` allow it."""
    if traits.part_order == "serial":
        for start, stop in parts:
            await upload.write(start, content[start:stop])
    else:
        await side_by_side(*(upload.write(start, content[start:stop]) for start, stop in parts))


async def begun(driver: Driver, key: str, first: Buffer | bytes, nbytes: int = 0) -> Upload:
    """Return an upload whose bytes ``first`` are written. Its size is that of ``first``, or
    ``nbytes`` if larger."""
    upload = await driver.create(key, max(nbytes, len(first)))
    await upload.write(0, memoryview(first))
    return upload


async def store(driver: Driver, key: str, content: bytes) -> None:
    """Upload one object in parts of the driver's preferred size. Aborts the upload on failure."""
    upload = await driver.create(key, len(content))
    parts = parts_of(len(content), driver.traits.part_nbytes, driver.traits)
    try:
        await write_parts(upload, memoryview(content), parts, driver.traits)
        await upload.commit()
    except BaseException:
        await upload.abort()
        raise


class Warnings(logging.Handler):
    """Collects the warnings that the package logs in a ``with`` block instead of printing them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        self._logger = logging.getLogger("holdfast")
        self._propagated = True

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> Warnings:
        self._propagated = self._logger.propagate
        self._logger.addHandler(self)
        self._logger.propagate = False
        return self

    def __exit__(self, *raised: object) -> None:
        self._logger.propagate = self._propagated
        self._logger.removeHandler(self)


class Counted(Layer):
    """Counts operations, and records whether anything may need removing."""

    count = 0
    may_have_stored = False

    async def around(self, operation: Operation, call: Callable[[], Awaitable[T]]) -> T:
        self.count += 1
        stores = operation.name in ("put", "create", "write", "commit")
        try:
            return await call()
        except HoldfastError as error:
            stores &= error.temporary
            raise
        finally:
            self.may_have_stored |= stores


@dataclass(frozen=True, slots=True)
class Ground:
    """Scratch folder of the probes. The second driver stands for another host: it must see all that
    the first one stores. It is the same driver if objects are private by design."""

    driver: Counted
    other: Counted
    scratch: str
    """Key of the scratch folder."""

    @property
    def traits(self) -> Traits:
        """Traits of the drivers."""
        return self.driver.traits

    def key(self, name: str) -> str:
        """Return the key of ``name`` in the scratch folder."""
        return f"{self.scratch}/{name}"

    async def put_and_expect(self, key: str, content: bytes, when: str) -> None:
        """Put an object and :meth:`expect` it."""
        await self.driver.put(key, content)
        await self.expect(key, content, when)

    async def expect(self, key: str, content: bytes, when: str) -> None:
        """Raise UnkeptError unless both drivers return ``content``, with its size."""
        for driver, who in self._drivers():
            try:
                found = await driver.get(key)
            except NotFoundError as error:
                raise UnkeptError(f"{when}, {who} does not find the object") from error
            if found != content:
                raise UnkeptError(f"{when}, {who} reads different bytes")
            nbytes = (await driver.stat(key)).nbytes
            if nbytes != len(content):
                raise UnkeptError(
                    f"{when}, {who} sees a size of {nbytes:,} bytes, not {len(content):,}"
                )

    async def expect_gone(self, key: str, when: str) -> None:
        """Raise UnkeptError if either driver still finds or lists the object."""
        for driver, who in self._drivers():
            for look in (driver.get, driver.stat):
                try:
                    await look(key)
                except NotFoundError:
                    continue
                raise UnkeptError(f"{when}, {who} still finds the object")
        await self.expect_listed(key, [], when)

    async def expect_listed(self, prefix: str, keys: list[str], when: str) -> None:
        """Raise UnkeptError unless both drivers list exactly these keys."""
        for driver, who in self._drivers():
            found = sorted([info.key async for info in driver.list(prefix)])
            if found != sorted(keys):
                missing = sorted(set(keys) - set(found))
                extra = sorted(set(found) - set(keys))
                twice = len(found) - len(set(found))
                raise UnkeptError(
                    f"{when}, the list of {who} lacks {len(missing)} keys, has {len(extra)} extra "
                    f"ones, and repeats {twice}: {[*missing, *extra][:3]}"
                )

    def _drivers(self) -> list[tuple[Driver, str]]:
        found: list[tuple[Driver, str]] = [(self.driver, "the writer")]
        if self.other is not self.driver:
            found.append((self.other, "a reader"))
        return found
