"""The SQLite driver: each method of the contract is a transaction or two, in a thread."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import ClassVar
from urllib.parse import unquote

from holdfast.drivers.asynchronous import AsyncDriver, AsyncUpload
from holdfast.drivers.contract import Buffer, ObjectInfo, Traits, check_key, check_small
from holdfast.drivers.options import Option, integer, option_values
from holdfast.drivers.threads import Threads
from holdfast.drivers.uri import Uri
from holdfast.errors import DamagedError, ExistsError, NotFoundError, UriError

from .store import Store, sqlite_errors

__all__ = ["SqliteDriver", "location_of"]

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


class SqliteDriver(AsyncDriver):
    """Objects in one SQLite file, below a prefix. The first write creates the file; its folder must
    exist."""

    OPTIONS: ClassVar[Mapping[str, Option]] = {"threads": Option(integer(1, 64), 4, "operations in flight")}
    remote = False

    def __init__(self, uri: Uri) -> None:
        super().__init__(uri, errors=sqlite_errors)
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
            hands_over=True,
        )
        self._prefix = f"{prefix}/" if prefix else ""
        self.store = Store(file)
        self.threads = Threads(threads, uri=self.uri)

    def path(self, key: str) -> str:
        """Return the path of a key in the file. Raises UriError if it is not UTF-8."""
        path = self._prefix + check_key(key, uri=self.uri)
        try:
            path.encode()
        except UnicodeEncodeError as error:
            raise UriError(f"key {key!r} is not UTF-8", uri=self.uri, key=key) from error
        return path

    async def _fetch(self, key: str, start: int, nbytes: int) -> Buffer:
        return await self.threads.run(self._read, key, start, nbytes)

    async def _get(self, key: str) -> bytes:
        return await self.threads.run(self._read_whole, key)

    async def _stat(self, key: str) -> ObjectInfo:
        return await self.threads.run(self._look, key)

    async def _list(self, prefix: str) -> AsyncGenerator[Sequence[ObjectInfo], None]:
        at, after = self.path(prefix) if prefix else self._prefix.rstrip("/"), ""
        while batch := await self.threads.run(self._page, at, after):
            yield [ObjectInfo(path.removeprefix(self._prefix), *facts) for path, *facts in batch]
            after = batch[-1][0]

    async def _delete(self, key: str) -> None:
        await self.threads.run(self._change, _DELETE, {"at": self.path(key)})

    async def _delete_all(self, prefix: str) -> None:
        await self.threads.run(self._change, _DELETE_ALL, {"at": self.path(prefix)})

    async def _sweep(self, prefix: str) -> None:
        # Only processes of one host share the file (shared=False), so this clock is the storage's.
        values = {"at": self.path(prefix), "before_s": time.time() - QUIET_S}
        await self.threads.run(self._change, _SWEEP, values)

    def _upload(self, key: str, nbytes: int) -> AsyncUpload:
        return _SqliteUpload(self, key, nbytes)

    async def _disconnect(self) -> None:
        await self.threads.close(CLOSE_TIMEOUT_S)
        self.store.close()

    # The methods below block, and run in threads.

    def _read(self, key: str, start: int, nbytes: int) -> Buffer:
        stop = start + nbytes
        into = memoryview(bytearray(nbytes))
        with self.store.reading() as db:
            upload, size, _ = self._found(db, key)
            if not 0 <= start <= stop <= size:
                raise DamagedError(f"object ends at byte {size}, before {stop}", uri=self.uri, key=key)
            rows = db.execute(_PARTS, {"upload": upload, "start": start, "stop": stop}).fetchall()
            for part, part_start, part_stop in rows:
                first, last = max(start, part_start), min(stop, part_stop)
                with db.blobopen("parts", "data", part, readonly=True) as blob:
                    blob.seek(first - part_start)
                    into[first - start : last - start] = blob.read(last - first)
        return into

    def _read_whole(self, key: str) -> bytes:
        with self.store.reading() as db:
            upload, nbytes, _ = self._found(db, key)
            check_small(nbytes, self.uri, key)
            rows = db.execute("SELECT data FROM parts WHERE upload = ? ORDER BY start", (upload,))
            return b"".join(data for (data,) in rows)

    def _look(self, key: str) -> ObjectInfo:
        with self.store.reading() as db:
            _, nbytes, modified_s = self._found(db, key)
            return ObjectInfo(key, nbytes, modified_s)

    def _page(self, at: str, after: str) -> Sequence[tuple[str, int, float]]:
        try:
            with self.store.reading() as db:
                return db.execute(_LIST, {"at": at, "after": after, "most": LIST_BATCH}).fetchall()
        except FileNotFoundError:
            return []

    def _change(self, statement: str, values: dict[str, object]) -> None:
        try:
            with self.store.reading():
                pass  # a deletion creates no file
        except FileNotFoundError:
            return
        with self.store.writing() as db:
            db.execute(statement, values)

    def _found(self, db: sqlite3.Connection, key: str) -> tuple[int, int, float]:
        row: tuple[int, int, float] | None = db.execute(_FIND, (self.path(key),)).fetchone()
        if row is None:
            raise NotFoundError("no such object", uri=self.uri, key=key)
        return row


class _SqliteUpload(AsyncUpload):
    """An upload. Its parts are written as they arrive, and stay invisible until it is committed."""

    def __init__(self, driver: SqliteDriver, key: str, nbytes: int) -> None:
        super().__init__(driver, key, nbytes)
        self._driver = driver
        self._path = driver.path(key)
        self._id: int | None = None

    async def _begin(self) -> None:
        await self._driver.threads.run(self._insert)

    async def _write(self, start: int, data: Buffer) -> None:
        await self._driver.threads.run(self._add_part, start, data)

    async def _commit(self, *, exclusive: bool) -> None:
        await self._driver.threads.run(self._publish, exclusive)

    async def _drop(self) -> None:
        await self._driver.threads.run(self._delete)

    def _insert(self) -> None:
        values = (self._path, self.written.nbytes, time.time())
        with self._driver.store.writing() as db:
            self._id = db.execute("INSERT INTO uploads (path, nbytes, touched_s) VALUES (?, ?, ?)", values).lastrowid

    def _add_part(self, start: int, data: Buffer) -> None:
        """Insert a part. Raises IntegrityError if the upload has been deleted."""
        values = (self._id, start, start + len(data), data)
        with self._driver.store.writing() as db:
            db.execute("INSERT INTO parts (upload, start, stop, data) VALUES (?, ?, ?, ?)", values)
            db.execute("UPDATE uploads SET touched_s = ? WHERE id = ?", (time.time(), self._id))

    def _publish(self, exclusive: bool) -> None:
        """Make this upload the object, and delete its old one. Raises IntegrityError if the upload
        has been deleted."""
        with self._driver.store.writing() as db:
            if exclusive and db.execute(_FIND, (self._path,)).fetchone():
                raise ExistsError("the object already exists", uri=self._driver.uri, key=self.key)
            db.execute(_DELETE, {"at": self._path})
            if not db.execute(_PUBLISH, (self.written.nbytes, time.time(), self._id)).rowcount:
                raise sqlite3.IntegrityError("the upload has been deleted")

    def _delete(self) -> None:
        """Delete the upload. If the file cannot be reached, a sweep deletes it later."""
        with self._driver.store.writing() as db:
            db.execute(_DROP, (self._id,))


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
