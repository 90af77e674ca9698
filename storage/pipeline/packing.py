"""Places the chunks of a compressed image in its file while the image is written."""

from __future__ import annotations

import numpy as np

from ...planner.image import DIGEST_NBYTES, ImageLayout
from ..format.packed import Index, PackedChunk, index_nbytes, pack

__all__ = ["Packing"]


class Packing:
    """One image being packed.

    ``nbytes_max``: upper bound for its file; ``end``: end of the chunks placed so far. Chunks are
    packed in any order, on worker threads. A chunk's position is known once all earlier chunks are
    packed.
    """

    def __init__(self, layout: ImageLayout) -> None:
        self._layout = layout
        self._chunks: dict[int, PackedChunk] = {}
        index = index_nbytes(layout.hashed_end, layout.chunk_nbytes, layout.block_nbytes)
        self.nbytes_max = layout.nbytes + int(index)
        self.end = 0

    def pack(self, chunk: int, data: memoryview) -> None:
        """Pack the bytes of a chunk in place. Thread-safe for distinct chunks."""
        self._chunks[chunk] = pack(data, self._layout.block_nbytes)

    def place(self, chunk: int) -> tuple[int, int]:
        """Return the file offset and size of a packed chunk. Call in order of chunks."""
        start = self.end
        nbytes = self._chunks[chunk].nbytes
        self.end += nbytes
        return start, nbytes

    def index(self) -> bytes:
        """Return the trailing index of the file, once all chunks are placed."""
        layout = self._layout
        chunks = [self._chunks[number] for number in sorted(self._chunks)]
        sizes = np.array([size for chunk in chunks for size in chunk.sizes], np.int64)
        digests = np.frombuffer(b"".join(chunk.digest for chunk in chunks), np.uint8)
        return Index(
            layout.hashed_end,
            layout.chunk_nbytes,
            layout.block_nbytes,
            sizes,
            digests.reshape(-1, DIGEST_NBYTES),
        ).encode()
