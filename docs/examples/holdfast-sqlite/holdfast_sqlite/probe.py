"""A probe for the conformance kit: accesses the file without the driver."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from holdfast.drivers.uri import Uri

from .driver import location_of

__all__ = ["SqliteProbe"]


class SqliteProbe:
    """Rows of the file below the URI's prefix. See
    :class:`holdfast.drivers.conformance.probes.Probe`."""

    def __init__(self, uri: Uri) -> None:
        self._file, prefix = location_of(uri)
        self._prefix = f"{prefix}/"

    def write(self, key: str, data: bytes) -> None:
        with self._opened() as db:
            path = self._prefix + key
            db.execute("DELETE FROM uploads WHERE path = ? AND visible", (path,))
            values = (path, len(data), time.time())
            insert = "INSERT INTO uploads (path, nbytes, touched_s, visible) VALUES (?, ?, ?, 1)"
            upload = db.execute(insert, values).lastrowid
            for start in range(0, len(data), 30_000):
                part = (upload, start, min(start + 30_000, len(data)), data[start : start + 30_000])
                db.execute("INSERT INTO parts (upload, start, stop, data) VALUES (?, ?, ?, ?)", part)

    def read(self, key: str) -> bytes:
        query = "SELECT data FROM parts JOIN uploads ON upload = uploads.id WHERE path = ? AND visible ORDER BY start"
        with self._opened() as db:
            parts = db.execute(query, (self._prefix + key,)).fetchall()
        if not parts:
            raise KeyError(key)
        return b"".join(data for (data,) in parts)

    def list(self) -> list[str]:
        with self._opened() as db:
            rows = db.execute("SELECT path, id, visible FROM uploads").fetchall()
        below = [row for row in rows if row[0].startswith(self._prefix)]
        names = [path if visible else f"{path} (upload {upload})" for path, upload, visible in below]
        return sorted(name.removeprefix(self._prefix) for name in names)

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(f"file:{self._file}?mode=rw", uri=True, timeout=60)) as db, db:
            db.execute("PRAGMA foreign_keys = ON")
            yield db
