"""The SQLite driver: each method of the contract is one transaction in a thread."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import ClassVar, ParamSpec, TypeVar
from urllib.parse import unquote

from holdfast.drivers.contract import Buffer, Driver, ObjectInfo, Traits, Upload, check_key, check_small
from holdfast.drivers.options import Option, integer, option_values
from holdfast.drivers.ranges import Ranges
from holdfast.drivers.threads import Threads
from holdfast.drivers.uri import Uri
from holdfast.errors import DamagedError, ExistsError, NotFoundError, StorageError, UriError

from .store import Store, sqlite_errors

__all__ = ["SqliteDriver", "location_of"]

P = ParamSpec("P")
T = TypeVar("T")

QUIET_S = 3600.0
"""A sweep takes an upload for dead after this time without a write. If it lives after all, its
commit fails."""

CLOSE_TIMEOUT_S = 60.0
LIST_BATCH = 1000
_LOCATION = re.compile(r"(/.*?[.](?:db|sqlite))(?:/(.*))?", re.DOTALL)

AT_OR_BELOW = "(path = :at OR path >= :at || '/' AND path < :at || '0')"  # "0" is the character after "/"


def location_of(uri: Uri) -> tuple[str, str]:
    """Return the file that a URI names, and the prefix in it. Raises UriError."""
    found = _LOCATION.fullmatch(unquote(uri.location))
    if not found:
        raise UriError("no SQLite file in this URI", uri=uri.redacted, advice="Write sqlite:///folder/file.db/prefix.")
    return found[1], (found[2] or "").strip("/")


class SqliteDriver(Driver):
    """Objects in one SQLite file, below a prefix. The first write creates the file; its folder must
    exist."""

    OPTIONS: ClassVar[Mapping[str, Option]] = {"threads": Option(integer(1, 64), 4, "operations in flight")}
    remote = False

    def __init__(self, uri: Uri) -> None:
        self.uri = uri.root
        file, prefix = location_of(uri)
        threads = option_values(self.OPTIONS, uri)["threads"]
        self.traits = Traits(
            part_nbytes=4 << 20,
            part_min_nbytes=1,
            align_nbytes=1,
            concurrency=threads,
            coalesce_nbytes=64 << 10,
            part_order="any",
            exclusive_is_atomic=True,
            shared=False,
        )
        self._prefix = f"{prefix}/" if prefix else ""
        self._store = Store(file)
        self._threads = Threads(threads, uri=self.uri)
        self._uploads: set[_SqliteUpload] = set()

    @classmethod
    def open(cls, uri: Uri) -> SqliteDriver:
        """Return the driver for ``uri``. Touches no file."""
        return cls(uri)

    async def read(self, key: str, start: int, into: Buffer) -> None:
        await self._run("read", key, self._read, self._path(key), start, into)

    async def create(self, key: str, nbytes: int) -> Upload:
        upload = _SqliteUpload(self, key, nbytes)
        self._uploads.add(upload)
        try:
            await self._run("create", key, upload.begin)
        except BaseException:  # also when cancelled: the row may exist by then
            await upload.abort()
            raise
        return upload

    async def get(self, key: str) -> bytes:
        return await self._run("get", key, self._get, self._path(key))

    async def put(self, key: str, data: bytes, *, exclusive: bool = False) -> None:
        await self._run("put", key, self._put, self._path(key), data, exclusive)

    async def stat(self, key: str) -> ObjectInfo:
        _, nbytes, modified_s = await self._run("stat", key, self._look, self._path(key))
        return ObjectInfo(key, nbytes, modified_s)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        at, after = self._path(prefix) if prefix else self._prefix.rstrip("/"), ""
        while batch := await self._run("list", prefix, self._page, at, after):
            for path, nbytes, modified_s in batch:
                yield ObjectInfo(path.removeprefix(self._prefix), nbytes, modified_s)
            after = batch[-1][0]

    async def delete(self, key: str) -> None:
        await self._run("delete", key, self._change, _DELETE, {"at": self._path(key)})

    async def delete_all(self, prefix: str) -> None:
        await self._run("delete", prefix, self._change, _DELETE_ALL, {"at": self._path(prefix)})

    async def sweep(self, prefix: str) -> None:
        # Only processes of one host share the file (shared=False), so this clock is the storage's.
        values = {"at": self._path(prefix), "before_s": time.time() - QUIET_S}
        await self._run("sweep", prefix, self._change, _SWEEP, values)

    async def close(self) -> None:
        await self._threads.close(CLOSE_TIMEOUT_S)
        for upload in tuple(self._uploads):
            upload.drop()
        self._store.close()

    def _path(self, key: str) -> str:
        """Return the path of a key in the file. Raises UriError if the key is unsafe or not
        UTF-8."""
        path = self._prefix + check_key(key, uri=self.uri)
        try:
            path.encode()
        except UnicodeEncodeError as error:
            raise UriError(f"key {key!r} is not UTF-8", uri=self.uri, key=key) from error
        return path

    async def _run(self, doing: str, key: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        def translated() -> T:
            with sqlite_errors(doing, self.uri, key):
                return call(*args, **kwargs)

        return await self._threads.run(translated)

    # The methods below block, and run in threads.

    def _read(self, path: str, start: int, into: Buffer) -> None:
        with self._store.reading() as db:
            upload, nbytes, _ = self._found(db, path)
            stop = start + len(into)
            if not 0 <= start <= stop <= nbytes:
                raise self._error(DamagedError, f"object ends at byte {nbytes}, before {stop}", path)
            rows = db.execute(_PARTS, {"upload": upload, "start": start, "stop": stop}).fetchall()
            for part, part_start, part_stop in rows:
                first, last = max(start, part_start), min(stop, part_stop)
                with db.blobopen("parts", "data", part, readonly=True) as blob:
                    blob.seek(first - part_start)
                    into[first - start : last - start] = blob.read(last - first)

    def _get(self, path: str) -> bytes:
        with self._store.reading() as db:
            upload, nbytes, _ = self._found(db, path)
            check_small(nbytes, self.uri, path.removeprefix(self._prefix))
            rows = db.execute("SELECT data FROM parts WHERE upload = ? ORDER BY start", (upload,))
            return b"".join(data for (data,) in rows)

    def _look(self, path: str) -> tuple[int, int, float]:
        with self._store.reading() as db:
            return self._found(db, path)

    def _page(self, at: str, after: str) -> Sequence[tuple[str, int, float]]:
        try:
            with self._store.reading() as db:
                return db.execute(_LIST, {"at": at, "after": after, "most": LIST_BATCH}).fetchall()
        except FileNotFoundError:
            return []

    def _put(self, path: str, data: bytes, exclusive: bool) -> None:
        with self._store.writing() as db:
            if exclusive and db.execute(_FIND, (path,)).fetchone():
                raise self._error(ExistsError, "the object already exists", path)
            upload = _begin(db, path, len(data))
            _add_part(db, upload, 0, memoryview(data))
            _publish(db, path, upload, len(data))

    def _change(self, statement: str, values: dict[str, object]) -> None:
        try:
            with self._store.reading():
                pass  # a deletion creates no file
        except FileNotFoundError:
            return
        with self._store.writing() as db:
            db.execute(statement, values)

    def _found(self, db: sqlite3.Connection, path: str) -> tuple[int, int, float]:
        row: tuple[int, int, float] | None = db.execute(_FIND, (path,)).fetchone()
        if row is None:
            raise self._error(NotFoundError, "no such object", path)
        return row

    def _error(self, kind: type[T], message: str, path: str) -> T:
        return kind(message, uri=self.uri, key=path.removeprefix(self._prefix))  # type: ignore[call-arg]


class _SqliteUpload(Upload):
    """An upload. Its parts are written as they arrive, and stay invisible until it is committed."""

    def __init__(self, driver: SqliteDriver, key: str, nbytes: int) -> None:
        self._driver, self._key, self._path = driver, key, driver._path(key)
        self._written = Ranges(nbytes, uri=driver.uri, key=key)
        self._id: int | None = None
        self._over = False

    async def write(self, start: int, data: Buffer) -> None:
        self._check_open()
        self._written.check(start, len(data))
        await self._driver._run("write", self._key, self._write, start, data)
        self._written.add(start, len(data))

    async def commit(self, nbytes: int | None = None) -> None:
        self._check_open()
        self._over = True
        await self._driver._run("commit", self._key, self._commit, nbytes)
        self._driver._uploads.discard(self)

    async def abort(self) -> None:
        self._over = True
        try:
            await self._driver._threads.run(self.drop)
        except StorageError:
            pass  # the driver is closed and has dropped this upload

    def begin(self) -> None:
        with self._driver._store.writing() as db:
            self._id = _begin(db, self._path, self._written.nbytes)

    def drop(self) -> None:
        """Delete the upload unless it is visible. If the file cannot be reached, a sweep deletes it
        later. Blocks."""
        self._driver._uploads.discard(self)
        try:
            with self._driver._store.writing() as db:
                db.execute(_DROP, (self._id,))
        except sqlite3.Error:
            pass

    def _write(self, start: int, data: Buffer) -> None:
        with self._driver._store.writing() as db:
            _add_part(db, self._id, start, data)
            db.execute("UPDATE uploads SET touched_s = ? WHERE id = ?", (time.time(), self._id))

    def _commit(self, nbytes: int | None) -> None:
        try:
            self._written.check_complete(nbytes)
            with self._driver._store.writing() as db:
                _publish(db, self._path, self._id, self._written.nbytes)
        except BaseException:
            self.drop()
            raise

    def _check_open(self) -> None:
        if self._over:
            message = "the upload is over: committed, failed or aborted"
            raise StorageError(message, uri=self._driver.uri, key=self._key)


def _begin(db: sqlite3.Connection, path: str, nbytes: int) -> int:
    values = (path, nbytes, time.time())
    upload = db.execute("INSERT INTO uploads (path, nbytes, touched_s) VALUES (?, ?, ?)", values).lastrowid
    assert upload is not None
    return upload


def _add_part(db: sqlite3.Connection, upload: int | None, start: int, data: Buffer) -> None:
    """Insert a part. Raises IntegrityError if the upload has been deleted."""
    if len(data):
        values = (upload, start, start + len(data), data)
        db.execute("INSERT INTO parts (upload, start, stop, data) VALUES (?, ?, ?, ?)", values)


def _publish(db: sqlite3.Connection, path: str, upload: int | None, nbytes: int) -> None:
    """Make this upload the object, and delete its old one. Raises IntegrityError if the upload has
    been deleted."""
    db.execute(_DELETE, {"at": path})
    if not db.execute(_PUBLISH, (nbytes, time.time(), upload)).rowcount:
        raise sqlite3.IntegrityError("the upload has been deleted")


_FIND = "SELECT id, nbytes, touched_s FROM uploads WHERE path = ? AND visible"
_PARTS = """
SELECT id, start, stop FROM parts WHERE upload = :upload AND start < :stop AND stop > :start
AND start >= (SELECT max(start) FROM parts WHERE upload = :upload AND start <= :start) ORDER BY start
"""
_LIST = f"""
SELECT path, nbytes, touched_s FROM uploads
WHERE visible AND path > :after AND (:at = '' OR {AT_OR_BELOW}) ORDER BY path LIMIT :most
"""
_PUBLISH = "UPDATE uploads SET visible = 1, nbytes = ?, touched_s = ? WHERE id = ?"
_DELETE = "DELETE FROM uploads WHERE path = :at AND visible"
_DELETE_ALL = f"DELETE FROM uploads WHERE {AT_OR_BELOW}"
_SWEEP = f"DELETE FROM uploads WHERE {AT_OR_BELOW} AND touched_s < :before_s AND NOT visible"
_DROP = "DELETE FROM uploads WHERE id = ? AND NOT visible"
