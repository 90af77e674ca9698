"""How the images of a compressed checkpoint are stored. Pure; lz4 is loaded at first use.

Each block by itself, as it is or as a raw lz4 block, whichever pays; the blocks of a chunk one
after the other, and then zeros up to a multiple of 4096, so that chunks are read and written past
the page cache::

    chunk, zeros, chunk, zeros, …    blocks of [0, hashed_nbytes) of the image, in order
    pages                            the rest of the image, as it is
    index                            of each block the bytes that it takes, 4 each; of each chunk the digest of what is
                                     stored of it, zeros included; the digest of the index up to here

So a range of blocks of one chunk is one range of the file. Both ways go in place: a block never
takes more than it has, so what is packed lies at the beginning of the memory that it came from, and
is unpacked from the last block to the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from ...core.forks.cached import cached_property
from ...core.units import round_up
from ...errors import UsageError
from ...planner.columns import Ints
from ...planner.image import DIGEST_NBYTES, PAGE_NBYTES, blocks_of
from .digest import digest

__all__ = [
    "COMPRESSIONS",
    "Compression",
    "Index",
    "PackedChunk",
    "checked_compression",
    "index_nbytes",
    "pack",
    "page_of_packed",
    "unpack",
]

Compression = Literal["lz4"]
COMPRESSIONS: tuple[Compression, ...] = get_args(Compression)
_SIZE = np.dtype("<u4")


def checked_compression(compression: Any) -> Compression | None:
    """What a caller asks for. Raises UsageError for what there is not, and where lz4 is not
    installed."""
    if compression is None:
        return None
    if compression not in COMPRESSIONS:
        raise UsageError(
            f"compression={compression!r}", advice=f"Give {COMPRESSIONS[0]!r}, or None."
        )
    _codec()
    return COMPRESSIONS[0]


def _codec() -> ModuleType:
    try:
        import lz4.block
    except ImportError as error:
        raise UsageError(
            "compressed checkpoints need lz4, which is not installed",
            advice="pip install 'holdfast-checkpoint[lz4]'.",
        ) from error
    return lz4.block  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class PackedChunk:
    """What is stored of a chunk: of each block the bytes that it takes, and of all of it, zeros at
    the end included, the size and the digest."""

    sizes: list[int]
    nbytes: int
    digest: bytes


def pack(chunk: memoryview, block_nbytes: int) -> PackedChunk:
    """Pack a chunk, whole pages of it, in place: what is to be stored is at its beginning then. A
    block that would not lose an eighth stays as it is: unpacking costs time, too."""
    compress, sizes, end = _codec().compress, list[int](), 0
    for start in range(0, len(chunk), block_nbytes):
        block = chunk[start : start + block_nbytes]
        packed: bytes = compress(block, store_size=False)
        kept = packed if 8 * len(packed) <= 7 * len(block) else block
        if kept is packed or end < start:
            chunk[end : end + len(kept)] = kept
        sizes.append(len(kept))
        end += len(kept)
    nbytes = round_up(end, PAGE_NBYTES)
    chunk[end:nbytes] = bytes(nbytes - end)
    return PackedChunk(sizes, nbytes, digest(chunk[:nbytes]))


def unpack(blocks: memoryview, sizes: Sequence[int], block_nbytes: int) -> None:
    """Unpack, in place, blocks that lie one after the other at the beginning of memory for all of
    them. Raises ValueError where one is not of the size that it must have."""
    end, stop = sum(sizes), len(blocks)
    for size in reversed(sizes):
        if end == stop:
            return  # this one, and all before it, are as they were, and where they were
        start = (stop - 1) // block_nbytes * block_nbytes
        blocks[start:stop] = _unpacked(blocks[end - size : end], stop - start)
        end, stop = end - size, start


def page_of_packed(
    chunk: memoryview, sizes: Sequence[int], nbytes: int, block_nbytes: int
) -> bytes:
    """The page of a chunk of ``nbytes``, of what is stored of it. Raises as :func:`unpack` does."""
    digests, end = list[bytes](), 0
    for size, start in zip(sizes, range(0, nbytes, block_nbytes), strict=True):
        digests.append(
            digest(_unpacked(chunk[end : end + size], min(block_nbytes, nbytes - start)))
        )
        end += size
    return b"".join(digests)


def _unpacked(stored: memoryview, nbytes: int) -> memoryview:
    """A block of ``nbytes``. No more memory than that is taken, whatever is stored."""
    if len(stored) == nbytes:
        return stored
    codec = _codec()
    try:
        block = codec.decompress(stored, uncompressed_size=nbytes)
    except codec.LZ4BlockError as error:
        raise ValueError(str(error)) from error
    if len(block) != nbytes:
        raise ValueError(f"a block of {nbytes:,} bytes is {len(block):,} long")
    return memoryview(block)


def index_nbytes(hashed_nbytes: Any, chunk_nbytes: int, block_nbytes: int) -> Any:
    """The size of the index of an image, or, by columns, of many."""
    blocks, chunks = blocks_of(hashed_nbytes, block_nbytes), blocks_of(hashed_nbytes, chunk_nbytes)
    return _SIZE.itemsize * blocks + DIGEST_NBYTES * chunks + DIGEST_NBYTES


@dataclass(frozen=True, eq=False)
class Index:
    """Where the blocks of one image lie. ``sizes``: (B,) bytes that each takes; ``digests``: (C,
    16) of what is stored of each chunk."""

    hashed_nbytes: int
    chunk_nbytes: int
    block_nbytes: int
    sizes: Ints
    digests: npt.NDArray[np.uint8]

    @cached_property
    def chunk_start(self) -> Ints:
        """(C + 1,): where in the file each chunk begins, and where the last one ends."""
        firsts = np.arange(0, len(self.sizes), self.chunk_nbytes // self.block_nbytes)
        used = np.add.reduceat(self.sizes, firsts) if len(firsts) else self.sizes
        return np.concatenate([[0], np.cumsum(round_up(used, PAGE_NBYTES))]).astype(np.int64)

    def sizes_of(self, start: int, stop: int) -> list[int]:
        """Of the blocks that hold [start, stop) of the image."""
        found: list[int] = self.sizes[
            start // self.block_nbytes : blocks_of(stop, self.block_nbytes)
        ].tolist()
        return found

    def begin_of(self, start: int) -> int:
        """Where in the file the block is that holds byte ``start`` of the image."""
        chunk = start // self.chunk_nbytes
        before = self.sizes_of(
            chunk * self.chunk_nbytes, start // self.block_nbytes * self.block_nbytes
        )
        return int(self.chunk_start[chunk]) + sum(before)

    def encode(self) -> bytes:
        """As it is stored."""
        body = self.sizes.astype(_SIZE).tobytes() + self.digests.tobytes()
        return body + digest(body)

    @classmethod
    def decode(
        cls, data: bytes | memoryview, hashed_nbytes: int, chunk_nbytes: int, block_nbytes: int
    ) -> Index:
        """The index of such an image, of exactly the bytes that it has. Raises ValueError where it
        is not what was written, and for sizes that no block can have."""
        body = memoryview(data)[:-DIGEST_NBYTES]
        if digest(body) != data[-DIGEST_NBYTES:]:
            raise ValueError("it does not match its own checksum")
        blocks = blocks_of(hashed_nbytes, block_nbytes)
        sizes = np.frombuffer(body, _SIZE, blocks).astype(np.int64)
        digests = np.frombuffer(body, np.uint8, offset=blocks * _SIZE.itemsize).reshape(
            -1, DIGEST_NBYTES
        )
        whole = np.minimum(block_nbytes, hashed_nbytes - block_nbytes * np.arange(blocks))
        if not ((sizes > 0) & (sizes <= whole)).all():
            raise ValueError("a block takes more bytes than it has, or none")
        return cls(hashed_nbytes, chunk_nbytes, block_nbytes, sizes, digests)
