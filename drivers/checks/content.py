"""Contents of test objects, and helpers to upload them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable

from ..contract import Buffer, Driver, Traits, Upload

__all__ = ["bytes_of", "parts_of", "store", "write_parts"]


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
        return
    async with asyncio.TaskGroup() as group:
        for start, stop in parts:
            group.create_task(_written(upload.write(start, content[start:stop])))


async def _written(write: Awaitable[None]) -> None:
    await write


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
