"""The traits of the driver that serves a URI."""

from __future__ import annotations

import asyncio

from ..drivers.contract import Traits
from ..drivers.registry import open_driver
from ..drivers.uri import Uri

__all__ = ["traits_of"]


def traits_of(uri: Uri) -> Traits:
    """Return the traits of the driver of ``uri`` without touching the storage. Raises UriError."""

    async def ask() -> Traits:
        driver = open_driver(uri)
        try:
            return driver.traits
        finally:
            await driver.close()

    return asyncio.run(ask())
