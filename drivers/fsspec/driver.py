"""``fsspec+X://…``: whatever fsspec's file system X reaches: ``fsspec+sftp://host/folder``,
``fsspec+memory://run``.

For storage that has no driver of its own. fsspec offers no direct reads, no parts in parallel, and
no exclusive put that is atomic, and the traits say so: an upload goes in order, and commits take
the weaker way (``storage/protocol/commit.py``). How a file comes to be seen differs by file system;
``kinds`` knows it of the common ones. Every call is made from threads of the driver; asynchronous
file systems do the same work on fsspec's own loop. Nothing is cached.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any, ClassVar, ParamSpec, TypeVar
from urllib.parse import unquote

from fsspec import AbstractFileSystem, get_filesystem_class

from ...core.aio import side_by_side
from ...errors import ExistsError, UriError
from ..contract import Buffer, Driver, ObjectInfo, Traits, Upload, check_key
from ..layers.stack import common_options
from ..local.names import is_temporary
from ..options import Option, integer, option_values, or_off, size
from ..ranges import Ranges
from ..threads import OperationThreads
from ..uri import Uri, redact, root_key
from .errors import fsspec_errors
from .kinds import kind_of, modified_s
from .options import check_no_secrets, options_of
from .tree import Tree
from .uploads import FsspecUpload

__all__ = ["FsspecDriver", "driver_class_of"]

_PREFIX = "fsspec+"
_CLOSE_TIMEOUT_S = 60.0

P = ParamSpec("P")
T = TypeVar("T")


def driver_class_of(protocol: str) -> type[FsspecDriver]:
    """The driver for one of fsspec's protocols, with the options that its file system takes.

    Raises UriError where fsspec does not know it, or what serves it is not installed.
    """
    try:
        fs_class = get_filesystem_class(protocol)
    except ValueError as error:
        raise UriError(
            f"fsspec knows no {protocol}://", advice="`fsspec.available_protocols()` lists them."
        ) from error
    except ImportError as error:
        raise UriError(f"fsspec's {protocol}:// cannot be imported: {error}") from error
    options = {**options_of(protocol, fs_class), **FsspecDriver.OPTIONS}
    for taken in options.keys() & common_options(remote=True).keys():
        del options[taken]
    remote = kind_of(protocol, fs_class).shared
    return type(
        "FsspecDriver",
        (FsspecDriver,),
        {"OPTIONS": options, "fs_class": fs_class, "remote": remote},
    )


class FsspecDriver(Driver):
    """Objects are files of an fsspec file system. Connects at the first operation."""

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "threads": Option(
            integer(1, 256), 8, "operations in flight, where the file system allows more than one"
        ),
        "part_size": Option(
            size(1 << 20, 1 << 30), 16 << 20, "of one write, and of one part of an upload"
        ),
        "object_max_nbytes": Option(
            or_off(size(1, 1 << 60)), None, "the largest file that the file system takes"
        ),
    }
    fs_class: ClassVar[type[AbstractFileSystem]]

    def __init__(self, uri: Uri) -> None:
        """``uri``: its options are known and valid."""
        values = option_values(self.OPTIONS, uri)
        protocol = uri.scheme.removeprefix(_PREFIX)
        plain = f"{protocol}://{unquote(uri.location)}"
        self.uri = uri.root
        root_key(uri.location.partition("/")[2], uri)  # refuses a root that has two spellings
        kind = kind_of(protocol, self.fs_class)
        self._tree = Tree(
            self.fs_class,
            _arguments(self.fs_class, plain, uri, values),
            _root(self.fs_class, plain, protocol, self.uri),
            kind,
            uri=self.uri,
        )
        self._part_nbytes = values["part_size"]
        if kind.threads:
            threads = values["threads"]
        else:
            threads = 1
        self.traits = Traits(
            part_nbytes=self._part_nbytes,
            part_min_nbytes=1,
            align_nbytes=1,
            concurrency=threads,
            coalesce_nbytes=1 << 20,
            part_order="serial",
            exclusive_is_atomic=False,
            shared=kind.shared,
            hands_over=True,
            upload_nbytes=self._part_nbytes,
            object_max_nbytes=values["object_max_nbytes"],
        )
        self._threads = OperationThreads(threads, uri=self.uri, errors=fsspec_errors)
        self._uploads: set[FsspecUpload] = set()

    @classmethod
    def open(cls, uri: Uri) -> FsspecDriver:
        """The driver for ``uri``. Raises UriError for a secret, or a location that cannot be
        one."""
        if not hasattr(cls, "fs_class"):
            raise UriError(
                "say which of fsspec's file systems",
                uri=uri.redacted,
                advice="fsspec+sftp://host/folder, say.",
            )
        return cls(uri)

    async def read(self, key: str, start: int, into: Buffer) -> None:
        await self._threads.operate("read", self._checked(key), self._read, key, start, into)

    async def fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        return memoryview(
            await self._threads.operate(
                "read", self._checked(key), self._tree.read_range, key, start, nbytes
            )
        )

    async def create(self, key: str, nbytes: int) -> Upload:
        upload = self._upload(self._checked(key), nbytes)
        try:
            await self._threads.operate("create", key, upload.begin)
        except BaseException:
            await upload.abort()
            raise
        self._uploads.add(upload)
        return upload

    async def get(self, key: str) -> bytes:
        return await self._threads.operate("get", self._checked(key), self._tree.get, key)

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        """See :meth:`Driver.put`. ``exclusive`` looks first: of two that look at the same time,
        both may succeed."""
        await self._threads.operate("put", self._checked(key), self._put, key, data, exclusive)

    async def stat(self, key: str) -> ObjectInfo:
        return await self._threads.operate("stat", self._checked(key), self._tree.stat, key)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        for path, info in await self._threads.operate(
            "list", prefix, self._tree.find, self._checked(prefix) if prefix else ""
        ):
            key = path[len(self._tree.root) + 1 :]
            if info["type"] == "file" and not is_temporary(key.rpartition("/")[2]):
                yield ObjectInfo(key, int(info["size"] or 0), modified_s(info))

    async def delete(self, key: str) -> None:
        await self._threads.operate("delete", self._checked(key), self._tree.delete, key)

    async def delete_all(self, prefix: str) -> None:
        """See :meth:`Driver.delete_all`. As many files at a time as there are threads."""
        found = await self._threads.operate(
            "delete", self._checked(prefix), self._tree.find, prefix
        )
        files = [path for path, info in found if info["type"] != "directory"]
        await side_by_side(
            *(self._threads.operate("delete", prefix, self._tree.remove, path) for path in files)
        )
        folders = [path for path, info in found if info["type"] == "directory"]
        await self._threads.operate("delete", prefix, self._tree.remove_empty, folders)

    async def sweep(self, prefix: str) -> None:
        """See :meth:`Driver.sweep`. Dead: not changed for a day. Parts that a store keeps of
        unfinished uploads stay: give the bucket a lifecycle rule."""
        await self._threads.operate("sweep", self._checked(prefix), self._tree.sweep, prefix)

    async def close(self) -> None:
        """See :meth:`Driver.close`. Drops uploads that are neither committed nor aborted."""
        await self._threads.close(_CLOSE_TIMEOUT_S)
        for upload in tuple(self._uploads):
            upload.drop()
        if self._tree.is_connected:
            await asyncio.to_thread(self._tree.disconnect)

    def _checked(self, key: str) -> str:
        if any(is_temporary(part) for part in check_key(key, uri=self.uri).split("/")):
            raise UriError(
                "names of this form are kept for unfinished uploads", uri=self.uri, key=key
            )
        try:
            key.encode()
        except UnicodeEncodeError as error:
            raise UriError(
                f"key {key!r} is no text that could be sent", uri=self.uri, key=key
            ) from error
        return key

    def _upload(self, key: str, nbytes: int) -> FsspecUpload:
        written = Ranges(nbytes, uri=self.uri, key=key)
        return FsspecUpload(
            key, self._tree, written, self._threads, self._uploads, part_nbytes=self._part_nbytes
        )

    # What follows blocks, and runs in threads.

    def _read(self, key: str, start: int, into: Buffer) -> None:
        into[:] = self._tree.read_range(key, start, len(into))

    def _put(self, key: str, data: bytes, exclusive: bool) -> None:
        if exclusive:
            with contextlib.suppress(FileNotFoundError):
                self._tree.info(key)
                raise ExistsError("object exists already", uri=self.uri, key=key)
        upload = self._upload(key, len(data))
        try:
            upload.begin()
            upload.append(memoryview(data))
            upload.publish()
        finally:
            upload.drop()


def _arguments(
    cls: type[AbstractFileSystem], plain: str, uri: Uri, values: Mapping[str, Any]
) -> dict[str, Any]:
    """What the file system is made with: from the location (a host, say), and from the options that
    were given."""
    located = {
        k: v for k, v in cls._get_kwargs_from_urls(plain).items() if k not in ("path", "protocol")
    }
    given = {name: values[name] for name in uri.options if name not in FsspecDriver.OPTIONS}
    check_no_secrets(redact(f"{uri.scheme}://{uri.location}"), located, given)
    return located | given


def _root(cls: type[AbstractFileSystem], plain: str, protocol: str, where: str) -> str:
    """The path of the root on its file system, without a slash at the end."""
    root = str(cls._strip_protocol(plain)).rstrip("/")
    if not root and protocol != "memory":
        raise UriError("the root of a whole file system is no place for checkpoints", uri=where)
    if protocol in ("file", "local") and not plain.startswith(f"{protocol}:///"):
        raise UriError("an absolute path takes three slashes", uri=where)
    return root
