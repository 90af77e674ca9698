"""``hdfs://namenode:port/path`` or ``hdfs://nameservice/path``: Hadoop's file system.

Objects are files. An upload writes one or several files in parallel, under temporary names next to
its key, joins them with CONCAT, and renames the result. The commit is atomic, and durable as HDFS
defines it: in the memory of at least ``dfs.namenode.replication.min`` DataNodes (with ``?sync=on``,
on their disks). Every call has a deadline.

A key is a path below the root, so ``a`` and ``a/b`` cannot both be objects. ``:``, which HDFS
forbids in names, and ``%`` are encoded as ``%3A`` and ``%25``. Names that look like temporary files
are rejected.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import unquote
from xml.etree.ElementTree import ParseError

from ...errors import (
    AccessError,
    DamagedError,
    ExistsError,
    NotFoundError,
    StorageDownError,
    StorageError,
    UriError,
)
from ..asynchronous import AsyncDriver
from ..calls import Call
from ..contract import Buffer, ObjectInfo, TakePiece, Traits, check_small
from ..options import Option, duration, integer, option_values, size, switch
from ..pieces import PieceJoiner, Rooms
from ..schemes import check_installed
from ..uri import Uri, root_key
from .authentication import VARIABLE, Token, service_address, token_of, tokens, url_form
from .client import Client, pieces, whole_reader
from .config import Served, name_service, rpc_addresses, served, site, web_addresses
from .names import Names, belongs_to, is_temporary
from .uploads import FileOptions, HdfsUpload
from .webhdfs import WebHdfs

if TYPE_CHECKING:
    import hdfs_native
    from hdfs_native import FileStatus


QUIET_S = 3600.0
"""Age without changes after which a temporary file is swept. Live uploads touch their files more
often."""

_READ_ATTEMPTS = 3
_PIECE_NBYTES = 1 << 20

_Arriving = Callable[[int, int], Iterator[bytes]]
"""(start, nbytes) → the bytes of that range, in pieces."""


class HdfsDriver(AsyncDriver):
    """Objects stored as files below a folder. A root that does not exist is empty; :meth:`create`
    and :meth:`put` create it.

    Abandoned calls end whenever the library ends them; neither :meth:`close` nor interpreter exit
    waits for them.
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "streams": Option(
            integer(1, 64), 4, "files in which a large object is written in parallel, then joined"
        ),
        "webhdfs": Option(
            str,
            "auto",
            "server that joins them: auto, http://host:port, or off (large objects then use one "
            "stream)",
        ),
        "timeout": Option(duration(0.1, 3600), 60.0, "time limit of an operation without progress"),
        "block_size": Option(
            size(1 << 20, 1 << 40), None, "block size of new files; else the name node's default"
        ),
        "replication": Option(
            integer(1, 512), None, "replication of new files; else the name node's default"
        ),
        "sync": Option(
            switch, False, "whether DataNodes write an object to disk before it is committed"
        ),
        "namenodes": Option(
            str, "", "host:port,host:port: the name nodes of the URI's name service"
        ),
        "conf": Option(str, "", "folder of core-site.xml and hdfs-site.xml; else HADOOP_CONF_DIR"),
    }

    deviations: ClassVar[Mapping[str, str]] = {
        "nothing_outlives_close": "hdfs-native keeps idle connections to DataNodes, and the client "
        "that they belong to, until the process reads again, three seconds or more later"
    }

    def __init__(self, uri: Uri, options: Mapping[str, Any]) -> None:
        """Take a value for each of OPTIONS. Raises UriError if they do not identify a file
        system."""
        # The client translates errors. No grace: a cancelled call leaves its thread at once.
        super().__init__(uri, grace_s=0.0)
        authority, _, path = uri.location.partition("/")
        root = "/" + unquote(path)
        namenodes = [address for address in options["namenodes"].split(",") if address]
        config: dict[str, str] = {}
        if namenodes:
            config = name_service(authority, namenodes)
        properties = _properties(config, options, self.uri)
        found = _tokens(self.uri)
        authority = service_address(authority, found)
        place = served(authority, root, properties)
        token = token_of(place.authority, found) if place else None
        self._webhdfs = _webhdfs(place, root, properties, options, token)
        self.traits = Traits(
            part_nbytes=16 << 20,
            part_min_nbytes=1,
            align_nbytes=1,
            concurrency=8,
            coalesce_nbytes=1 << 20,
            part_order="ascending",
            piece_nbytes=_PIECE_NBYTES,
            exclusive_is_atomic=True,
            shared=True,
            streams=1 if self._webhdfs is None else options["streams"],
        )
        self._names = Names(root, self.uri)
        self._files = FileOptions(options["block_size"], options["replication"], options["sync"])
        self._client = Client(
            f"hdfs://{authority}" if authority else None,
            config,
            options["conf"] or None,
            uri=self.uri,
            timeout_s=options["timeout"],
            namenodes=rpc_addresses(place.authority, properties) if place else (),
            authentication=_authentication(properties, token),
        )
        self._rooms = Rooms(_PIECE_NBYTES)

    @classmethod
    def open(cls, uri: Uri) -> HdfsDriver:
        """Return the driver for ``uri``. Raises UriError for an unknown option or an invalid
        value."""
        authority, _, path = uri.location.partition("/")
        if "@" in authority:
            raise UriError(
                "a URI must not contain a user",
                uri=uri.redacted,
                advice="Set HADOOP_USER_NAME, or use Kerberos.",
            )
        root_key(path, uri)  # rejects a root with two spellings
        check_installed(uri.scheme, uri.redacted)
        return cls(uri, option_values(cls.OPTIONS, uri))

    async def read(self, key: str, start: int, into: Buffer) -> None:
        await self.tasks.run("read", key, self._read, key, start, into)

    async def _fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        into = memoryview(bytearray(nbytes))
        await self._read(key, start, into)
        return into.toreadonly()

    async def _read(self, key: str, start: int, into: Buffer) -> None:
        def read(call: Call, arriving: _Arriving) -> None:
            at = 0
            for arrived in arriving(start, len(into)):
                with call:
                    into[at : at + len(arrived)] = arrived
                at += len(arrived)

        await self._arrive(key, read)

    async def read_pieces(self, key: str, start: int, nbytes: int, take: TakePiece) -> None:
        def read(call: Call, arriving: _Arriving) -> None:
            with call:
                joiner.restart()
            for arrived in arriving(joiner.reached, joiner.left_nbytes):
                with call:
                    joiner.add(memoryview(arrived))

        with self._rooms.room() as room:  # an abandoned thread no longer uses it
            joiner = PieceJoiner(start, nbytes, _PIECE_NBYTES, take, room)
            await self.tasks.run("read", key, self._arrive, key, read)

    async def _arrive(self, key: str, read: Callable[[Call, _Arriving], None]) -> None:
        """Run ``read`` in a thread. If the object is replaced, its blocks vanish during the read,
        so it is retried."""
        path = self._names.path(key)
        inner = self._client.inner

        def arriving(start: int, nbytes: int) -> Iterator[bytes]:
            return self._arriving(inner, path, key, start, nbytes)

        for attempt in range(_READ_ATTEMPTS):
            try:
                await self._client.call("read", key, lambda call: read(call, arriving))
                return
            except (NotFoundError, AccessError):
                raise
            except StorageError as error:
                if attempt + 1 == _READ_ATTEMPTS or isinstance(error.__cause__, TimeoutError):
                    raise

    def _arriving(
        self, inner: hdfs_native.Client, path: str, key: str, start: int, nbytes: int
    ) -> Iterator[bytes]:
        """Yield a range of a file in pieces from the library. Blocks. Raises if the range is
        incomplete."""
        reader = whole_reader(inner, path, start + nbytes)
        if start + nbytes > len(reader):  # the library would panic
            message = f"object ends at byte {len(reader)}, before {start + nbytes}"
            raise DamagedError(message, uri=self.uri, key=key)
        arrived_nbytes = 0
        for arrived in pieces(reader, start, nbytes):
            yield arrived
            arrived_nbytes += len(arrived)
        if arrived_nbytes < nbytes:
            raise StorageDownError(
                f"read: {arrived_nbytes} of {nbytes} bytes arrived", uri=self.uri, key=key
            )

    async def _get(self, key: str) -> bytes:
        path = self._names.path(key)
        inner = self._client.inner

        def get(call: Call) -> bytes:
            reader = whole_reader(inner, path)
            check_small(len(reader), self.uri, key)
            data = b"".join(pieces(reader, 0, len(reader)))
            # For example after a restart, before DataNodes have reported their blocks.
            if len(data) < len(reader):
                raise StorageDownError(
                    f"get: {len(data)} of {len(reader)} bytes arrived", uri=self.uri, key=key
                )
            return data

        return await self._client.call("get", key, get)

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        """See :meth:`Driver.put`. The rename decides. An exclusive put first checks the key, to
        avoid writing a file in vain."""
        if exclusive:
            with contextlib.suppress(NotFoundError):
                await self.stat(key)
                raise ExistsError("the object already exists", uri=self.uri, key=key)
        await super().put(key, data, exclusive=exclusive)

    async def _stat(self, key: str) -> ObjectInfo:
        status = await self._client.status(self._names.path(key), key)
        if status.isdir:
            raise NotFoundError(
                "no such object: a folder has this name", uri=self.uri, key=key
            ) from IsADirectoryError(key)
        return ObjectInfo(key, status.length, status.modification_time / 1000)

    async def _list(self, prefix: str) -> AsyncGenerator[Sequence[ObjectInfo], None]:
        async for batch in _walk(self._client, self._names.folder(prefix), prefix):
            yield [
                ObjectInfo(key, status.length, status.modification_time / 1000)
                for status in batch
                if not status.isdir and (key := self._names.key(status.path)) is not None
            ]

    async def _delete(self, key: str) -> None:
        """See :meth:`Driver.delete`. Also removes an empty folder of this name, which is not an
        object."""
        await _removed(self._client, self._names.path(key), key)

    async def _delete_all(self, prefix: str) -> None:
        await self._client.delete(self._names.path(prefix), prefix, recursive=True)

    async def _sweep(self, prefix: str) -> None:
        """See :meth:`Driver.sweep`. Files without changes for an hour are dead, because live
        uploads touch theirs."""
        await _sweep(self._client, self._names.path(prefix), prefix)

    def _upload(self, key: str, nbytes: int) -> HdfsUpload:
        path = self._names.path(key)
        return HdfsUpload(self, key, nbytes, path, self._client, self._webhdfs, self._files)

    async def _disconnect(self) -> None:
        self._client.close()


def _properties(
    config: Mapping[str, str], options: Mapping[str, Any], uri: str
) -> Mapping[str, str]:
    try:
        return {**site(options["conf"] or None), **config}
    except (OSError, ParseError) as error:
        raise UriError(f"Hadoop's configuration cannot be read: {error}", uri=uri) from error


def _tokens(uri: str) -> list[Token]:
    try:
        return tokens()
    except (OSError, ValueError) as error:
        raise UriError(
            f"the delegation tokens in {VARIABLE} cannot be read: {error}",
            uri=uri,
            advice=f"Fetch new ones, as with hdfs fetchdt, or unset {VARIABLE} and use kinit.",
        ) from error


def _authentication(properties: Mapping[str, str], token: Token | None) -> str:
    """Return ``hadoop.security.authentication``, or ``token`` if that is ``kerberos`` and there is
    a token for this file system."""
    configured = properties.get("hadoop.security.authentication", "simple").lower()
    if token and configured == "kerberos":
        return "token"
    return configured


def _webhdfs(
    place: Served | None,
    root: str,
    properties: Mapping[str, str],
    options: Mapping[str, Any],
    token: Token | None,
) -> WebHdfs | None:
    """Return the client that joins the parts of uploads below ``root``; None if it is switched off,
    or no name node's address is known."""
    given: str = options["webhdfs"]
    if given == "off":
        return None
    if given != "auto":
        addresses = [given if "://" in given else f"http://{given}"]
    elif place is not None:
        addresses = web_addresses(place.authority, properties)
    else:
        return None
    moved = ("", "")
    if place:
        moved = (root.rstrip("/"), place.root.rstrip("/"))
    return WebHdfs(
        addresses, options["timeout"], moved=moved, delegation=url_form(token) if token else None
    )


async def _walk(client: Client, top: str, key: str) -> AsyncIterator[list[FileStatus]]:
    """Yield every file and folder below ``top`` that exists, or ``top`` itself if it is a file."""
    folders = [top]
    while folders:
        async for batch in client.entries(folders.pop(), key):
            folders += [status.path for status in batch if status.isdir]
            yield batch


async def _sweep(client: Client, path: str, key: str) -> None:
    """Remove temporary files of dead uploads to ``path`` and below it, and folders that are then
    empty.

    An upload is dead if it is older, by more than QUIET_S, than the newest file or folder seen,
    so only the name node's clock matters. Live uploads are safe: a folder is created together with
    a file in it, and is removed only when empty.
    """
    above, _, name = path.rpartition("/")
    beside = [status async for batch in client.entries(above or "/", key) for status in batch]
    below = []
    if any(s.path == path for s in beside):
        below = [status async for batch in _walk(client, path, key) for status in batch]
    newest_ms = max((status.modification_time for status in beside + below), default=0)
    uploads = [s for s in beside if belongs_to(_name(s), name)] + [
        s for s in below if is_temporary(_name(s))
    ]
    gone = set()
    for status in uploads:
        if newest_ms - status.modification_time > QUIET_S * 1000 and not status.isdir:
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
    """Delete a file or an empty folder; return False for a folder that is not empty."""
    try:
        await client.delete(folder, key)
        return True
    except StorageError as error:
        if "PathIsNotEmptyDirectoryException" in str(error.__cause__):
            return False
        raise


def _name(status: FileStatus) -> str:
    return status.path.rpartition("/")[2]
