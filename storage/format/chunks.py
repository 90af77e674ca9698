"""The chunks of an image, and the check of their bytes against stored digests.

The manifest holds the digest of each chunk's *page*; the page holds the digests of the chunk's
blocks. See :mod:`.digest`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ...core.units import ceil_div
from ...errors import DamagedError
from ...planner.image import DIGEST_NBYTES
from .digest import digest
from .manifest import Manifest


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
    start = first_page + DIGEST_NBYTES * ceil_div(chunk.start, m.block_nbytes)
    stop = first_page + DIGEST_NBYTES * ceil_div(chunk.stop, m.block_nbytes)
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
    if stored_page[first : first + len(page)] == page:
        return []
    found = np.frombuffer(page, np.uint8).reshape(-1, DIGEST_NBYTES)
    stored = np.frombuffer(stored_page, np.uint8, len(page), first).reshape(-1, DIGEST_NBYTES)
    bad = np.flatnonzero((found != stored).any(axis=1)) * block_nbytes + start
    return [(begin, min(begin + block_nbytes, stop)) for begin in bad.tolist()]


_NAMES_MAX = 5


def tensors_at(manifest: Manifest, image: int, start: int, stop: int) -> list[str]:
    """Return the names of tensors that have bytes in [start, stop) of an image's file."""
    s = manifest.shards
    end = s.start + s.nbytes(manifest.tensors)
    rows = np.flatnonzero((s.image == image) & (s.start < stop) & (end > start))
    return [manifest.tensors.names[row] for row in np.unique(s.tensor[rows]).tolist()]


def tensors_in(manifest: Manifest, file: int) -> list[str]:
    """Return the names of tensors that have bytes in the file in row ``file``."""
    s = manifest.shards
    if manifest.file_map is None:
        held = s.image == file
    else:
        end = s.start + s.nbytes(manifest.tensors)
        held = manifest.file_map.touches(file, s.image, s.start, end)
    return [manifest.tensors.names[row] for row in np.unique(s.tensor[held]).tolist()]


def damaged(
    manifest: Manifest, uri: str, image: int, start: int, stop: int, what: str, key: str = ""
) -> DamagedError:
    """Build an error that names file, bytes and tensors; ``what`` completes "bytes a to b …".

    ``start`` and ``stop`` are bytes of the image, the error's are those of the file. ``key``: the
    file, if that is known; else all files with these bytes are named.
    """
    parts = manifest.file_ranges(image, start, stop)
    parts = [part for part in parts if manifest.files[part.file].key == key] or parts
    keys = list(dict.fromkeys(manifest.files[part.file].key for part in parts))
    where = f"bytes {start:,} to {stop:,}"
    if len(parts) == 1:
        (part,) = parts
        where = f"bytes {part.start:,} to {part.start + part.nbytes:,}"
        start, stop = part.image_start, part.image_start + part.nbytes
    elif len(keys) > 1:
        where += f" of the image of rank {manifest.images.rank[image]}, in {_some(keys)},"
    names = tensors_at(manifest, image, start, stop)
    return DamagedError(
        f"{where} {what}. {_belong_to(names)}",
        uri=uri,
        key=keys[0],
        image=(int(manifest.images.rank[image]), parts[0].image_start),
        advice="Load another checkpoint; `holdfast verify` lists all damage of this one",
    )


def _belong_to(names: list[str]) -> str:
    if not names:
        return "They belong to no tensor."
    return f"They belong to tensor {_some(map(repr, names))}."


def _some(names: Iterable[str]) -> str:
    first = list(names)
    shown = ", ".join(first[:_NAMES_MAX])
    if len(first) > _NAMES_MAX:
        shown += f" and {len(first) - _NAMES_MAX} more"
    return shown
