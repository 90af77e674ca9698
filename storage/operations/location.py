"""A URI with the options to open it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from ...drivers.contract import Driver
from ...drivers.registry import opened_below
from ...drivers.uri import Uri, divided, parse

UriLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Place:
    """The location of a checkpoint or of a folder of checkpoints."""

    uri: Uri
    options: Mapping[str, object]

    @classmethod
    def of(cls, uri: UriLike, storage_options: Mapping[str, object] | None) -> Place:
        """Parse a URI. Raises UriError; an unknown scheme or option is only detected on opening."""
        return cls(parse(uri), storage_options or {})

    def divided(self) -> tuple[Place, str]:
        """Return the parent folder, and this place's key in it. Raises UriError if there is
        none."""
        folder, key = divided(self.uri)
        return Place(folder, self.options), key

    def opened(self, path: str = "") -> AbstractAsyncContextManager[Driver]:
        """Open a driver for ``path`` (a key, or empty); close it at the end."""
        return opened_below(self.uri, path, **self.options)
