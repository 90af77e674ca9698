"""What a driver is good at, asked for a URI."""

from __future__ import annotations

import asyncio

from ..drivers.contract import Traits
from ..drivers.registry import open_driver
from ..drivers.uri import Uri

__all__ = ["traits_of"]


def traits_of(uri: Uri) -> Traits:
    """What the driver for ``uri`` is good at; its storage is not touched. Raises UriError."""

    async def ask() -> Traits:
        driver = open_driver(uri)
        try:
            return driver.traits
        finally:
            await driver.close()

    return asyncio.run(ask())
