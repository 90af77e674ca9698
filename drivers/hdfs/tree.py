"""Walking and sweeping folders."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from ...errors import StorageError
from .client import Client
from .names import belongs_to, is_temporary

if TYPE_CHECKING:
    from hdfs_native import FileStatus

__all__ = ["sweep", "walk"]


async def walk(client: Client, top: str, key: str) -> AsyncIterator[FileStatus]:
    """Yield every file and folder below ``top``, or ``top`` itself if it is a file. Omits entries
    that vanish meanwhile."""
    folders = [top]
    while folders:
        async for status in client.entries(folders.pop(), key):
            if status.isdir:
                folders.append(status.path)
            yield status


async def sweep(client: Client, path: str, key: str, quiet_s: float) -> None:
    """Remove temporary files of dead uploads to ``path`` and below it, and folders that are then
    empty.

    An upload is dead if it is older, by more than ``quiet_s``, than the newest file or folder seen,
    so only the name node's clock matters. Live uploads are safe: a folder is created together with
    a file in it, and is removed only when empty.
    """
    above, _, name = path.rpartition("/")
    beside = [status async for status in client.entries(above or "/", key)]
    if any(s.path == path for s in beside):
        below = [status async for status in walk(client, path, key)]
    else:
        below = []
    newest_ms = max((status.modification_time for status in beside + below), default=0)
    uploads = [s for s in beside if belongs_to(_name(s), name)] + [
        s for s in below if is_temporary(_name(s))
    ]
    gone = set()
    for status in uploads:
        if newest_ms - status.modification_time > quiet_s * 1000 and not status.isdir:
            await client.delete(status.path, key)
            gone.add(status.path)
    kept = {
        status.path.rpartition("/")[0]
        for status in below
        if not status.isdir and status.path not in gone
    }
    folders = {status.path for status in below if status.isdir} | {
        s.path for s in beside if s.isdir and s.path == path
    }
    for folder in sorted(folders, key=len, reverse=True):
        if folder not in kept and not await _removed(client, folder, key):
            kept.add(folder)
        if folder in kept:
            kept.add(folder.rpartition("/")[0])


async def _removed(client: Client, folder: str, key: str) -> bool:
    try:
        await client.delete(folder, key)
        return True
    except StorageError as error:
        if "PathIsNotEmptyDirectoryException" in str(error.__cause__):
            return False
        raise


def _name(status: FileStatus) -> str:
    return status.path.rpartition("/")[2]
