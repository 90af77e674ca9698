"""What lies under a checkpoint's URI, committed or not: the files that a dead save left behind.

On a local file system unfinished uploads are seen too. Elsewhere drivers show whole objects only,
and so do we.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ...drivers.local.names import is_temporary
from ...drivers.registry import open_driver
from ...drivers.uri import parse

__all__ = ["Found", "find", "image_is_begun"]


@dataclass(frozen=True, slots=True)
class Found:
    """One file. ``stored_nbytes`` of its ``nbytes`` have a place on the device; ``finished``: it
    was given its name."""

    key: str
    nbytes: int
    stored_nbytes: int
    finished: bool


def find(uri: str) -> list[Found]:
    """Every file under ``uri``, by key. A folder that does not exist is empty. Raises a
    StorageError."""
    where = parse(uri)
    found: Iterable[Found]
    if where.scheme == "file":
        found = _on_disk(where.location)
    else:
        found = asyncio.run(_listed(uri))
    return sorted(found, key=lambda f: f.key)


def image_is_begun(uri: str, rank: int) -> bool:
    """Whether bytes of this rank's image of an unfinished save are stored by now. Only seen on a
    local file system."""
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
    driver = open_driver(uri)
    try:
        return [Found(info.key, info.nbytes, info.nbytes, True) async for info in driver.list()]
    finally:
        await driver.close()
