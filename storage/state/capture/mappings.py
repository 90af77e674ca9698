"""Finds memory of this process that is mapped from a file.

Asks the kernel (Linux 6.11 and newer), or reads its list of mappings.

Scope: addresses. :mod:`.write_tracking` decides which of that memory others can write to.
"""

from __future__ import annotations

import bisect
import fcntl
import struct
from collections.abc import Callable, Sequence

__all__ = ["listed_files", "mapped_files"]

Range = tuple[int, int]

_QUERY = struct.Struct("3Q 64x 16x")
"""A ``procmap_query``: size, flags, address. The answer begins after the address."""
_PROCMAP_QUERY = 3 << 30 | _QUERY.size << 16 | ord("f") << 8 | 17
_NEXT_FILE = 0x10 | 0x20
"""COVERING_OR_NEXT_VMA and FILE_BACKED_VMA."""


def mapped_files(ranges: Sequence[Range]) -> list[Range]:
    """Return the parts of ``ranges`` (sorted, disjoint) that are mapped from a file.

    To the kernel, all shared memory is a file, and so are huge pages of hugetlbfs.
    """
    with open("/proc/self/maps", "rb", buffering=0) as maps:
        try:
            return _overlaps(ranges, lambda address: _ask(maps.fileno(), address))
        except OSError:  # an older kernel
            return listed_files(ranges, maps.read())


def listed_files(ranges: Sequence[Range], maps: bytes) -> list[Range]:
    """Return the same as :func:`mapped_files`, from the contents of ``/proc/self/maps``."""
    files = [_range_of(line) for line in maps.splitlines() if _is_file(line)]

    def following(address: int) -> Range | None:
        at = bisect.bisect_right(files, address, key=lambda file: file[1])
        return files[at] if at < len(files) else None

    return _overlaps(ranges, following)


def _overlaps(ranges: Sequence[Range], following: Callable[[int], Range | None]) -> list[Range]:
    """Return the overlaps of ``ranges`` with file mappings.

    ``following`` returns the file mapping that contains an address, or the next one above it.
    """
    found = []
    file: Range | None = (0, 0)
    for start, stop in ranges:
        at = start
        while at < stop:
            if file is not None and file[1] <= at:
                file = following(at)
            if file is None or file[0] >= stop:
                break
            found.append((max(at, file[0]), min(stop, file[1])))
            at = file[1]
    return found


def _ask(maps: int, address: int) -> Range | None:
    asked = bytearray(_QUERY.pack(_QUERY.size, _NEXT_FILE, address))
    try:
        fcntl.ioctl(maps, _PROCMAP_QUERY, asked)
    except FileNotFoundError:
        return None
    start, stop = struct.unpack_from("2Q", asked, 24)
    return start, stop


def _is_file(line: bytes) -> bool:
    """Return whether a line of ``/proc/self/maps`` describes shared memory, or has an inode."""
    _, permissions, _, _, inode, *_ = line.split(None, 5)
    return permissions.endswith(b"s") or inode != b"0"


def _range_of(line: bytes) -> Range:
    start, stop = line.split(None, 1)[0].split(b"-")
    return int(start, 16), int(stop, 16)
