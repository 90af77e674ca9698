"""Files of an fsspec file system below a root, as objects. All methods block, and raise the errors
of the file system's library."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fsspec import AbstractFileSystem

from ...core.forks.renewal import new_lock
from ...errors import DamagedError, StorageError
from ..contract import ObjectInfo, check_small
from ..local.names import is_temporary
from .kinds import Kind, modified_s

QUIET_S = 24 * 3600.0
"""Age without changes after which a temporary file counts as dead. There is no better sign."""


class Tree:
    """Files below ``root``, a path on the file system that ``fs_class`` creates from ``arguments``.
    Connects on first use. ``uri`` appears in messages."""

    def __init__(
        self,
        fs_class: type[AbstractFileSystem],
        arguments: Mapping[str, Any],
        root: str,
        kind: Kind,
        *,
        uri: str,
    ) -> None:
        self.root = root
        self.kind = kind
        self._fs_class = fs_class
        self._arguments = arguments
        self.uri = uri
        self._fs_made: AbstractFileSystem | None = None
        self._making = new_lock()

    @property
    def fs(self) -> AbstractFileSystem:
        """The file system, connected on first use, and shared with no other driver."""
        with self._making:
            if self._fs_made is None:
                uncached = {}
                if self.kind.listings:
                    uncached["use_listings_cache"] = False
                fs = self._fs_class(skip_instance_cache=True, **uncached, **self._arguments)
                if _is_sftp(fs):
                    # paramiko waits for the reply to each 32 KiB that it writes. With Nagle's
                    # algorithm, the kernel holds back the end of each request until the previous
                    # one is acknowledged: 30 ms per request, 1 MB/s.
                    transport = fs.client.get_transport()
                    transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._fs_made = fs
            return self._fs_made

    @property
    def is_connected(self) -> bool:
        """True if :meth:`disconnect` has a connection to close."""
        return self._fs_made is not None

    def disconnect(self) -> None:
        """Close the connection. fsspec has no method for this and relies on garbage collection."""
        fs: Any = self._fs_made
        self._fs_made = None
        if _is_sftp(fs):  # closes a thread, too
            fs.client.close()
        session = getattr(fs, "_s3", None) or getattr(fs, "_session", None)
        if session is not None and hasattr(fs, "close_session"):  # s3fs, gcsfs, http
            with contextlib.suppress(Exception):
                fs.close_session(fs.loop, session)

    def path(self, key: str) -> str:
        """Return the path of the object ``key`` on the file system."""
        if key:
            return f"{self.root}/{key}"
        return self.root or "/"

    def info(self, key: str) -> dict[str, Any]:
        """Return the file system's information about a file. Raises FileNotFoundError, also for a
        folder."""
        try:
            info: dict[str, Any] = self.fs.info(self.path(key))
        except NotADirectoryError as error:
            raise FileNotFoundError(f"{key} lies below a file") from error
        if info["type"] != "file":
            raise FileNotFoundError(f"{key} is not a file")
        return info

    def stat(self, key: str) -> ObjectInfo:
        """Return size and time of an object. Raises FileNotFoundError."""
        info = self.info(key)
        return ObjectInfo(key, int(info["size"] or 0), modified_s(info))

    def read_range(self, key: str, start: int, nbytes: int) -> bytes:
        """Return ``nbytes`` bytes from ``start``. Raises DamagedError if they exceed the end of the
        object."""
        stop = start + nbytes
        if start < 0:
            raise StorageError(f"no object has a byte {start}", uri=self.uri, key=key)
        data = b""
        if nbytes:
            data = self._cat(key, start, stop)
        if len(data) != nbytes or not data:
            if (reached := self.stat(key).nbytes) < stop:
                raise DamagedError(
                    f"object ends at byte {reached}, before {stop}", uri=self.uri, key=key
                )
            if data or nbytes:
                raise StorageError(
                    f"{len(data)} bytes arrived, not {nbytes}", uri=self.uri, key=key
                )
        return data

    def _cat(self, key: str, start: int, stop: int) -> bytes:
        cls = self._fs_class
        plain = (
            not getattr(cls, "async_impl", False) and cls.cat_file is AbstractFileSystem.cat_file
        )
        try:
            # Otherwise opening the file reads ahead and discards the data.
            data: bytes = self.fs.cat_file(
                self.path(key), start=start, end=stop, **({"cache_type": "none"} if plain else {})
            )
        except FileNotFoundError:
            raise
        except OSError:
            if self.stat(key).nbytes < stop:  # stores reject a range beyond the end
                return b""
            raise
        return data

    def get(self, key: str) -> bytes:
        """Return the content of a small object."""
        check_small(int(self.info(key)["size"] or 0), self.uri, key)
        data: bytes = self.fs.cat_file(self.path(key))
        return data

    def find(self, prefix: str) -> tuple[tuple[str, dict[str, Any]], ...]:
        """Return every file at or below ``prefix``, and every folder if the file system has real
        folders. Folders precede their content."""
        path = self.path(prefix)
        if self.kind.folders:
            below = self._walk(path)
        else:
            below = self.fs.find(path, detail=True).items()
        inside = path.rstrip("/") + "/"
        found = {name: info for name, info in below if name == path or name.startswith(inside)}
        if prefix and path not in found:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                info = self.fs.info(path)
                if self.kind.folders or info["type"] == "file":
                    found = {path: info, **found}
        return tuple(found.items())

    def _walk(self, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
        pending = [path]
        while pending:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                for info in self.fs.ls(pending.pop(), detail=True):
                    yield info["name"], info
                    if info["type"] == "directory":
                        pending.append(info["name"])

    def delete(self, key: str) -> None:
        """Remove an object. A missing object is not an error."""
        with contextlib.suppress(FileNotFoundError):
            self.info(key)
            self.fs.rm_file(self.path(key))

    def sweep(self, prefix: str) -> None:
        """Remove leftovers of dead uploads at or below ``prefix``."""
        if self.kind.appears == "closed":
            return  # unfinished files have no name there
        folder, _, name = prefix.rpartition("/")
        own = f".{name[:48]}."
        beside: list[dict[str, Any]] = []
        if self.fs.isdir(self.path(folder)):
            beside = self.fs.ls(self.path(folder), detail=True)
        found = (
            *((i["name"], i) for i in beside if i["name"].rpartition("/")[2].startswith(own)),
            *self.find(prefix),
        )
        for path, info in found:
            quiet_s = time.time() - (modified_s(info) or time.time())
            if (
                is_temporary(path.rpartition("/")[2])
                and info["type"] == "file"
                and quiet_s > QUIET_S
            ):
                self.remove(path)
        self.remove_empty(
            [self.path(prefix), *(path for path, info in found if info["type"] == "directory")]
        )

    def remove(self, path: str) -> None:
        """Remove the file at a path. A missing file is not an error."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(path)

    def remove_empty(self, folders: Iterable[str]) -> None:
        """Remove the empty ones among these folders, deepest first."""
        for folder in sorted(folders, key=lambda path: path.count("/"), reverse=True):
            with contextlib.suppress(OSError):  # not empty, or gone
                self.fs.rmdir(folder)


def _is_sftp(fs: Any) -> bool:
    return hasattr(fs, "client") and hasattr(fs, "ftp")
