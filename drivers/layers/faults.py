"""Injected faults, reproducible by seed: for tests, and for drills with a real job on real storage.

| | fault | survived by |
|---|---|---|
| ``error`` | an operation fails temporarily before it starts | retry |
| ``unsure`` | an operation fails temporarily after it was done, so the caller cannot know | retry; a commit fails, and the save with it |
| ``busy`` | the storage asks the client to back off for a second | retry |
| ``delay`` | an operation takes ``delay_s`` longer | hedge; otherwise waiting |
| ``short`` | a read fails temporarily halfway, with half the buffer filled or half the pieces taken | retry |
| ``lost`` | a write reports success, but zeros are stored | no layer: checksums turn it into DamagedError |
| ``flip`` | a read or get returns one flipped bit | no layer: likewise |

No fault may ever lead to a silently wrong value. In a drill on real storage, ``lost`` writes
damaged data; the others do not change stored data.
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

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Probability of each fault, from 0 to 1, per operation that it can affect."""

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
    """Parse a plan such as ``seed:7,error:0.01,delay:0.05,delay_s:2``. Raises ValueError for
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
                f"must be pairs of {', '.join(names)} and a number, such as seed:7,error:0.01"
            ) from error
    return FaultPlan(**given)  # type: ignore[arg-type]


class FaultsLayer(Layer):
    """Injects the faults of ``plan``. The same seed and the same sequence of operations give the
    same faults."""

    def __init__(self, inner: Driver, plan: FaultPlan) -> None:
        super().__init__(inner)
        self._plan = plan
        self._random = random.Random(plan.seed)

    async def around(self, operation: Operation, call: Callable[[], Awaitable[T]]) -> T:
        """See :meth:`Layer.around`. Aborts never fail: their callers cannot handle an error."""
        if operation.name == "abort":
            return await call()
        late = self.happens("delay")
        is_write = operation.name == "write"
        if late and not is_write:
            await asyncio.sleep(self._plan.delay_s)
        if self.happens("busy"):
            raise BusyError(
                "injected fault: busy", retry_after_s=1.0, uri=self.uri, key=operation.key
            )
        if self.happens("error"):
            raise self._error("the operation was not started", operation.key)
        result = await call()
        # Delay writes afterwards. A delay before could reorder parts, which some drivers forbid.
        if late and is_write:
            await asyncio.sleep(self._plan.delay_s)
        if self.happens("unsure"):
            raise self._error("the operation was done, but its answer was lost", operation.key)
        return result

    async def read(self, key: str, start: int, into: Buffer) -> None:
        """See :meth:`Driver.read`. Injects ``short`` and ``flip``."""
        await self.around(Operation("read", key, len(into)), partial(self._read, key, start, into))

    async def fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        """See :meth:`Driver.fetch`. Injects ``short`` and ``flip``."""
        return await self.around(
            Operation("read", key, nbytes), partial(self._fetch, key, start, nbytes)
        )

    async def read_pieces(self, key: str, start: int, nbytes: int, take: TakePiece) -> None:
        """See :meth:`Driver.read_pieces`. Injects ``short`` and ``flip``."""
        await self.around(
            Operation("read", key, nbytes), partial(self._read_pieces, key, start, nbytes, take)
        )

    async def get(self, key: str) -> bytes:
        """See :meth:`Driver.get`. Injects ``flip``."""
        data = bytearray(await super().get(key))
        self._flip(memoryview(data))
        return bytes(data)

    async def _created(self, key: str, create: Callable[[], Awaitable[Upload]]) -> Upload:
        """Inject ``lost``."""
        return _LosingUpload(self, key, await self.around(Operation("create", key), create))

    def happens(self, name: str) -> bool:
        """Return whether to inject this fault now. Draws a random number even if the fault is not
        planned, so that plans with the same seed stay in step."""
        likely: float = getattr(self._plan, name)
        return self._random.random() < likely

    def _error(self, what: str, key: str) -> StorageDownError:
        return StorageDownError(f"injected fault: {what}", uri=self.uri, key=key)

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
        own = memoryview(bytearray(data))  # copy: memory handed over by a driver is read-only
        self._flip_bit(own)
        return own.toreadonly()

    async def _read_pieces(self, key: str, start: int, nbytes: int, take: TakePiece) -> None:
        if self.happens("short"):
            # Even a failed read passes only whole pieces to take.
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
    """Wrap ``take`` so that one bit of the byte at ``position`` of the read is flipped."""
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


class _LosingUpload(LayeredUpload):
    def __init__(self, layer: FaultsLayer, key: str, inner: Upload) -> None:
        super().__init__(layer, key, inner)
        self._happens = layer.happens

    async def write(self, start: int, data: Buffer) -> None:
        lost = self._happens("lost")
        await super().write(start, memoryview(bytes(len(data))) if lost else data)
