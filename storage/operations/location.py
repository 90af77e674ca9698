"""Where checkpoints lie: a URI with the options to open it, and what is below it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from ...drivers.contract import Driver
from ...drivers.registry import open_driver
from ...drivers.uri import Uri, divided, join, parse

__all__ = ["Place"]


@dataclass(frozen=True, slots=True)
class Place:
    """A checkpoint's place, or that of a folder of them."""

    uri: Uri
    options: Mapping[str, object]

    @classmethod
    def of(cls, uri: str | os.PathLike[str], storage_options: Mapping[str, object] | None) -> Place:
        """Raises UriError for what is no URI; an unknown scheme or option is found when it is
        opened."""
        return cls(parse(uri), storage_options or {})

    def divided(self) -> tuple[Place, str]:
        """The folder of what lies here, and its key there. Raises UriError where it is in none."""
        folder, key = divided(self.uri)
        return Place(folder, self.options), key

    @contextlib.asynccontextmanager
    async def opened(self, path: str = "") -> AsyncIterator[Driver]:
        """A driver for what lies at ``path`` (a key, or empty), closed at the end."""
        driver = open_driver(join(self.uri, *path.split("/")) if path else self.uri, **self.options)
        try:
            yield driver
        finally:
            await driver.close()
