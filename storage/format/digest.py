"""Checksums: what is hashed, and how one digest covers many.

Every *block* (64 KiB) of an image has an xxh3-128 digest. The digests of one *chunk* (16 MiB),
written one after the other, are its *page*; the xxh3-128 digest of the page is the chunk's digest,
which the manifest holds. So whole chunks are verified against the manifest alone, and a slice is
verified by the blocks that it touches and their page. This is a hash tree of two levels (R. C.
Merkle, "A Digital Signature Based on a Conventional Encryption Function", 1987); digests are in
xxHash's canonical (big-endian) form.

xxh3 is no cryptographic hash: it detects damage, not forgery.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import xxhash

from ...planner.image import DIGEST_NBYTES

__all__ = ["damaged_blocks", "digest", "page_of"]


def digest(data: bytes | memoryview) -> bytes:
    """The 16-byte xxh3-128 digest of ``data``."""
    return xxhash.xxh3_128_digest(data)


def page_of(data: memoryview, block_nbytes: int) -> bytes:
    """The digests of ``data``'s blocks, joined. The last block may be short.

    Holds the GIL for about a millisecond a chunk, because xxhash releases it only for larger
    pieces. That is better than to release it for each block: beside a trainer that computes in
    Python, the thread would wait up to 5 ms to get it back, each time.
    """
    xxh3 = xxhash.xxh3_128_digest
    cuts = [*range(0, len(data), block_nbytes), len(data)]
    return b"".join([xxh3(data[begin:end]) for begin, end in pairwise(cuts)])


def damaged_blocks(page: bytes, expected: bytes) -> list[int]:
    """Indices of the blocks whose digests differ between two pages of equal length."""
    if page == expected:
        return []
    n = len(expected) // DIGEST_NBYTES
    found = np.frombuffer(page, np.uint8, n * DIGEST_NBYTES).reshape(n, DIGEST_NBYTES)
    stored = np.frombuffer(expected, np.uint8, n * DIGEST_NBYTES).reshape(n, DIGEST_NBYTES)
    indices: list[int] = np.flatnonzero((found != stored).any(axis=1)).tolist()
    return indices
