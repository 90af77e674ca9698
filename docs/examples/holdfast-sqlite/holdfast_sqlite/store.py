"""The SQLite file: schema, connections, transactions and errors. All functions block.

An upload is a row, and so is each of its parts. An object is an upload that is visible. So a commit
updates one row, and deleting an upload also deletes its parts.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from holdfast.errors import (
    AccessError,
    BusyError,
    FullError,
    HoldfastError,
    NotFoundError,
    StorageDownError,
    StorageError,
)

__all__ = ["Store", "sqlite_errors"]

SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE uploads (
    id INTEGER PRIMARY KEY AUTOINCREMENT, path TEXT NOT NULL, nbytes INTEGER NOT NULL, touched_s REAL NOT NULL,
    visible INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX uploads_by_path ON uploads (path);
CREATE UNIQUE INDEX objects ON uploads (path) WHERE visible;
CREATE TABLE parts (
    id INTEGER PRIMARY KEY, upload INTEGER NOT NULL REFERENCES uploads ON DELETE CASCADE,
    start INTEGER NOT NULL, stop INTEGER NOT NULL, data BLOB NOT NULL, UNIQUE (upload, start)
);
"""

BUSY_TIMEOUT_S = 60.0
"""Time to wait for other processes that write."""


class Store:
    """A pool of connections to one file. Thread-safe."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._idle: list[sqlite3.Connection] = []
        self._writing = threading.Lock()  # SQLite has one writer at a time; threads queue here, not in its busy loop

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Run a transaction that sees one state of the file. Raises FileNotFoundError if there is
        no file."""
        if not os.path.exists(self._file):
            raise FileNotFoundError(self._file)
        with self._transaction("BEGIN") as db:
            yield db

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Run a transaction that is durable at the end of the block, or changes nothing if the
        block raises."""
        with self._writing, self._transaction("BEGIN IMMEDIATE") as db:
            yield db

    def close(self) -> None:
        """Close the idle connections. The next use opens a new one."""
        while self._idle:
            self._idle.pop().close()

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        try:
            db = self._idle.pop()
        except IndexError:
            db = _connect(self._file)
        try:
            db.execute(begin)
            yield db
            db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                db.rollback()
            raise
        finally:
            if db.in_transaction:  # the rollback failed as well
                db.close()
            else:
                self._idle.append(db)


def _connect(file: str) -> sqlite3.Connection:
    db = sqlite3.connect(file, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        _until_free(db, "PRAGMA journal_mode = WAL")  # readers and the writer do not wait for each other
        db.execute("PRAGMA synchronous = FULL")  # without this a power cut may lose a commit in WAL mode
        db.execute("PRAGMA foreign_keys = ON")
        _make_tables(db)
    except BaseException:
        db.close()
        raise
    return db


def _until_free(db: sqlite3.Connection, statement: str) -> None:
    """Retry a statement that SQLite does not itself wait for when another connection runs it at the
    same time."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            db.execute(statement)
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _make_tables(db: sqlite3.Connection) -> None:
    def version() -> int:
        with closing(db.execute("PRAGMA user_version")) as rows:
            found: int = rows.fetchone()[0]
            return found

    if version() == 0:
        db.execute("BEGIN IMMEDIATE")
        if version() == 0:  # no other connection was faster
            for statement in SCHEMA.split(";"):
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        db.execute("COMMIT")
    if version() != SCHEMA_VERSION:
        raise sqlite3.DatabaseError(f"the file is of version {version()}, not {SCHEMA_VERSION}")


_KINDS: dict[int, type[StorageError]] = {
    sqlite3.SQLITE_BUSY: BusyError,
    sqlite3.SQLITE_FULL: FullError,
    sqlite3.SQLITE_READONLY: AccessError,
    sqlite3.SQLITE_PERM: AccessError,
    sqlite3.SQLITE_CANTOPEN: AccessError,
    sqlite3.SQLITE_IOERR: StorageDownError,
}


@contextmanager
def sqlite_errors(doing: str, uri: str, key: str) -> Iterator[None]:
    """Turn SQLite's errors in the block into the matching StorageError, with URI, key and cause."""
    try:
        yield
    except HoldfastError:  # some are OSErrors as well
        raise
    except FileNotFoundError as error:
        raise NotFoundError("no such object, nor the file it would be in", uri=uri, key=key) from error
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # the upper bits are details
        raise _KINDS.get(code, StorageError)(f"{doing} failed: {error}", uri=uri, key=key) from error
