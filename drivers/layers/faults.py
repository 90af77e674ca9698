"""Faults on purpose, from a seed: for tests, and for drills with the real job on the real storage.

| | what happens | and must be survived by |
|---|---|---|
| ``error`` | an operation fails, temporarily, before it begins | retry |
| ``unsure`` | likewise, but after it was done: the caller cannot know | retry; a commit fails, and the save with it |
| ``busy`` | the storage asks to be left alone, for a second | retry |
| ``delay`` | an operation takes ``delay_s`` longer | hedge; else patience |
| ``short`` | a read is cut in the middle: half the buffer is filled, or half the pieces are taken, and it fails temporarily | retry |
| ``lost`` | a write says it is done, and zeros are stored | no layer: checksums turn it into DamagedError |
| ``flip`` | a read, or a get, gives one wrong bit | no layer: likewise |

Never: a value that is wrong and says nothing. A drill on storage that matters writes damage with
``lost``; the others leave what is stored alone.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import TypeVar

from ...errors import BusyError, StorageDownError
from ..contract import Buffer, Driver, TakePiece, Upload
from ..options import duration
from ..pieces import piece_ends
from .layer import Layer, LayeredUpload, Operation

__all__ = ["FaultPlan", "FaultsLayer", "fault_plan"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """How often each happens: a part of the operations that it can befall, 0 to 1."""

    seed: int = 0
    error: float = 0.0
    unsure: float = 0.0
    busy: float = 0.0
    delay: float = 0.0
    delay_s: float = 1.0
    short: float = 0.0
    lost: float = 0.0
    flip: float = 0.0


def fault_plan(text: str) -> FaultPlan:
    """The plan that ``seed:7,error:0.01,delay:0.05,delay_s:2`` means. Raises ValueError for
    anything else."""
    names = [field.name for field in fields(FaultPlan)]
    given: dict[str, float] = {}
    for item in text.split(","):
        name, _, value = item.partition(":")
        try:
            if name not in names or name in given:
                raise ValueError
            if name == "seed":
                given[name] = int(value)
            else:
                given[name] = duration(0, 3600 if name == "delay_s" else 1)(value)
        except ValueError as error:
            raise ValueError(
                f"is pairs of {', '.join(names)} and a number, such as seed:7,error:0.01"
            ) from error
    return FaultPlan(**given)  # type: ignore[arg-type]


class FaultsLayer(Layer):
    """Lets ``plan`` happen. The same seed and the same operations in the same order give the same
    faults."""

    def __init__(self, inner: Driver, plan: FaultPlan) -> None:
        super().__init__(inner)
        self._plan = plan
        self._random = random.Random(plan.seed)

    async def around(self, operation: Operation, call: Callable[[], Awaitable[T]]) -> T:
        """See :meth:`Layer.around`. An abort always succeeds: its caller cannot use an error."""
        if operation.name == "abort":
            return await call()
        late = self.happens("delay")
        is_write = operation.name == "write"
        if late and not is_write:
            await asyncio.sleep(self._plan.delay_s)
        if self.happens("busy"):
            raise BusyError(
                "a fault on purpose: busy", retry_after_s=1.0, uri=self.uri, key=operation.key
            )
        if self.happens("error"):
            raise self._error("the operation was not begun", operation.key)
        result = await call()
        # If writes were held back before they begin, parts would overtake each other, which a
        # driver may not allow.
        if late and is_write:
            await asyncio.sleep(self._plan.delay_s)
        if self.happens("unsure"):
            raise self._error("the operation was done, and its answer lost", operation.key)
        return result

    async def read(self, key: str, start: int, into: Buffer) -> None:
        """See :meth:`Driver.read`, ``short`` and ``flip``."""
        await self.around(Operation("read", key, len(into)), partial(self._read, key, start, into))

    async def fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        """See :meth:`Driver.fetch`, ``short`` and ``flip``."""
        return await self.around(
            Operation("read", key, nbytes), partial(self._fetch, key, start, nbytes)
        )

    async def read_pieces(self, key: str, start: int, nbytes: int, take: TakePiece) -> None:
        """See :meth:`Driver.read_pieces`, ``short`` and ``flip``."""
        await self.around(
            Operation("read", key, nbytes), partial(self._read_pieces, key, start, nbytes, take)
        )

    async def get(self, key: str) -> bytes:
        """See :meth:`Driver.get` and ``flip``."""
        data = bytearray(await super().get(key))
        self._flip(memoryview(data))
        return bytes(data)

    async def create(self, key: str, nbytes: int) -> Upload:
        """See :meth:`Driver.create` and ``lost``."""
        upload = await self.around(
            Operation("create", key), partial(self.inner.create, key, nbytes)
        )
        return LayeredUpload(self, key, _LosingUpload(self, upload))

    def happens(self, name: str) -> bool:
        """Whether a fault happens now. Drawn also where it is not planned: two plans of one seed
        differ in nothing else."""
        likely: float = getattr(self._plan, name)
        return self._random.random() < likely

    def _error(self, what: str, key: str) -> StorageDownError:
        return StorageDownError(f"a fault on purpose: {what}", uri=self.uri, key=key)

    async def _read(self, key: str, start: int, into: Buffer) -> None:
        if self.happens("short"):
            half = len(into) // 2
            await self.inner.read(key, start, into[:half])
            raise self._error(f"the read was cut after {half} bytes", key)
        await self.inner.read(key, start, into)
        self._flip(into)

    async def _fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        if self.happens("short"):
            half = nbytes // 2
            await self.inner.fetch(key, start, half)
            raise self._error(f"the read was cut after {half} bytes", key)
        data = await self.inner.fetch(key, start, nbytes)
        if not (nbytes and self.happens("flip")):
            return data
        own = memoryview(bytearray(data))  # memory that a driver handed over is read-only
        self._flip_bit(own)
        return own.toreadonly()

    async def _read_pieces(self, key: str, start: int, nbytes: int, take: TakePiece) -> None:
        if self.happens("short"):
            # Whatever breaks, only whole pieces are taken.
            ends = piece_ends(start, nbytes, self.traits.piece_nbytes)
            taken = max(end for end in ends if end <= start + nbytes // 2) - start
            await self.inner.read_pieces(key, start, taken, take)
            raise self._error(f"the read was cut after {taken} bytes", key)
        if nbytes and self.happens("flip"):
            take = _flipping(take, self._random.randrange(nbytes), self._random.randrange(8))
        await self.inner.read_pieces(key, start, nbytes, take)

    def _flip(self, data: Buffer) -> None:
        if len(data) and self.happens("flip"):
            self._flip_bit(data)

    def _flip_bit(self, data: Buffer) -> None:
        data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)


def _flipping(take: TakePiece, position: int, bit: int) -> TakePiece:
    """Passes pieces on to ``take``; with one bit flipped in the byte at ``position`` of the read."""
    reached = 0

    def take_flipped(piece: Buffer) -> None:
        nonlocal reached
        if reached <= position < reached + len(piece):
            own = bytearray(piece)
            own[position - reached] ^= 1 << bit
            take(memoryview(own))
        else:
            take(piece)
        reached += len(piece)

    return take_flipped


class _LosingUpload(Upload):
    def __init__(self, layer: FaultsLayer, inner: Upload) -> None:
        self._layer = layer
        self._inner = inner

    async def write(self, start: int, data: Buffer) -> None:
        lost = self._layer.happens("lost")
        await self._inner.write(start, memoryview(bytes(len(data))) if lost else data)

    async def commit(self, nbytes: int | None = None) -> None:
        await self._inner.commit(nbytes)

    async def abort(self) -> None:
        await self._inner.abort()
