"""What benchmarks ask of the driver of a place: its traits, and the deletion of their data."""

from __future__ import annotations

import asyncio

from ..drivers.contract import Traits
from ..drivers.registry import opened_driver
from ..drivers.uri import Uri, divided


def clear(uri: Uri) -> None:
    """Delete everything at ``uri``."""

    async def delete() -> None:
        folder, name = divided(uri)
        async with opened_driver(folder) as driver:
            await driver.delete_all(name)

    asyncio.run(delete())


def traits_of(uri: Uri) -> Traits:
    """Return the traits of the driver of ``uri`` without touching the storage. Raises UriError."""

    async def ask() -> Traits:
        async with opened_driver(uri) as driver:
            return driver.traits

    return asyncio.run(ask())
