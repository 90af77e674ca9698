"""The files below a checkpoint's URI, committed or not: the leftovers of a dead save.

On a local file system this includes unfinished uploads. Other drivers show whole objects only.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ...drivers.local.names import is_temporary
from ...drivers.registry import opened_driver
from ...drivers.uri import parse


@dataclass(frozen=True, slots=True)
class Found:
    """A file. ``stored_nbytes`` of its ``nbytes`` are allocated on the device; ``finished`` means
    that it has its final name."""

    key: str
    nbytes: int
    stored_nbytes: int
    finished: bool


def find(uri: str) -> list[Found]:
    """Return every file below ``uri``, by key; none if the folder does not exist. Raises a
    StorageError."""
    where = parse(uri)
    found: Iterable[Found]
    if where.scheme == "file":
        found = _on_disk(where.location)
    else:
        found = asyncio.run(_listed(uri))
    return sorted(found, key=lambda f: f.key)


def image_is_begun(uri: str, rank: int) -> bool:
    """Return whether the storage holds bytes of this rank's image of an unfinished save. Works on a
    local file system only."""
    name = f".{rank}.safetensors."
    return any(f.stored_nbytes and not f.finished and name in f.key for f in find(uri))


def _on_disk(root: str) -> Iterator[Found]:
    for folder, _folders, names in os.walk(root):
        for name in names:
            path = os.path.join(folder, name)
            try:
                status = os.stat(path, follow_symlinks=False)
            except FileNotFoundError:  # renamed or removed since it was listed
                continue
            stored_nbytes = min(status.st_size, status.st_blocks * 512)
            yield Found(
                os.path.relpath(path, root), status.st_size, stored_nbytes, not is_temporary(name)
            )


async def _listed(uri: str) -> list[Found]:
    async with opened_driver(uri) as driver:
        return [Found(info.key, info.nbytes, info.nbytes, True) async for info in driver.list()]
