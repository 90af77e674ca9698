"""How a file is spread over a Lustre file system's object storage targets (OSTs): as bytes, and
chosen. Pure functions.

A file is dealt out to ``stripe_count`` objects, each on an OST of its own, ``stripe_nbytes`` at a
time. The layout is the extended attribute ``lustre.lov``; it is given before the first byte is
written, and never changes afterwards.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

__all__ = [
    "ALL_OSTS",
    "STRIPE_COUNT_MAX",
    "STRIPE_NBYTES",
    "STRIPE_UNIT_NBYTES",
    "Layout",
    "choose",
    "decode",
    "encode",
]

STRIPE_NBYTES = 16 << 20
"""The chunk of an image: so each write goes to one object."""
STRIPE_UNIT_NBYTES = 64 << 10
"""Lustre takes multiples of this."""
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
_POOL_NBYTES = 16  # version 3 has the name of a pool of OSTs behind it
_ANY_OST = 0xFFFF


@dataclass(frozen=True, slots=True)
class Layout:
    """``stripe_count``: objects, :data:`ALL_OSTS`, or 0 for the file system's default;
    ``stripe_nbytes``: 0 for the default; ``pool``: OSTs to choose from. ``composite``: several
    layouts by range of the file (PFL); the rest is then unknown."""

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
    """The value of ``lustre.lov`` that asks for ``layout``, which is not composite."""
    if layout.pool:
        magic = _MAGIC_V3
    else:
        magic = _MAGIC_V1
    head = _V1.pack(magic, 0, 0, 0, layout.stripe_nbytes, layout.stripe_count & 0xFFFF, _ANY_OST)
    return head + (layout.pool.encode().ljust(_POOL_NBYTES, b"\0") if layout.pool else b"")


def decode(value: bytes) -> Layout:
    """The layout that ``lustre.lov`` says. What is neither version 1 nor 3 is composite, or newer
    than we are."""
    if len(value) < _V1.size:
        return Layout(composite=True)
    magic, _, _, _, stripe_nbytes, count, _ = _V1.unpack_from(value)
    if magic not in (_MAGIC_V1, _MAGIC_V3):
        return Layout(composite=True)
    if magic == _MAGIC_V3:
        name = value[_V1.size : _V1.size + _POOL_NBYTES]
    else:
        name = b""
    pool = name.partition(b"\0")[0].decode("ascii", "replace")
    return Layout(ALL_OSTS if count == 0xFFFF else count, stripe_nbytes, pool)


def choose(nbytes: int, *, ost_count: int, writers: int | None, shared_file: bool = False) -> int:
    """The number of stripes for a file of ``nbytes``.

    ``writers`` is how many processes write at the same time, each a file of its own, or, with
    ``shared_file``, all this one; None: unknown, and taken for many. Many files fill all OSTs by
    their number: one stripe each, which also keeps the objects and locks few; a few for very large
    ones, so that no OST holds a whole one. Few files get a share of the OSTs each, as far as their
    size makes use of it. One shared file gets an OST per writer.
    """
    if shared_file:
        return max(1, min(ost_count, writers or ost_count, STRIPE_COUNT_MAX))
    if writers is None or writers >= ost_count:
        if nbytes < _LARGE_NBYTES:
            by_size = 1
        elif nbytes < _HUGE_NBYTES:
            by_size = 2
        else:
            by_size = 4
        return max(1, min(by_size, ost_count))
    return max(1, min(ost_count // writers, nbytes // _PER_STRIPE_NBYTES, _ALONE_COUNT_MAX))
