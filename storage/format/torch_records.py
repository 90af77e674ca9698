"""Reads the directory of a zip file, as ``torch.save`` writes them: which records there are, and
where each lies.

A file of a model has thousands of records, and a folder of torch's distributed checkpoint thousands
of such files, so this makes nothing but what is needed of each. Nothing is believed: what is not in
the file, or is not stored as it is, says so.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

__all__ = [
    "CHECKSUM_NBYTES",
    "LOCAL_NBYTES",
    "EarlierError",
    "ZipError",
    "ZipRecord",
    "content_start",
    "directory",
]

_LOCAL = struct.Struct("<4s22xHH")
_CENTRAL = struct.Struct("<4s4xHH8xIIHHH8xI")
_END = struct.Struct("<4s8xII2x")
_END64 = struct.Struct("<4s36xQQ")
_LOCATOR64 = struct.Struct("<4s16x")
_EXTRA = struct.Struct("<HH")
_COMMENT_NBYTES_MAX = 0xFFFF
_FULL = 0xFFFF_FFFF
"""Stands for a number that is in the extra field, where it has 64 bits."""
_EXTRA64_ID = 1
_IS_ENCRYPTED = 1

LOCAL_NBYTES = _LOCAL.size
"""The header before each record, without the name and the extra field, whose sizes it says."""

CHECKSUM_NBYTES = 4
_CHECKSUM_AT = 16


class ZipError(Exception):
    """What was read is no whole zip file."""


class EarlierError(Exception):
    """Bytes from ``start`` on are asked for, which have not been read."""

    def __init__(self, start: int) -> None:
        super().__init__(start)
        self.start = start


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """A record of ``nbytes`` bytes, whose header begins at byte ``start`` of the file."""

    start: int
    nbytes: int
    is_stored: bool
    """True if the bytes are in the file as they are: not compressed, and not encrypted."""
    checksum_start: int = field(default=0, compare=False)
    """Where in the file the directory has a checksum of its bytes, which nobody looks at."""


def directory(tail: bytes, tail_start: int) -> tuple[dict[str, ZipRecord], int]:
    """The records of a file, and where the directory begins, of its last bytes ``tail``, which
    begin at byte ``tail_start``. Records are named without the folder that all of them are in.

    Raises EarlierError where the directory begins before ``tail``; ZipError.
    """
    try:
        start, stop = _extent(tail, tail_start)
        if start < tail_start:
            raise EarlierError(start)
        return _entries(tail, tail_start, start, stop), start
    except struct.error as error:
        raise ZipError(f"its directory ends in the middle: {error}") from error


def content_start(header: bytes | memoryview, record: ZipRecord) -> int:
    """Where in the file the bytes of a record begin, by its ``header``. Raises ZipError."""
    if len(header) < LOCAL_NBYTES:
        raise ZipError("the header of a record is not in it")
    magic, name_nbytes, extra_nbytes = _LOCAL.unpack_from(header)
    if magic != b"PK\x03\x04":
        raise ZipError("a record has no header")
    return int(record.start + LOCAL_NBYTES + name_nbytes + extra_nbytes)


def _extent(tail: bytes, tail_start: int) -> tuple[int, int]:
    """Where in the file the directory begins and ends."""
    end = tail.rfind(b"PK\x05\x06", max(0, len(tail) - _END.size - _COMMENT_NBYTES_MAX))
    if end < 0:
        raise ZipError("it has no directory")
    _, nbytes, start = _END.unpack_from(tail, end)
    end64 = end - _LOCATOR64.size - _END64.size
    if end64 >= 0 and tail.startswith(b"PK\x06\x07", end - _LOCATOR64.size):
        magic, nbytes, start = _END64.unpack_from(tail, end64)
        if magic != b"PK\x06\x06":
            raise ZipError("the end of its directory is none")
        end = end64
    if start + nbytes > tail_start + end:
        raise ZipError("its directory is not in it")
    return start, start + nbytes


def _entries(tail: bytes, tail_start: int, start: int, stop: int) -> dict[str, ZipRecord]:
    """The records that bytes [start, stop) of the file name."""
    found: dict[str, ZipRecord] = {}
    at = start - tail_start
    end = stop - tail_start
    while at < end:
        checksum_start = tail_start + at + _CHECKSUM_AT
        magic, flags, method, packed, nbytes, name_nbytes, extra_nbytes, comment_nbytes, begin = (
            _CENTRAL.unpack_from(tail, at)
        )
        if magic != b"PK\x01\x02":
            raise ZipError("its directory has an entry that is none")
        name_end = at + _CENTRAL.size + name_nbytes
        name = tail[at + _CENTRAL.size : name_end]
        at = name_end + extra_nbytes + comment_nbytes
        if at > end:
            raise ZipError("its directory ends in the middle")
        if _FULL in (nbytes, packed, begin):
            extra = tail[name_end : name_end + extra_nbytes]
            nbytes, packed, begin = _in_64_bits(extra, (nbytes, packed, begin))
        is_stored = method == 0 and not flags & _IS_ENCRYPTED
        if is_stored and packed != nbytes:
            raise ZipError("its directory states two sizes of one entry")
        found[name.partition(b"/")[2].decode("latin-1")] = ZipRecord(
            begin, nbytes, is_stored, checksum_start
        )
    return found


def _in_64_bits(extra: bytes, numbers: tuple[int, ...]) -> list[int]:
    """Those of the numbers that are in the extra field, from there."""
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
    raise ZipError("its directory has a number that is not there")
