"""Ten thousand small objects: put, listed, statted and deleted, with the driver's preferred
concurrency.

Puts run 64 at a time instead, because some servers take half a second to close a file without being
busy.
"""

from __future__ import annotations

import asyncio
import time

from ..core.aio import at_most
from ..drivers.contract import Driver
from ..drivers.registry import open_driver
from ..drivers.uri import Uri

__all__ = ["many_objects"]

COUNT = 10_000
NBYTES = 100
PUTS = 64


def many_objects(uri: Uri, *, tiny: bool) -> str:
    """Return the times of all operations on many objects below ``uri`` as a sentence. With
    ``tiny``, use a fiftieth of the objects.

    Raises AssertionError if a listing lacks objects or shows deleted ones.
    """
    if tiny:
        count = COUNT // 50
    else:
        count = COUNT
    seconds = asyncio.run(_timed(open_driver(uri), count))
    told = ", ".join(f"{name} in {took_s:.2f} s" for name, took_s in seconds.items())
    return f"{count:,} objects of {NBYTES} bytes: {told}"


async def _timed(driver: Driver, count: int) -> dict[str, float]:
    async def look(key: str) -> None:
        await driver.stat(key)

    keys = [f"many/{n % 100}/{n}" for n in range(count)]
    seconds = {}
    width = driver.traits.concurrency
    began_s = time.perf_counter()
    await at_most(PUTS, (driver.put(key, bytes(NBYTES)) for key in keys))
    seconds["put"] = time.perf_counter() - began_s
    began_s = time.perf_counter()
    found = {info.key async for info in driver.list("many")}
    seconds["listed"] = time.perf_counter() - began_s
    began_s = time.perf_counter()
    await at_most(width, (look(key) for key in keys))
    seconds["statted"] = time.perf_counter() - began_s
    began_s = time.perf_counter()
    await driver.delete_all("many")
    seconds["deleted"] = time.perf_counter() - began_s
    left = [info.key async for info in driver.list("many")]
    await driver.close()
    if found != set(keys) or left:
        raise AssertionError("a listing lacks objects, or shows deleted ones")
    return seconds
