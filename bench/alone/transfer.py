"""Writes and reads one object through a driver alone, in parts of a given size and concurrency.

Scope: the one loop that moves bytes without a format, a checksum or a tensor. The callers decide
what to measure with it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from ...core.aio import at_most
from ...core.units import round_up
from ...drivers.contract import Driver, Traits, Upload, segments
from ...drivers.registry import opened_driver
from ...drivers.uri import Uri
from ...storage.runtime.buffers import HostBuffer

ALIGN_NBYTES = 4096
PART_NBYTES_MAX = 64 << 20
"""Limit of the preferred part size, because memory is finite."""
_FILL_NBYTES = 16 << 20


@dataclass(frozen=True)
class Shape:
    """Parameters of a transfer: parts of ``part_nbytes``, ``concurrency`` at a time.

    ``random`` moves the parts in an arbitrary order that is the same in every run. Otherwise the
    order is ascending; an upload that prefers several streams gets them all at the same time.
    """

    part_nbytes: int
    concurrency: int
    random: bool = False

    @property
    def memory_nbytes(self) -> int:
        """Memory of the parts in flight."""
        return self.concurrency * round_up(self.part_nbytes, ALIGN_NBYTES)


def preferred(traits: Traits) -> Shape:
    """Return the driver's preferred shape."""
    part_nbytes = min(max(traits.part_nbytes, traits.part_min_nbytes), PART_NBYTES_MAX)
    return Shape(part_nbytes, traits.concurrency)


def parts(nbytes: int, shape: Shape, traits: Traits, *, writing: bool) -> list[tuple[int, int]]:
    """Return the start and size of each part of an object, in transfer order."""
    if writing and not shape.random:
        lanes = [_cut(start, stop, shape.part_nbytes) for start, stop in segments(nbytes, traits)]
    else:
        lanes = [_cut(0, nbytes, shape.part_nbytes)]
    in_turn = [part for row in zip_longest(*lanes) for part in row if part is not None]
    if shape.random:
        order = np.random.default_rng(0).permutation(len(in_turn))
        return [in_turn[number] for number in order]
    return in_turn


def _cut(start: int, stop: int, part_nbytes: int) -> list[tuple[int, int]]:
    return [(at, min(part_nbytes, stop - at)) for at in range(start, stop, part_nbytes)]


class Memory:
    """Page-aligned random bytes, the source and target of parts. Allocated on first use, and shared
    by all transfers of a measurement."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = round_up(max(nbytes, ALIGN_NBYTES), ALIGN_NBYTES)
        self._view: memoryview | None = None

    def slot(self, number: int, nbytes: int) -> memoryview:
        """Return memory for the part ``number``. A later part may get the same memory."""
        view = self._filled()
        step = round_up(nbytes, ALIGN_NBYTES)
        slots = max(1, len(view) // step)
        start = number % slots * step
        return view[start : start + nbytes]

    def _filled(self) -> memoryview:
        if self._view is None:
            view = HostBuffer.allocate(self._nbytes).view
            random = np.random.default_rng(0)
            for start in range(0, self._nbytes, _FILL_NBYTES):
                stop = min(start + _FILL_NBYTES, self._nbytes)
                view[start:stop] = random.bytes(stop - start)
            self._view = view
        return self._view


class Transfer:
    """Writes and reads the object ``key`` of ``nbytes`` below ``place``.

    ``shape`` defaults to the driver's preference, and ``memory`` to new memory. ``options`` are
    keywords for opening the driver. ``latencies_s`` collects the latency of each part over all
    runs.
    """

    def __init__(
        self,
        place: Uri,
        key: str,
        nbytes: int,
        *,
        shape: Shape | None = None,
        options: Mapping[str, object] | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.nbytes = nbytes
        self.latencies_s: list[float] = []
        self._place = place
        self._key = key
        self._shape = shape
        self._options = dict(options or {})
        self._memory = memory

    def prepare(self) -> None:
        """Fill the memory, so that the first run does not have to."""

        async def fill(driver: Driver, shape: Shape) -> None:
            self._slot(0, shape)

        asyncio.run(self._with_driver(fill))

    def write(self) -> None:
        """Replace the object, durably. Raises the driver's errors, and leaves nothing behind
        then."""
        asyncio.run(self._with_driver(self._write))

    def read(self) -> None:
        """Read the whole object into existing memory. Raises the driver's errors."""
        asyncio.run(self._with_driver(self._read))

    def remove(self) -> None:
        """Delete the object. It need not exist. Raises the driver's errors."""

        async def delete(driver: Driver, shape: Shape) -> None:
            await driver.delete(self._key)

        asyncio.run(self._with_driver(delete))

    async def _with_driver(
        self, work: Callable[[Driver, Shape], Coroutine[Any, Any, None]]
    ) -> None:
        async with opened_driver(self._place, **self._options) as driver:
            shape = self._shape or preferred(driver.traits)
            if self._memory is None:
                self._memory = Memory(min(shape.memory_nbytes, round_up(self.nbytes, ALIGN_NBYTES)))
            await work(driver, shape)

    async def _write(self, driver: Driver, shape: Shape) -> None:
        at_a_time = 1 if driver.traits.part_order == "serial" else shape.concurrency
        upload = await driver.create(self._key, self.nbytes)
        try:
            await at_most(at_a_time, self._writes(driver, upload, shape))
        except BaseException:
            await upload.abort()
            raise
        await upload.commit()

    def _writes(
        self, driver: Driver, upload: Upload, shape: Shape
    ) -> Iterator[Coroutine[Any, Any, None]]:
        moved = parts(self.nbytes, shape, driver.traits, writing=True)
        for number, (start, nbytes) in enumerate(moved):
            yield self._timed(upload.write, start, self._slot(number, shape)[:nbytes])

    async def _read(self, driver: Driver, shape: Shape) -> None:
        await at_most(shape.concurrency, self._reads(driver, shape))

    def _reads(self, driver: Driver, shape: Shape) -> Iterator[Coroutine[Any, Any, None]]:
        moved = parts(self.nbytes, shape, driver.traits, writing=False)
        for number, (start, nbytes) in enumerate(moved):
            if driver.traits.piece_nbytes:
                yield self._timed(driver.read_pieces, self._key, start, nbytes, _drop)
            else:
                into = self._slot(number, shape)[:nbytes]
                yield self._timed(driver.read, self._key, start, into)

    def _slot(self, number: int, shape: Shape) -> memoryview:
        assert self._memory is not None
        return self._memory.slot(number, shape.part_nbytes)

    async def _timed(
        self, operation: Callable[..., Coroutine[Any, Any, None]], *arguments: Any
    ) -> None:
        began_s = time.perf_counter()
        await operation(*arguments)
        self.latencies_s.append(time.perf_counter() - began_s)


def _drop(piece: memoryview) -> None:
    """Ignore the bytes that were read."""
