"""Reads the directory of a zip file written by ``torch.save``: names and locations of records.

Only the end of the file need be in memory. Nothing is trusted: records outside the file and
compressed records are detected.
"""

from __future__ import annotations

import io
import struct
import zipfile
from dataclasses import dataclass

_LOCAL = struct.Struct("<4s22xHH")
_IS_ENCRYPTED = 1

LOCAL_NBYTES = _LOCAL.size
"""Size of the header before each record, excluding the name and the extra field."""


class ZipError(Exception):
    """Raised for data that is not a complete zip file."""


class EarlierError(Exception):
    """Raised if bytes from ``start`` on are needed that have not been read yet."""

    def __init__(self, start: int) -> None:
        super().__init__(start)
        self.start = start


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """A record of ``nbytes`` bytes, whose header is at byte ``start`` of the file."""

    start: int
    nbytes: int
    is_stored: bool
    """True if the bytes are stored raw: neither compressed nor encrypted."""


class _Tail(io.BytesIO):
    """A file whose bytes before ``start`` are not in memory. Seeking there raises EarlierError."""

    def __init__(self, tail: bytes, start: int) -> None:
        super().__init__(tail)
        self._start = start

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if whence != io.SEEK_SET:
            return self._start + super().seek(offset, whence)
        if offset < self._start:
            raise EarlierError(offset)
        return self._start + super().seek(offset - self._start)

    def tell(self) -> int:
        return self._start + super().tell()


def directory(tail: bytes, tail_start: int) -> tuple[dict[str, ZipRecord], int]:
    """Return the records of a file and the file offset of the directory.

    ``tail`` is the end of the file, from byte ``tail_start`` on. Record names omit their common
    folder. Raises EarlierError if the directory begins before ``tail``; ZipError if it is damaged.
    """
    try:
        with zipfile.ZipFile(_Tail(tail, tail_start)) as archive:
            entries = archive.infolist()
            start = archive.start_dir
    except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError) as error:
        raise ZipError(f"its directory is malformed: {error}") from error
    found: dict[str, ZipRecord] = {}
    for entry in entries:
        is_stored = entry.compress_type == zipfile.ZIP_STORED
        is_stored &= not entry.flag_bits & _IS_ENCRYPTED
        if is_stored and entry.compress_size != entry.file_size:
            raise ZipError("its directory states two sizes of one entry")
        if not 0 <= entry.header_offset < start:
            raise ZipError("its directory locates an entry that is not in it")
        name = entry.filename.partition("/")[2]
        found[name] = ZipRecord(entry.header_offset, entry.file_size, is_stored)
    return found, start


def content_start(header: bytes | memoryview, record: ZipRecord) -> int:
    """Return the file offset of a record's bytes, given its ``header``. Raises ZipError."""
    if len(header) < LOCAL_NBYTES:
        raise ZipError("the header of a record is not in it")
    magic, name_nbytes, extra_nbytes = _LOCAL.unpack_from(header)
    if magic != b"PK\x03\x04":
        raise ZipError("a record has no header")
    return int(record.start + LOCAL_NBYTES + name_nbytes + extra_nbytes)
