"""The SFTP driver: requests that each method of the contract sends to the server.

An upload is a temporary file next to its object. A commit syncs it, renames it and syncs the folder.
An exclusive put links instead of renaming, because a link fails if the name exists. This needs
OpenSSH's extensions on the server.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import stat
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import contextmanager, suppress
from posixpath import basename, dirname
from urllib.parse import unquote

import asyncssh

from holdfast import errors
from holdfast.drivers.asynchronous import AsyncDriver, AsyncUpload
from holdfast.drivers.contract import Buffer, ObjectInfo, Traits, check_small
from holdfast.drivers.uri import Uri

__all__ = ["SftpDriver"]

QUIET_S = 3600.0  # a sweep takes an upload for dead after this time without a write
_LOCATION = re.compile(r"(?:(?P<username>[^@/]+)@)?(?P<host>[^:@/]+)(?::(?P<port>[0-9]{1,5}))?(?P<path>/.*|)")
_KINDS: dict[type[errors.StorageError], tuple[type[Exception], ...]] = {  # the first match wins
    errors.NotFoundError: (asyncssh.SFTPNoSuchFile,),
    errors.AccessError: (asyncssh.SFTPPermissionDenied, asyncssh.PermissionDenied, asyncssh.HostKeyNotVerifiable),
    errors.FullError: (asyncssh.SFTPNoSpaceOnFilesystem, asyncssh.SFTPQuotaExceeded),  # OpenSSH cannot report these
    errors.StorageDownError: (asyncssh.SFTPConnectionLost, asyncssh.DisconnectError, OSError),
}
_TEMPORARY = re.compile(r"[.](.*)[.][0-9a-f]{16}[.]part", re.DOTALL)


@contextmanager
def sftp_errors(doing: str, uri: str, key: str) -> Iterator[None]:
    """Turn asyncssh's errors in the block into the matching StorageError."""
    try:
        yield
    except errors.HoldfastError:  # some are OSErrors as well
        raise
    except (asyncssh.Error, OSError, ValueError) as error:  # ValueError: a name that is no text, or a closed file
        kind = next((kind for kind, raised in _KINDS.items() if isinstance(error, raised)), errors.StorageError)
        raise kind(f"{doing} failed: {error}", uri=uri, key=key) from error


class SftpDriver(AsyncDriver):
    """Files below a folder of the server. Connects at the first operation, with the keys in
    ``~/.ssh``."""

    def __init__(self, uri: Uri) -> None:
        super().__init__(uri, errors=sftp_errors)
        self.traits = Traits(
            part_nbytes=4 << 20,
            part_min_nbytes=1,
            align_nbytes=1,
            concurrency=16,
            coalesce_nbytes=256 << 10,
            part_order="any",
            exclusive_is_atomic=True,
            shared=True,
            hands_over=True,
        )
        found = _LOCATION.fullmatch(uri.location)
        if found is None:
            raise errors.UriError("no host in this URI", uri=self.uri, advice="Write sftp://user@host:port/folder.")
        self._server = {name: unquote(found[name]) for name in ("username", "host") if found[name]}
        self._port = int(found["port"] or 22)
        self._root = unquote(found["path"]).rstrip("/")
        self._connecting = asyncio.Lock()
        self._connection: asyncssh.SSHClientConnection | None = None
        self._client: asyncssh.SFTPClient | None = None

    async def sftp(self) -> asyncssh.SFTPClient:
        """Return the client, and reconnect if the connection was lost."""
        async with self._connecting:
            if self._connection is None or self._connection.is_closed():
                self._client = None
                self._connection = await asyncssh.connect(port=self._port, **self._server)
            if self._client is None:
                self._client = await self._connection.start_sftp_client()
            return self._client

    def path(self, key: str) -> str:
        """Return the path of an object. Raises UriError if it is the name of a temporary file."""
        if any(_target(part) is not None for part in key.split("/")):
            raise errors.UriError(f"key {key!r} is the name of a temporary file", uri=self.uri, key=key)
        return f"{self._root}/{key}".rstrip("/") or "/"

    async def make_folder(self, folder: str) -> None:
        """Make a folder and its parents, each durably."""
        sftp = await self.sftp()
        try:
            await sftp.mkdir(folder)
        except asyncssh.SFTPNoSuchFile:
            await self.make_folder(dirname(folder))
            await self.make_folder(folder)
        except asyncssh.SFTPFailure:
            if not await sftp.isdir(folder):
                raise
        else:
            await self.sync(dirname(folder))

    async def sync(self, folder: str) -> None:
        """Sync a folder: its new, renamed and removed entries become durable."""
        async with (await self.sftp()).open(folder, "rb") as opened:
            await opened.fsync()

    async def _fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        return memoryview(await self._read(key, start, nbytes))

    async def _get(self, key: str) -> bytes:
        return await self._read(key, 0, None)

    async def _read(self, key: str, start: int, nbytes: int | None) -> bytes:
        async with (await self.sftp()).open(self.path(key), "rb") as opened:
            size = self._info(key, await opened.stat()).nbytes
            if nbytes is None:
                check_small(size, self.uri, key)
                nbytes = size
            if not 0 <= start <= start + nbytes <= size:
                message = f"the object has {size} bytes, not {start}:{start + nbytes}"
                raise errors.DamagedError(message, uri=self.uri, key=key)
            return await opened.read(nbytes, start)

    async def _stat(self, key: str) -> ObjectInfo:
        return self._info(key, await (await self.sftp()).lstat(self.path(key)))

    def _info(self, key: str, attrs: asyncssh.SFTPAttrs) -> ObjectInfo:
        if not stat.S_ISREG(attrs.permissions or 0):
            raise errors.NotFoundError("no such object: this is not a file", uri=self.uri, key=key)
        return ObjectInfo(key, attrs.size or 0, float(attrs.mtime or 0))

    async def _list(self, prefix: str) -> AsyncGenerator[list[ObjectInfo], None]:
        async for files in self._walk(prefix):
            yield [found for found in files if _target(found.key) is None]

    async def _walk(self, prefix: str) -> AsyncGenerator[list[ObjectInfo], None]:
        """Yield the files at and below a prefix, folder by folder."""
        with suppress(asyncssh.SFTPNoSuchFile, errors.NotFoundError):
            yield [await self._stat(prefix)]
        folders = [prefix]
        while folders:
            entries = await self._entries(folders.pop())
            folders += [key for key, attrs in entries.items() if stat.S_ISDIR(attrs.permissions or 0)]
            yield [self._info(key, attrs) for key, attrs in entries.items() if stat.S_ISREG(attrs.permissions or 0)]

    async def _entries(self, folder: str) -> dict[str, asyncssh.SFTPAttrs]:
        with suppress(asyncssh.SFTPNoSuchFile):
            found = await (await self.sftp()).readdir(self.path(folder))
            names = {str(name.filename): name.attrs for name in found if name.filename not in (".", "..")}
            return {f"{folder}/{name}".lstrip("/"): attrs for name, attrs in names.items()}
        return {}

    async def _unfinished(self, prefix: str) -> list[ObjectInfo]:
        """Return the temporary files of uploads to a prefix. They lie next to it and below it."""
        beside = await self._entries(dirname(prefix))
        found = [self._info(key, attrs) for key, attrs in beside.items() if _target(key) == basename(prefix)[:48]]
        async for files in self._walk(prefix):
            found += [info for info in files if _target(info.key) is not None]
        return found

    async def _sweep(self, prefix: str) -> None:
        if unfinished := await self._unfinished(prefix):
            before_s = await self._now_s(dirname(f"{self._root}/{unfinished[0].key}")) - QUIET_S
            await self._remove([info.key for info in unfinished if info.modified_s < before_s])

    async def _now_s(self, folder: str) -> float:
        """Return the server's time, taken from a new file."""
        sftp = await self.sftp()
        path = f"{folder}/.clock.{secrets.token_hex(8)}.part"
        async with sftp.open(path, "xb") as opened:
            now_s = float((await opened.stat()).mtime or 0)
        await sftp.remove(path)
        return now_s

    async def _delete(self, key: str) -> None:
        if await (await self.sftp()).isfile(self.path(key)):
            await self._remove([key])
            await self.sync(dirname(self.path(key)))

    async def _delete_all(self, prefix: str) -> None:
        await self._remove([info.key for info in await self._unfinished(prefix)])
        async for files in self._walk(prefix):
            await self._remove([info.key for info in files])
        await (await self.sftp()).rmtree(self.path(prefix), ignore_errors=True)  # empty folders

    async def _remove(self, keys: Iterable[str]) -> None:
        sftp = await self.sftp()
        for key in keys:
            with suppress(asyncssh.SFTPNoSuchFile):
                await sftp.remove(f"{self._root}/{key}")

    def _upload(self, key: str, nbytes: int) -> AsyncUpload:
        return _SftpUpload(self, key, nbytes)

    async def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            await self._connection.wait_closed()


class _SftpUpload(AsyncUpload):
    def __init__(self, driver: SftpDriver, key: str, nbytes: int) -> None:
        super().__init__(driver, key, nbytes)
        self._driver = driver
        self._path = driver.path(key)
        self._temporary = f"{dirname(self._path)}/.{basename(key)[:48]}.{secrets.token_hex(8)}.part"
        self._file: asyncssh.SFTPClientFile | None = None

    async def _begin(self) -> None:
        sftp = await self._driver.sftp()
        try:
            self._file = await sftp.open(self._temporary, "xb")
        except asyncssh.SFTPNoSuchFile:
            await self._driver.make_folder(dirname(self._path))
            self._file = await sftp.open(self._temporary, "xb")

    async def _write(self, start: int, data: Buffer) -> None:
        assert self._file is not None
        await self._file.write(bytes(data), start)

    async def _commit(self, *, exclusive: bool) -> None:
        assert self._file is not None
        sftp = await self._driver.sftp()
        await self._file.fsync()
        try:
            await (sftp.link if exclusive else sftp.posix_rename)(self._temporary, self._path)
        except asyncssh.SFTPFailure as error:  # the only answer if the name exists
            if exclusive and await sftp.lexists(self._path):
                raise errors.ExistsError("the object already exists", uri=self._driver.uri, key=self.key) from error
            raise
        await self._driver.sync(dirname(self._path))
        await self._drop()  # a link leaves the temporary file

    async def _drop(self) -> None:
        if self._file is not None:
            await self._file.close()
            with suppress(asyncssh.SFTPNoSuchFile):
                await (await self._driver.sftp()).remove(self._temporary)


def _target(key: str) -> str | None:
    """Return the beginning of a temporary file's target name; None for any other file."""
    match = _TEMPORARY.fullmatch(basename(key))
    return match[1] if match else None
