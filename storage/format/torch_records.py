"""Reads the directory of a zip file written by ``torch.save``: names and locations of records.

A model file has thousands of records, and a DCP folder thousands of such files, so only the needed
fields are decoded. Nothing is trusted: records outside the file and compressed records are
detected.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

_LOCAL = struct.Struct("<4s22xHH")
_CENTRAL = struct.Struct("<4s4xHH8xIIHHH8xI")
_END = struct.Struct("<4s8xII2x")
_END64 = struct.Struct("<4s36xQQ")
_LOCATOR64 = struct.Struct("<4s16x")
_EXTRA = struct.Struct("<HH")
_COMMENT_NBYTES_MAX = 0xFFFF
_FULL = 0xFFFF_FFFF
"""Placeholder for a number that is stored as 64 bits in the extra field."""
_EXTRA64_ID = 1
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


def directory(tail: bytes, tail_start: int) -> tuple[dict[str, ZipRecord], int]:
    """Return the records of a file and the file offset of the directory.

    ``tail`` is the end of the file, from byte ``tail_start`` on. Record names omit their common
    folder. Raises EarlierError if the directory begins before ``tail``; ZipError if it is damaged.
    """
    try:
        start, stop = _extent(tail, tail_start)
        if start < tail_start:
            raise EarlierError(start)
        return _entries(tail, tail_start, start, stop), start
    except struct.error as error:
        raise ZipError(f"its directory is truncated: {error}") from error


def content_start(header: bytes | memoryview, record: ZipRecord) -> int:
    """Return the file offset of a record's bytes, given its ``header``. Raises ZipError."""
    if len(header) < LOCAL_NBYTES:
        raise ZipError("the header of a record is not in it")
    magic, name_nbytes, extra_nbytes = _LOCAL.unpack_from(header)
    if magic != b"PK\x03\x04":
        raise ZipError("a record has no header")
    return int(record.start + LOCAL_NBYTES + name_nbytes + extra_nbytes)


def _extent(tail: bytes, tail_start: int) -> tuple[int, int]:
    end = tail.rfind(b"PK\x05\x06", max(0, len(tail) - _END.size - _COMMENT_NBYTES_MAX))
    if end < 0:
        raise ZipError("it has no directory")
    _, nbytes, start = _END.unpack_from(tail, end)
    end64 = end - _LOCATOR64.size - _END64.size
    if end64 >= 0 and tail.startswith(b"PK\x06\x07", end - _LOCATOR64.size):
        magic, nbytes, start = _END64.unpack_from(tail, end64)
        if magic != b"PK\x06\x06":
            raise ZipError("the end of its directory is malformed")
        end = end64
    if start + nbytes > tail_start + end:
        raise ZipError("its directory is not in it")
    return start, start + nbytes


def _entries(tail: bytes, tail_start: int, start: int, stop: int) -> dict[str, ZipRecord]:
    found: dict[str, ZipRecord] = {}
    at = start - tail_start
    end = stop - tail_start
    while at < end:
        magic, flags, method, packed, nbytes, name_nbytes, extra_nbytes, comment_nbytes, begin = (
            _CENTRAL.unpack_from(tail, at)
        )
        if magic != b"PK\x01\x02":
            raise ZipError("its directory has a malformed entry")
        name_end = at + _CENTRAL.size + name_nbytes
        name = tail[at + _CENTRAL.size : name_end]
        at = name_end + extra_nbytes + comment_nbytes
        if at > end:
            raise ZipError("its directory is truncated")
        if _FULL in (nbytes, packed, begin):
            extra = tail[name_end : name_end + extra_nbytes]
            nbytes, packed, begin = _in_64_bits(extra, (nbytes, packed, begin))
        is_stored = method == 0 and not flags & _IS_ENCRYPTED
        if is_stored and packed != nbytes:
            raise ZipError("its directory states two sizes of one entry")
        found[name.partition(b"/")[2].decode("latin-1")] = ZipRecord(begin, nbytes, is_stored)
    return found


def _in_64_bits(extra: bytes, numbers: tuple[int, ...]) -> list[int]:
    """Return the numbers, with placeholders replaced from the extra field."""
    at = 0
    while at + _EXTRA.size <= len(extra):
        kind, nbytes = _EXTRA.unpack_from(extra, at)
        at += _EXTRA.size
        if kind == _EXTRA64_ID:
            count = numbers.count(_FULL)
            if nbytes < 8 * count:
                break
            large = iter(struct.unpack_from(f"<{count}Q", extra, at))
            return [next(large) if number == _FULL else number for number in numbers]
        at += nbytes
    raise ZipError("its directory lacks a number")
