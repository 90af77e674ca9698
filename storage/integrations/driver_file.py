"""Objects of a driver as files of Python, for readers of other formats."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING

from ...core.aio import at_most
from ...drivers.contract import Driver
from ..runtime.engine import run

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["DriverFile", "read_range"]


class DriverFile(io.RawIOBase):
    """An object, read in ranges."""

    def __init__(self, driver: Driver, key: str) -> None:
        self._driver = driver
        self._key = key
        self._nbytes = run(driver.stat(key)).nbytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._nbytes}[whence]
        if origin + offset < 0:
            raise ValueError(f"a negative position: {origin + offset}")
        self._position = origin + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, into: Buffer) -> int:
        target = memoryview(into).cast("B")[: max(0, self._nbytes - self._position)]
        run(read_range(self._driver, self._key, self._position, target))
        self._position += len(target)
        return len(target)


async def read_range(driver: Driver, key: str, start: int, into: memoryview) -> None:
    """Fill ``into`` from the object's byte ``start`` on, by several reads at a time."""
    step = driver.traits.part_nbytes
    await at_most(
        driver.traits.concurrency,
        (
            driver.read(key, start + offset, into[offset : offset + step])
            for offset in range(0, len(into), step)
        ),
    )
