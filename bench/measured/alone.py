"""The limit: what a driver does alone, with as many bytes in parts of its preferred size, as many
at a time as it says are useful. No format, no checksum, no tensor."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import numpy as np

from ...core.aio import at_most
from ...core.units import round_up
from ...drivers.contract import Driver, Upload
from ...drivers.registry import open_driver
from ...drivers.uri import Uri
from ...storage.runtime.buffers import HostBuffer

__all__ = ["Alone"]

PART_NBYTES_MAX = 64 << 20


class Alone:
    """Writes and reads one object of ``nbytes``, rounded up to 4096, below ``place``: that of
    ``rank``."""

    def __init__(self, place: Uri, nbytes: int, rank: int = 0) -> None:
        self._key = f"alone-{rank}"
        self._place = place
        self.nbytes = round_up(nbytes, 4096)
        self._buffers: list[memoryview] = []

    def write(self) -> None:
        """Write it anew, durably."""
        asyncio.run(self._with_driver(self._write))

    def read(self) -> None:
        """Read all of it, into memory that is there."""
        asyncio.run(self._with_driver(self._read))

    async def _with_driver(self, work: Any) -> None:
        driver = open_driver(self._place)
        try:
            await work(driver)
        finally:
            await driver.close()

    async def _write(self, driver: Driver) -> None:
        upload = await driver.create(self._key, self.nbytes)
        try:
            await at_most(self._width(driver), self._writes(driver, upload))
        except BaseException:
            await upload.abort()
            raise
        await upload.commit()

    def _writes(self, driver: Driver, upload: Upload) -> Iterator[Coroutine[Any, Any, None]]:
        for number, (start, nbytes) in enumerate(self._parts(driver)):
            yield upload.write(start, self._buffer(driver, number)[:nbytes])

    async def _read(self, driver: Driver) -> None:
        await at_most(self._width(driver), self._reads(driver))

    def _reads(self, driver: Driver) -> Iterator[Coroutine[Any, Any, None]]:
        for number, (start, nbytes) in enumerate(self._parts(driver)):
            if driver.traits.piece_nbytes:
                yield driver.read_pieces(self._key, start, nbytes, _drop)
            else:
                yield driver.read(self._key, start, self._buffer(driver, number)[:nbytes])

    def _width(self, driver: Driver) -> int:
        if driver.traits.part_order == "serial":
            return 1
        return driver.traits.concurrency

    def _parts(self, driver: Driver) -> list[tuple[int, int]]:
        part_nbytes = _part_nbytes(driver)
        starts = range(0, self.nbytes, part_nbytes)
        return [(start, min(part_nbytes, self.nbytes - start)) for start in starts]

    def _buffer(self, driver: Driver, number: int) -> memoryview:
        """Random bytes in pages of their own; used again by a part that comes much later."""
        if not self._buffers:
            nbytes = _part_nbytes(driver)
            random = np.random.default_rng(0)
            for _ in range(min(driver.traits.concurrency, len(self._parts(driver)))):
                view = HostBuffer.allocate(nbytes).view
                view[:] = random.bytes(nbytes)
                self._buffers.append(view)
        return self._buffers[number % len(self._buffers)]


def _part_nbytes(driver: Driver) -> int:
    return min(max(driver.traits.part_nbytes, driver.traits.part_min_nbytes), PART_NBYTES_MAX)


def _drop(piece: memoryview) -> None:
    """What was read is of no interest."""
