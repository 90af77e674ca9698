"""Checksums: what is hashed, and how one digest vouches for many.

Every *block* (64 KiB) of an image has an xxh3-128 digest. The digests of one *chunk* (16 MiB),
written one after the other, are its *page*; the xxh3-128 digest of the page is the chunk's digest,
which the manifest holds. So whole chunks are verified against the manifest alone, and a slice is
verified by the blocks that it touches plus their page. It is a Merkle tree of two levels; digests
are in xxHash's canonical (big-endian) form.

xxh3 is no cryptographic hash: it finds damage, not forgery.
"""

from __future__ import annotations

from itertools import pairwise

import xxhash

from ...planner.image import DIGEST_NBYTES

__all__ = ["damaged_blocks", "digest", "page_of"]


def digest(data: bytes | memoryview) -> bytes:
    """The 16-byte xxh3-128 digest of ``data``."""
    return xxhash.xxh3_128_digest(data)


def page_of(data: memoryview, block_nbytes: int) -> bytes:
    """The digests of ``data``'s blocks, joined. The last block may be short.

    Holds the GIL for about a millisecond a chunk: xxhash lets go of it for larger pieces only, and
    who lets go of it per block has to wait for it per block, up to 5 ms each beside a trainer that
    computes in Python.
    """
    xxh3 = xxhash.xxh3_128_digest
    cuts = [*range(0, len(data), block_nbytes), len(data)]
    return b"".join([xxh3(data[a:b]) for a, b in pairwise(cuts)])


def damaged_blocks(page: bytes, expected: bytes) -> list[int]:
    """Indices of the blocks whose digests differ between two pages of equal length."""
    if page == expected:
        return []
    n = len(expected) // DIGEST_NBYTES
    return [
        i
        for i in range(n)
        if page[i * DIGEST_NBYTES : (i + 1) * DIGEST_NBYTES]
        != expected[i * DIGEST_NBYTES : (i + 1) * DIGEST_NBYTES]
    ]
