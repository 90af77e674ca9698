"""What benchmarks ask of the driver of a place: its traits, and the deletion of their data."""

from __future__ import annotations

import asyncio

from ..drivers.contract import Traits
from ..drivers.registry import open_driver
from ..drivers.uri import Uri


def clear(uri: Uri) -> None:
    """Delete everything at ``uri``."""

    async def delete() -> None:
        root, _, name = uri.location.rpartition("/")
        driver = open_driver(Uri(uri.scheme, root, uri.options))
        try:
            await driver.delete_all(name)
        finally:
            await driver.close()

    asyncio.run(delete())


def traits_of(uri: Uri) -> Traits:
    """Return the traits of the driver of ``uri`` without touching the storage. Raises UriError."""

    async def ask() -> Traits:
        driver = open_driver(uri)
        try:
            return driver.traits
        finally:
            await driver.close()

    return asyncio.run(ask())
