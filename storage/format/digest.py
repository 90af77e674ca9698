"""Checksums: a two-level hash tree over blocks and chunks.

Each *block* (64 KiB) of an image has an xxh3-128 digest. The concatenated digests of one *chunk*
(16 MiB) form its *page*; the xxh3-128 digest of the page is the chunk's digest, stored in the
manifest. Whole chunks are verified against the manifest alone; a slice is verified by the blocks it
touches and their page (R. C. Merkle, "A Digital Signature Based on a Conventional Encryption
Function", 1987). Digests are in xxHash's canonical (big-endian) form.

xxh3 is not a cryptographic hash: it detects damage, not forgery.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import xxhash

from ...planner.image import DIGEST_NBYTES


def digest(data: bytes | memoryview) -> bytes:
    """Return the 16-byte xxh3-128 digest of ``data``."""
    return xxhash.xxh3_128_digest(data)


def page_of(data: memoryview, block_nbytes: int) -> bytes:
    """Return the concatenated digests of the blocks of ``data``. The last block may be short.

    Holds the GIL for about a millisecond per chunk: xxhash releases it only for larger pieces.
    Releasing it for each block would be worse, because a thread next to a busy trainer can wait 5
    ms each time to get it back.
    """
    xxh3 = xxhash.xxh3_128_digest
    cuts = [*range(0, len(data), block_nbytes), len(data)]
    return b"".join([xxh3(data[begin:end]) for begin, end in pairwise(cuts)])


def page_with(
    page: bytes, ranges: Sequence[tuple[int, int]], data: memoryview, block_nbytes: int
) -> bytes:
    """Return ``page`` with the digests of the blocks in these ranges of ``data`` instead of those
    that it has."""
    found = bytearray(page)
    for start, stop in ranges:
        digests = page_of(data[start:stop], block_nbytes)
        at = start // block_nbytes * DIGEST_NBYTES
        found[at : at + len(digests)] = digests
    return bytes(found)
