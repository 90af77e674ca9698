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
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, ParamSpec, TypeVar
from urllib.parse import unquote

from fsspec import AbstractFileSystem, get_filesystem_class

from ...core.aio import side_by_side
from ...core.forks.renewal import new_lock
from ...errors import DamagedError, ExistsError, StorageError, UriError
from ..contract import Buffer, Driver, ObjectInfo, Traits, Upload, check_key, check_small
from ..layers.stack import common_options
from ..local.names import is_temporary, temporary_name
from ..local.tree import sync_folder
from ..options import Option, integer, option_values, size
from ..ranges import Ranges
from ..threads import Threads
from ..uri import Uri, redact
from .connections import connected, disconnect
from .errors import fsspec_errors
from .kinds import kind_of, modified_s
from .options import check_no_secrets, options_of

__all__ = ["FsspecDriver", "driver_class_of"]

QUIET_S = 24 * 3600.0
"""How long a temporary file must not have changed to be taken for dead: nothing better can be
known."""

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
    }
    fs_class: ClassVar[type[AbstractFileSystem]]

    def __init__(self, uri: Uri) -> None:
        """``uri``: its options are known and valid."""
        values = option_values(self.OPTIONS, uri)
        protocol = uri.scheme.removeprefix(_PREFIX)
        plain = f"{protocol}://{unquote(uri.location)}"
        self.uri = uri.root
        self._kind = kind_of(protocol, self.fs_class)
        self._arguments = _arguments(self.fs_class, plain, uri, values)
        self._root = _root(self.fs_class, plain, protocol, self.uri)
        self._part_nbytes = values["part_size"]
        if self._kind.threads:
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
            shared=self._kind.shared,
            hands_over=True,
            upload_nbytes=self._part_nbytes,
        )
        self._threads = Threads(threads, uri=self.uri)
        self._uploads: set[_Upload] = set()
        self._fs_made: AbstractFileSystem | None = None
        self._making = new_lock()

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
        await self._run("read", self._checked(key), self._read, key, start, into)

    async def fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        return memoryview(
            await self._run("read", self._checked(key), self._range, key, start, nbytes)
        )

    async def create(self, key: str, nbytes: int) -> Upload:
        upload = _Upload(self, self._checked(key), nbytes)
        try:
            await self._run("create", key, upload.begin)
        except BaseException:
            await upload.abort()
            raise
        self._uploads.add(upload)
        return upload

    async def get(self, key: str) -> bytes:
        return await self._run("get", self._checked(key), self._get, key)

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        """See :meth:`Driver.put`. ``exclusive`` looks first: of two that look at the same time,
        both may succeed."""
        await self._run("put", self._checked(key), self._put, key, data, exclusive)

    async def stat(self, key: str) -> ObjectInfo:
        return await self._run("stat", self._checked(key), self._stat, key)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        for path, info in await self._run(
            "list", prefix, self._find, self._checked(prefix) if prefix else ""
        ):
            key = path[len(self._root) + 1 :]
            if info["type"] == "file" and not is_temporary(key.rpartition("/")[2]):
                yield ObjectInfo(key, int(info["size"] or 0), modified_s(info))

    async def delete(self, key: str) -> None:
        await self._run("delete", self._checked(key), self._delete, key)

    async def delete_all(self, prefix: str) -> None:
        """See :meth:`Driver.delete_all`. As many files at a time as there are threads."""
        found = await self._run("delete", self._checked(prefix), self._find, prefix)
        files = [path for path, info in found if info["type"] != "directory"]
        await side_by_side(*(self._run("delete", prefix, self._remove, path) for path in files))
        folders = [path for path, info in found if info["type"] == "directory"]
        await self._run("delete", prefix, self._remove_empty, folders)

    async def sweep(self, prefix: str) -> None:
        """See :meth:`Driver.sweep`. Dead: not changed for a day. Parts that a store keeps of
        unfinished uploads stay: give the bucket a lifecycle rule."""
        await self._run("sweep", self._checked(prefix), self._sweep, prefix)

    async def close(self) -> None:
        """See :meth:`Driver.close`. Drops uploads that are neither committed nor aborted."""
        await self._threads.close(_CLOSE_TIMEOUT_S)
        for upload in tuple(self._uploads):
            upload.drop()
        fs = self._fs_made
        self._fs_made = None
        if fs is not None:
            await asyncio.to_thread(disconnect, fs)

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

    async def _run(
        self, doing: str, key: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        def translated() -> T:
            with fsspec_errors(doing, self.uri, key):
                return call(*args, **kwargs)

        return await self._threads.run(translated)

    # What follows blocks, and runs in threads.

    @property
    def _fs(self) -> AbstractFileSystem:
        with self._making:
            if self._fs_made is None:
                self._fs_made = connected(self.fs_class, self._kind, self._arguments)
            return self._fs_made

    def _path(self, key: str) -> str:
        if key:
            return f"{self._root}/{key}"
        return self._root or "/"

    def _info(self, key: str) -> dict[str, Any]:
        """What the file system says of a file. FileNotFoundError also for a folder."""
        try:
            info: dict[str, Any] = self._fs.info(self._path(key))
        except NotADirectoryError as error:
            raise FileNotFoundError(f"{key} lies below a file") from error
        if info["type"] != "file":
            raise FileNotFoundError(f"{key} is no file")
        return info

    def _stat(self, key: str) -> ObjectInfo:
        info = self._info(key)
        return ObjectInfo(key, int(info["size"] or 0), modified_s(info))

    def _read(self, key: str, start: int, into: Buffer) -> None:
        into[:] = self._range(key, start, len(into))

    def _range(self, key: str, start: int, nbytes: int) -> bytes:
        stop = start + nbytes
        if start < 0:
            raise StorageError(f"no object has a byte {start}", uri=self.uri, key=key)
        if nbytes:
            data = self._cat(key, start, stop)
        else:
            data = b""
        if len(data) != nbytes or not data:
            if (reached := self._stat(key).nbytes) < stop:
                raise DamagedError(
                    f"object ends at byte {reached}, before {stop}", uri=self.uri, key=key
                )
            if data or nbytes:
                raise StorageError(f"{len(data)} bytes came, not {nbytes}", uri=self.uri, key=key)
        return data

    def _cat(self, key: str, start: int, stop: int) -> bytes:
        cls = self.fs_class
        plain = (
            not getattr(cls, "async_impl", False) and cls.cat_file is AbstractFileSystem.cat_file
        )
        try:
            # Else what opens the file reads ahead, and throws it away.
            data: bytes = self._fs.cat_file(
                self._path(key), start=start, end=stop, **({"cache_type": "none"} if plain else {})
            )
        except FileNotFoundError:
            raise
        except OSError:
            if self._stat(key).nbytes < stop:  # stores refuse a range beyond the end
                return b""
            raise
        return data

    def _get(self, key: str) -> bytes:
        check_small(int(self._info(key)["size"] or 0), self.uri, key)
        data: bytes = self._fs.cat_file(self._path(key))
        return data

    def _put(self, key: str, data: bytes, exclusive: bool) -> None:
        if exclusive:
            with contextlib.suppress(FileNotFoundError):
                self._info(key)
                raise ExistsError("object exists already", uri=self.uri, key=key)
        upload = _Upload(self, key, len(data))
        try:
            upload.begin()
            upload.append(memoryview(data))
            upload.publish()
        finally:
            upload.drop()

    def _find(self, prefix: str) -> tuple[tuple[str, dict[str, Any]], ...]:
        """Every file and, where these exist by themselves, every folder at or below ``prefix``;
        folders come before what is in them."""
        path = self._path(prefix)
        if self._kind.folders:
            below = self._walk(path)
        else:
            below = self._fs.find(path, detail=True).items()
        found = {name: info for name, info in below if self._is_at(name, path)}
        if prefix and path not in found:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                info = self._fs.info(path)
                if self._kind.folders or info["type"] == "file":
                    found = {path: info, **found}
        return tuple(found.items())

    def _is_at(self, name: str, path: str) -> bool:
        return name == path or name.startswith(path.rstrip("/") + "/")

    def _walk(self, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
        pending = [path]
        while pending:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                for info in self._fs.ls(pending.pop(), detail=True):
                    yield info["name"], info
                    if info["type"] == "directory":
                        pending.append(info["name"])

    def _delete(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._info(key)
            self._fs.rm_file(self._path(key))

    def _sweep(self, prefix: str) -> None:
        if self._kind.appears == "closed":
            return  # what is unfinished has no name there
        folder, _, name = prefix.rpartition("/")
        own = f".{name[:48]}."
        if self._exists(folder):
            beside = self._fs.ls(self._path(folder), detail=True)
        else:
            beside = ()
        found = (
            *((i["name"], i) for i in beside if i["name"].rpartition("/")[2].startswith(own)),
            *self._find(prefix),
        )
        for path, info in found:
            quiet_s = time.time() - (modified_s(info) or time.time())
            if (
                is_temporary(path.rpartition("/")[2])
                and info["type"] == "file"
                and quiet_s > QUIET_S
            ):
                self._remove(path)
        self._remove_empty(
            [self._path(prefix), *(path for path, info in found if info["type"] == "directory")]
        )

    def _exists(self, folder: str) -> bool:
        return bool(self._fs.isdir(self._path(folder)))

    def _remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(path)

    def _remove_empty(self, folders: Iterable[str]) -> None:
        for folder in sorted(folders, key=lambda path: path.count("/"), reverse=True):
            with contextlib.suppress(OSError):  # not empty, or gone
                self._fs.rmdir(folder)


class _Upload(Upload):
    """One file being written, under a temporary name where the store would show it."""

    def __init__(self, driver: FsspecDriver, key: str, nbytes: int) -> None:
        self._driver = driver
        self._key = key
        self._written = Ranges(nbytes, uri=driver.uri, key=key)
        self._target = driver._path(key)
        folder, _, name = self._target.rpartition("/")
        staged = driver._kind.appears != "closed"
        if staged:
            self._path = f"{folder}/{temporary_name(name)}"
        else:
            self._path = self._target
        self._folder = folder
        self._staged = staged
        self._position = 0
        self._file: Any = None

    async def write(self, start: int, data: Buffer) -> None:
        self._written.check(start, len(data))
        if start != self._position:
            raise self._wrong(f"bytes come in order: {self._position} is next, not {start}")
        await self._driver._run("write", self._key, self.append, data)

    async def commit(self, nbytes: int | None = None) -> None:
        """See :meth:`Upload.commit`. Cancelled while it runs, it ends first: the object may be
        visible afterwards."""
        try:
            self._written.check_complete(nbytes)
            await self._driver._run("commit", self._key, self.publish)
        finally:
            await self.abort()

    async def abort(self) -> None:
        with contextlib.suppress(StorageError):  # the driver is closed, and has dropped us already
            await self._driver._threads.run(self.drop)

    # What follows blocks.

    def begin(self) -> None:
        """Create the file, and the folders above it where there are such."""
        driver = self._driver
        if driver._kind.folders:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                if driver._fs.info(self._target)["type"] == "directory":
                    raise self._wrong("a folder has this name; objects lie below it")
            driver._fs.makedirs(self._folder, exist_ok=True)
        self._file = driver._fs.open(self._path, "wb", block_size=driver._part_nbytes)

    def append(self, data: Buffer) -> None:
        """Write ``data`` behind what is there."""
        file = self._file
        if file is None:
            raise self._wrong("the upload is over: committed, failed or aborted")
        try:
            done = 0
            while done < len(data):
                count = file.write(data[done:])
                done += len(data) - done if count is None else count
        except BaseException:
            self.drop()  # how much of it was written is unknown
            raise
        self._written.add(self._position, len(data))
        self._position += len(data)

    def publish(self) -> None:
        """Make the file visible, whole and durable."""
        file = self._file
        driver = self._driver
        if file is None:
            raise self._wrong("the upload is over: committed, failed or aborted")
        file.close()
        self._file = None
        if getattr(driver._fs, "local_file", False):
            _sync_file(self._path)
        if driver._kind.appears == "copied":
            driver._fs.cp_file(self._path, self._target)
        elif self._staged:
            driver._fs.mv(self._path, self._target)
        if getattr(driver._fs, "local_file", False):
            _sync_names(self._folder, driver._root)
        if (
            driver._kind.appears == "unknown"
            and driver._stat(self._key).nbytes != self._written.nbytes
        ):
            raise self._wrong(
                "the file system did not put the new file in the place of the old one"
            )

    def drop(self) -> None:
        """Forget the file, unless it is published. Raises nothing."""
        driver = self._driver
        file = self._file
        self._file = None
        driver._uploads.discard(self)
        if file is not None:
            _discard(file, staged=self._staged)
        if self._staged and driver._fs_made is not None:
            with contextlib.suppress(Exception):
                driver._remove(self._path)

    def _wrong(self, message: str) -> StorageError:
        return StorageError(message, uri=self._driver.uri, key=self._key)


def _discard(file: Any, *, staged: bool) -> None:
    """Close a file that is not wanted. To close one that its store shows by closing, would show it:
    that one is discarded, and marked as closed, so that nobody closes it when it is collected."""
    with contextlib.suppress(Exception):
        if staged:
            file.close()
        else:
            file.discard()
    with contextlib.suppress(Exception):
        file.closed = True


def _sync_file(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_names(folder: str, root: str) -> None:
    """Make the names of a file, of its folder, and so on up to the root's, durable."""
    while len(folder) >= len(os.path.dirname(root)):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            sync_folder(fd)
        finally:
            os.close(fd)
        if folder == os.path.dirname(folder):
            return
        folder = os.path.dirname(folder)


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
