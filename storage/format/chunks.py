"""The chunks of an image, and the check of their bytes against stored digests.

The manifest holds the digest of each chunk's *page*; the page holds the digests of the chunk's
blocks. See :mod:`.digest`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...planner.image import DIGEST_NBYTES, blocks_of
from .digest import damaged_blocks, digest
from .manifest import Manifest

__all__ = ["Chunk", "chunk_at", "chunks_of", "damaged_ranges", "page_range"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes [start, stop) of an image. ``digest`` is the digest of the chunk's page, from the
    manifest."""

    image: int
    start: int
    stop: int
    digest: bytes


def chunk_at(m: Manifest, image: int, position: int) -> Chunk:
    """Return the chunk of an image that contains byte ``position``."""
    index = position // m.chunk_nbytes
    start = index * m.chunk_nbytes
    stop = min(start + m.chunk_nbytes, int(m.images.hashed_nbytes[image]))
    row = int(m.first_chunk[image]) + index
    return Chunk(image, start, stop, m.images.digests[row].tobytes())


def chunks_of(m: Manifest, image: int) -> list[Chunk]:
    """Return the chunks of one image, in order."""
    end = int(m.images.hashed_nbytes[image])
    first, last = m.first_chunk[image : image + 2].tolist()
    starts = range(0, end, m.chunk_nbytes)
    return [
        Chunk(image, start, min(start + m.chunk_nbytes, end), row.tobytes())
        for start, row in zip(starts, m.images.digests[first:last], strict=True)
    ]


def page_range(m: Manifest, chunk: Chunk) -> tuple[int, int]:
    """Return ``(start, stop)`` of the chunk's page within its image. Pages follow the data."""
    first_page = int(m.images.hashed_nbytes[chunk.image])
    start = first_page + DIGEST_NBYTES * blocks_of(chunk.start, m.block_nbytes)
    stop = first_page + DIGEST_NBYTES * blocks_of(chunk.stop, m.block_nbytes)
    return start, stop


def damaged_ranges(
    chunk: Chunk, start: int, page: bytes, block_nbytes: int, stored_page: bytes | None
) -> list[tuple[int, int]]:
    """Return the damaged ranges of an image; empty if the bytes match their digests.

    ``page`` holds the digests of the blocks just read: the whole chunk, or a part of it beginning
    at ``start``, a block boundary. ``stored_page`` is the verified page of the chunk. It is
    required to check a part, and to locate damage within a chunk: without it, a damaged chunk is
    reported as one range.
    """
    count = len(page) // DIGEST_NBYTES
    stop = min(start + count * block_nbytes, chunk.stop)
    is_whole = (start, stop) == (chunk.start, chunk.stop)
    if is_whole and digest(page) == chunk.digest:
        return []
    if stored_page is None:
        return [(start, stop)]
    first = (start - chunk.start) // block_nbytes * DIGEST_NBYTES
    bad = damaged_blocks(page, stored_page[first : first + len(page)])
    begins = [start + index * block_nbytes for index in bad]
    return [(begin, min(begin + block_nbytes, stop)) for begin in begins]
