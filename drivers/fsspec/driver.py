"""``fsspec+X://…``: any storage that fsspec's file system X reaches, such as
``fsspec+sftp://host/folder`` or ``fsspec+memory://run``.

For storage without a driver of its own. fsspec offers no direct reads, no parallel parts and no
atomic exclusive put, and the traits reflect that: parts are written in order, and commits use the
weaker protocol (``storage/protocol/commit.py``). File systems differ in how a new file becomes
visible; ``kinds`` describes the common ones. All calls run in the driver's threads; asynchronous
file systems use fsspec's own event loop. Nothing is cached.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import unquote

from fsspec import AbstractFileSystem, get_filesystem_class

from ...core.aio import side_by_side
from ...errors import UriError
from ..asynchronous import AsyncDriver
from ..contract import Buffer, ObjectInfo, Traits, check_name
from ..layers.stack import common_options
from ..local.names import is_temporary
from ..options import Option, integer, option_values, or_off, size
from ..threads import Threads
from ..uri import Uri, redact, root_key
from .errors import fsspec_errors
from .kinds import check_no_secrets, kind_of, modified_s, options_of
from .tree import Tree
from .uploads import FsspecUpload

_PREFIX = "fsspec+"
_CLOSE_TIMEOUT_S = 60.0


def driver_class_of(protocol: str) -> type[FsspecDriver]:
    """Return the driver class for one of fsspec's protocols, with the options of its file system.

    Raises UriError if fsspec does not know the protocol, or its package is not installed.
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


class FsspecDriver(AsyncDriver):
    """Objects stored as files of an fsspec file system. Connects at the first operation."""

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "threads": Option(
            integer(1, 256), 8, "operations in flight, where the file system allows more than one"
        ),
        "part_size": Option(
            size(1 << 20, 1 << 30), 16 << 20, "size of one write, and of one part of an upload"
        ),
        "object_max_nbytes": Option(
            or_off(size(1, 1 << 60)), None, "size of the largest file that the file system accepts"
        ),
    }
    fs_class: ClassVar[type[AbstractFileSystem]]

    def __init__(self, uri: Uri) -> None:
        """Take a URI whose options have been validated."""
        super().__init__(uri, errors=fsspec_errors)
        values = option_values(self.OPTIONS, uri)
        protocol = uri.scheme.removeprefix(_PREFIX)
        plain = f"{protocol}://{unquote(uri.location)}"
        root_key(uri.location.partition("/")[2], uri)  # rejects a root with two spellings
        kind = kind_of(protocol, self.fs_class)
        self._tree = Tree(
            self.fs_class,
            _arguments(self.fs_class, plain, uri, values),
            _root(self.fs_class, plain, protocol, self.uri),
            kind,
            uri=self.uri,
        )
        threads = 1
        if kind.threads:
            threads = values["threads"]
        self.traits = Traits(
            part_nbytes=values["part_size"],
            part_min_nbytes=1,
            align_nbytes=1,
            concurrency=threads,
            coalesce_nbytes=1 << 20,
            part_order="serial",
            exclusive_is_atomic=False,
            shared=kind.shared,
            hands_over=True,
            upload_nbytes=values["part_size"],
            object_max_nbytes=values["object_max_nbytes"],
        )
        self._threads = Threads(threads, uri=self.uri)

    @classmethod
    def open(cls, uri: Uri) -> FsspecDriver:
        """Return the driver for ``uri``. Raises UriError for a secret or an invalid location."""
        if not hasattr(cls, "fs_class"):
            raise UriError(
                "the URI does not name one of fsspec's file systems",
                uri=uri.redacted,
                advice="For example: fsspec+sftp://host/folder.",
            )
        return cls(uri)

    async def _fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        read = self._tree.read_range
        return memoryview(await self._threads.run(read, self._checked(key), start, nbytes))

    async def _get(self, key: str) -> bytes:
        return await self._threads.run(self._tree.get, self._checked(key))

    async def _stat(self, key: str) -> ObjectInfo:
        return await self._threads.run(self._tree.stat, self._checked(key))

    async def _list(self, prefix: str) -> AsyncGenerator[Sequence[ObjectInfo], None]:
        found = await self._threads.run(self._tree.find, self._checked(prefix) if prefix else "")
        keys = ((path[len(self._tree.root) + 1 :], info) for path, info in found)
        yield [
            ObjectInfo(key, int(info["size"] or 0), modified_s(info))
            for key, info in keys
            if info["type"] == "file" and not is_temporary(key.rpartition("/")[2])
        ]

    async def _delete(self, key: str) -> None:
        await self._threads.run(self._tree.delete, self._checked(key))

    async def _delete_all(self, prefix: str) -> None:
        """See :meth:`Driver.delete_all`. Deletes as many files concurrently as there are
        threads."""
        found = await self._threads.run(self._tree.find, self._checked(prefix))
        files = [path for path, info in found if info["type"] != "directory"]
        await side_by_side(*(self._threads.run(self._tree.remove, path) for path in files))
        folders = [path for path, info in found if info["type"] == "directory"]
        await self._threads.run(self._tree.remove_empty, folders)

    async def _sweep(self, prefix: str) -> None:
        """See :meth:`Driver.sweep`. An upload is dead after a day without changes. Parts of
        unfinished uploads in object stores stay: use a lifecycle rule for the bucket."""
        await self._threads.run(self._tree.sweep, self._checked(prefix))

    def _upload(self, key: str, nbytes: int) -> FsspecUpload:
        return FsspecUpload(self, self._checked(key), nbytes, self._tree, self._threads)

    async def _disconnect(self) -> None:
        await self._threads.close(_CLOSE_TIMEOUT_S)
        if self._tree.is_connected:
            await asyncio.to_thread(self._tree.disconnect)

    def _checked(self, key: str) -> str:
        return check_name(key, uri=self.uri, is_reserved=is_temporary)


def _arguments(
    cls: type[AbstractFileSystem], plain: str, uri: Uri, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the file system's constructor arguments: from the location (such as a host) and from
    the given options."""
    located = {
        k: v for k, v in cls._get_kwargs_from_urls(plain).items() if k not in ("path", "protocol")
    }
    given = {name: values[name] for name in uri.options if name not in FsspecDriver.OPTIONS}
    check_no_secrets(redact(f"{uri.scheme}://{uri.location}"), located, given)
    return located | given


def _root(cls: type[AbstractFileSystem], plain: str, protocol: str, where: str) -> str:
    root = str(cls._strip_protocol(plain)).rstrip("/")
    if not root and protocol != "memory":
        raise UriError("the root of a whole file system is no place for checkpoints", uri=where)
    if protocol in ("file", "local") and not plain.startswith(f"{protocol}:///"):
        raise UriError("an absolute path takes three slashes", uri=where)
    return root
