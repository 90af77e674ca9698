"""Layouts of files over Lustre's object storage targets (OSTs): encoding, decoding and choosing
them. Pure functions.

A file is striped over ``stripe_count`` objects, each on its own OST, ``stripe_nbytes`` at a time.
The layout is stored in the extended attribute ``lustre.lov``. It is set before the first byte is
written and never changes afterwards.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

STRIPE_NBYTES = 16 << 20
"""Default stripe size, equal to the chunk of an image, so that each write goes to one object."""
STRIPE_UNIT_NBYTES = 64 << 10
"""Granularity of stripe sizes in Lustre."""
STRIPE_COUNT_MAX = 2000
ALL_OSTS = -1

_LARGE_NBYTES = 64 << 30
_HUGE_NBYTES = 256 << 30
_PER_STRIPE_NBYTES = 512 << 20
_ALONE_COUNT_MAX = 32

# struct lov_user_md_v1: magic, pattern, object id (two words), stripe size, stripe count, first
# OST.
_V1 = struct.Struct("<IIQQIHH")
_MAGIC_V1 = 0x0BD10BD0
_MAGIC_V3 = 0x0BD30BD0
_POOL_NBYTES = 16  # version 3 appends the name of an OST pool
_ANY_OST = 0xFFFF


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a file.

    ``stripe_count`` is the number of objects, :data:`ALL_OSTS`, or 0 for the file system's default.
    ``stripe_nbytes`` is 0 for the default. ``pool`` is the OST pool. ``composite`` means several
    layouts by file range (PFL); the other fields are then unknown.
    """

    stripe_count: int = 0
    stripe_nbytes: int = 0
    pool: str = ""
    composite: bool = False

    def __str__(self) -> str:
        if self.composite:
            return "a composite layout"
        if self.stripe_count == ALL_OSTS:
            count = "all"
        elif self.stripe_count:
            count = str(self.stripe_count)
        else:
            count = "the default number of"
        if self.stripe_nbytes:
            size = f"{self.stripe_nbytes >> 10:,} KiB"
        else:
            size = "the default size"
        return f"{count} stripes of {size}" + (f" in pool {self.pool}" if self.pool else "")


def encode(layout: Layout) -> bytes:
    """Encode ``layout``, which is not composite, as a value of ``lustre.lov``."""
    magic = _MAGIC_V3 if layout.pool else _MAGIC_V1
    head = _V1.pack(magic, 0, 0, 0, layout.stripe_nbytes, layout.stripe_count & 0xFFFF, _ANY_OST)
    return head + (layout.pool.encode().ljust(_POOL_NBYTES, b"\0") if layout.pool else b"")


def decode(value: bytes) -> Layout:
    """Decode a value of ``lustre.lov``. Anything other than version 1 or 3 is composite, or newer
    than this code."""
    if len(value) < _V1.size:
        return Layout(composite=True)
    magic, _, _, _, stripe_nbytes, count, _ = _V1.unpack_from(value)
    if magic not in (_MAGIC_V1, _MAGIC_V3):
        return Layout(composite=True)
    pool = ""
    if magic == _MAGIC_V3:
        name = value[_V1.size : _V1.size + _POOL_NBYTES]
        pool = name.partition(b"\0")[0].decode("ascii", "replace")
    return Layout(ALL_OSTS if count == 0xFFFF else count, stripe_nbytes, pool)


def choose(nbytes: int, *, ost_count: int, writers: int | None) -> int:
    """Return the number of stripes for a file of ``nbytes``.

    ``writers`` is the number of processes that write concurrently, each its own file. None means
    unknown, and is treated as many.

    Many files fill all OSTs by their number, so each gets one stripe, which also keeps objects and
    locks few. Very large files get a few stripes, so that no OST stores a whole one. Few files
    share the OSTs evenly, up to the number that their size can use.
    """
    if writers is None or writers >= ost_count:
        if nbytes < _LARGE_NBYTES:
            by_size = 1
        elif nbytes < _HUGE_NBYTES:
            by_size = 2
        else:
            by_size = 4
        return max(1, min(by_size, ost_count))
    return max(1, min(ost_count // writers, nbytes // _PER_STRIPE_NBYTES, _ALONE_COUNT_MAX))
