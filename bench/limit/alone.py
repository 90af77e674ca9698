"""What our driver does without the engine: as many bytes in parts of its preferred size, as many at
a time as it says are useful. No format, no checksum, no tensor.

Beside the limit it says whether the driver or the engine costs; where no other client speaks to a
storage, it is the limit.
"""

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

KEY = "alone"
PART_NBYTES_MAX = 64 << 20


class Alone:
    """Writes and reads one object of ``nbytes``, rounded up to 4096, below ``place``."""

    def __init__(self, place: Uri, nbytes: int) -> None:
        self._place = place
        self.nbytes = round_up(nbytes, 4096)
        self._buffers: list[memoryview] = []
        asyncio.run(self._with_driver(self._allocate))

    @property
    def name(self) -> str:
        """Says that it is ours."""
        return f"our driver of {self._place.scheme}:// alone"

    def write(self) -> None:
        """Write it anew, durably."""
        asyncio.run(self._with_driver(self._write))

    def read(self) -> None:
        """Read all of it, into memory that is there."""
        asyncio.run(self._with_driver(self._read))

    def remove(self) -> None:
        """Delete it."""

        async def delete(driver: Driver) -> None:
            await driver.delete(KEY)

        asyncio.run(self._with_driver(delete))

    async def _with_driver(self, work: Any) -> None:
        driver = open_driver(self._place)
        try:
            await work(driver)
        finally:
            await driver.close()

    async def _write(self, driver: Driver) -> None:
        upload = await driver.create(KEY, self.nbytes)
        try:
            await at_most(self._width(driver), self._writes(driver, upload))
        except BaseException:
            await upload.abort()
            raise
        await upload.commit()

    def _writes(self, driver: Driver, upload: Upload) -> Iterator[Coroutine[Any, Any, None]]:
        for number, (start, nbytes) in enumerate(self._parts(driver)):
            yield upload.write(start, self._buffer(number)[:nbytes])

    async def _read(self, driver: Driver) -> None:
        await at_most(self._width(driver), self._reads(driver))

    def _reads(self, driver: Driver) -> Iterator[Coroutine[Any, Any, None]]:
        for number, (start, nbytes) in enumerate(self._parts(driver)):
            if driver.traits.piece_nbytes:
                yield driver.read_pieces(KEY, start, nbytes, _drop)
            else:
                yield driver.read(KEY, start, self._buffer(number)[:nbytes])

    def _width(self, driver: Driver) -> int:
        if driver.traits.part_order == "serial":
            return 1
        return driver.traits.concurrency

    def _parts(self, driver: Driver) -> list[tuple[int, int]]:
        part_nbytes = _part_nbytes(driver)
        starts = range(0, self.nbytes, part_nbytes)
        return [(start, min(part_nbytes, self.nbytes - start)) for start in starts]

    async def _allocate(self, driver: Driver) -> None:
        """Random bytes in pages of their own, before any time is taken."""
        random = np.random.default_rng(0)
        for _ in range(min(driver.traits.concurrency, len(self._parts(driver)))):
            view = HostBuffer.allocate(_part_nbytes(driver)).view
            view[:] = random.bytes(len(view))
            self._buffers.append(view)

    def _buffer(self, number: int) -> memoryview:
        """Used again by a part that comes much later."""
        return self._buffers[number % len(self._buffers)]


def _part_nbytes(driver: Driver) -> int:
    return min(max(driver.traits.part_nbytes, driver.traits.part_min_nbytes), PART_NBYTES_MAX)


def _drop(piece: memoryview) -> None:
    """What was read is of no interest."""
