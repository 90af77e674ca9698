"""Deletes a benchmark's data."""

from __future__ import annotations

import asyncio

from ..drivers.registry import open_driver
from ..drivers.uri import Uri

__all__ = ["clear"]


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
