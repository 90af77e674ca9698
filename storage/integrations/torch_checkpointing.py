"""Any Holdfast driver as a storage of torch_checkpointing, which itself supports only local files.

    CheckpointManager.Config(storage_config=HoldfastStorageConfig("s3://bucket/run"))

Paths, and so the names of checkpoints, are relative to that URI.

Scope: files. Their contents are in torch_checkpointing's own format, including pickles, and are not
verified. Folders exist only through their contents, as on object stores; renaming one copies it.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from torch_checkpointing.storage.base_storage import ReadArgs, Storage, StorageConfig

from ...core.aio import at_most
from ...drivers.contract import Driver, ObjectInfo
from ...drivers.registry import open_driver
from ...errors import ExistsError, NotFoundError, UriError
from ..runtime.engine import close_later, run
from .driver_file import DriverFile, read_range

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["HoldfastStorage", "HoldfastStorageConfig"]

_READ_NBYTES = 1 << 20
"""The buffer size for small reads."""
_COPIES_MAX = 8
_METADATA = "metadata.pkl"


@dataclass
class HoldfastStorageConfig(StorageConfig):  # type: ignore[misc]  # its types are not installed
    """A storage at ``uri``.

    ``storage_options``: storage options by name; options in the URI take precedence.
    """

    uri: str
    storage_options: Mapping[str, object] = field(default_factory=dict)

    def create_storage(self) -> HoldfastStorage:
        """Return the storage, without accessing it.

        Raises UriError for an unknown scheme or option.
        """
        return HoldfastStorage(self)


class HoldfastStorage(Storage):  # type: ignore[misc]
    """The files below one URI.

    Failures raise :class:`holdfast.StorageError`, which is an OSError, and FileNotFoundError for a
    missing file.
    """

    def __init__(self, config: HoldfastStorageConfig) -> None:
        self._driver = open_driver(config.uri, **config.storage_options)
        self._opened_in = os.getpid()

    def __del__(self) -> None:
        """Close the driver in the background: destructors run in any thread, and must not block."""
        if getattr(self, "_opened_in", None) == os.getpid() and not sys.is_finalizing():
            close_later(self._driver.close)

    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> io.BufferedIOBase:
        """Return the file for reading, seekable; already in memory unless ``read_args`` says
        otherwise.
        """
        if read_args is None or read_args.pre_read_full_file:
            return io.BytesIO(self.read(path))
        return io.BufferedReader(DriverFile(self._driver, _key(path)), _READ_NBYTES)

    def stream_write(self, path: Path) -> _Upload:
        """Return a buffer that is stored as a whole when closed.

        Nothing is stored if an error leaves its ``with`` block, or if it is never closed.
        """
        return _Upload(lambda data: self.write(path, data))

    def read(self, path: Path, read_args: ReadArgs | None = None) -> bytes:
        content = bytearray(self.getsize(path))
        run(read_range(self._driver, _key(path), 0, memoryview(content)))
        return bytes(content)

    def write(self, path: Path, data: Buffer) -> None:
        content = memoryview(data).cast("B")

        async def part(start: int, nbytes: int) -> memoryview:
            return content[start : start + nbytes]

        traits = self._driver.traits
        at_a_time = 1 if traits.part_order == "serial" else traits.concurrency
        run(_store(self._driver, _key(path), len(content), part, at_a_time))

    def delete(self, path: Path) -> None:
        run(self._driver.delete(_key(path)))

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        """Do nothing: a folder exists as soon as it has a file."""

    def rmdir(self, path: Path) -> None:
        """Delete a folder with its contents."""
        run(self._driver.delete_all(_key(path)))

    def rename(
        self,
        src_path: Path,
        dst_path: Path,
        is_directory: bool = False,
        background_cleanup: bool = False,
    ) -> None:
        """Copy a file, or all files of a folder, then delete the originals.

        torch_checkpointing's metadata is copied last.
        """
        run(_renamed(self._driver, _key(src_path), _key(dst_path)))

    def ls(self, path: Path) -> list[str]:
        """Return the names in a folder."""
        found = run(_listed(self._driver, _key(path)))
        return sorted({Path(info.key).relative_to(_key(path)).parts[0] for info in found})

    def exists(self, path: Path) -> bool:
        """Return whether the file exists, or one below it."""
        return bool(run(_listed(self._driver, _key(path))))

    def getsize(self, path: Path) -> int:
        return run(self._driver.stat(_key(path))).nbytes

    def isdir(self, path: Path) -> bool:
        key = _key(path)
        return any(info.key != key for info in run(_listed(self._driver, key)))

    def remap_path(self, path: Path) -> str:
        return f"{self._driver.uri}/{_key(path)}"


class _Upload(io.BytesIO):
    """A buffer for an upload, stored on close."""

    def __init__(self, store: Callable[[memoryview], None]) -> None:
        super().__init__()
        self._store = store

    def close(self) -> None:
        if self.closed:
            return
        try:
            with self.getbuffer() as content:
                self._store(content)
        finally:
            super().close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            super().close()

    def __del__(self) -> None:
        """Do not store an unfinished upload, as the base class would."""


def _key(path: Path) -> str:
    parts = [part for part in Path(path).parts if part != os.sep]
    if parts and parts[0].endswith(":"):
        raise UriError(
            f"{os.fspath(path)!r} is a URI",
            advice="Paths are relative to the URI of the HoldfastStorageConfig: give a name alone.",
        )
    return "/".join(parts)


async def _listed(driver: Driver, key: str) -> list[ObjectInfo]:
    return [info async for info in driver.list(key)]


async def _store(
    driver: Driver,
    key: str,
    nbytes: int,
    part: Callable[[int, int], Awaitable[memoryview]],
    at_a_time: int = 1,
) -> None:
    """Create an object from the parts that ``part(start, nbytes)`` returns.

    ``at_a_time`` above 1 requires parts that are available at once: a driver may need their writes
    to start in order.
    """
    upload = await driver.create(key, nbytes)
    step = driver.traits.part_nbytes

    async def write(start: int) -> None:
        await upload.write(start, await part(start, min(step, nbytes - start)))

    try:
        await at_most(at_a_time, map(write, range(0, nbytes, step)))
        await upload.commit()
    except BaseException:
        await upload.abort()
        raise


async def _renamed(driver: Driver, source: str, destination: str) -> None:
    """Copy all objects of ``source``, then delete it.

    Raises NotFoundError, and ExistsError if the destination exists, unless a file replaces a file.
    """
    moved = await _listed(driver, source)
    if not moved:
        raise NotFoundError("no such file or folder", uri=driver.uri, key=source)
    is_file = moved[0].key == source
    taken = await _listed(driver, destination)
    if taken and not (is_file and taken[0].key == destination):
        raise ExistsError("the destination is taken", uri=driver.uri, key=destination)

    async def copied(info: ObjectInfo) -> None:
        key = destination + info.key.removeprefix(source)
        await _store(driver, key, info.nbytes, partial(driver.fetch, info.key))

    for last in (False, True):
        group = [info for info in moved if info.key.endswith(_METADATA) is last]
        await at_most(_COPIES_MAX, map(copied, group))
    if is_file:
        await driver.delete(source)
    else:
        await driver.delete_all(source)
