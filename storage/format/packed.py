"""Stored form of compressed images, as ``docs/reference/format.md`` specifies it. Pure; lz4 is
imported at first use.

Each block is stored separately: raw, or as a raw lz4 block if that is smaller. So a range of blocks
of one chunk is one range of the file. Chunks are padded to pages, for direct I/O. Packing and
unpacking are done in place. A stored block is never larger than the block, so packed blocks fit at
the beginning of the memory they came from, and are unpacked from the last block to the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from ...core.forks.cached import cached_property
from ...core.units import IntOrArray, ceil_div, round_up
from ...errors import UsageError
from ...planner.columns import Ints
from ...planner.image import DIGEST_NBYTES, PAGE_NBYTES
from .digest import digest

Compression = Literal["lz4"]
COMPRESSIONS: tuple[Compression, ...] = get_args(Compression)
_SIZE = np.dtype("<u4")


def checked_compression(compression: object) -> Compression | None:
    """Return the compression that a caller requested.

    Raises UsageError if it does not exist or lz4 is not installed.
    """
    if compression is None:
        return None
    for known in COMPRESSIONS:
        if compression == known:
            _codec()
            return known
    raise UsageError(f"compression={compression!r}", advice=f"Give {COMPRESSIONS[0]!r}, or None.")


def _codec() -> ModuleType:
    try:
        import lz4.block
    except ImportError as error:
        raise UsageError(
            "compressed checkpoints need lz4, which is not installed", advice="pip install lz4"
        ) from error
    return lz4.block  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class PackedChunk:
    """The stored form of a chunk: each block's stored size; total size and digest, padding
    included."""

    sizes: list[int]
    nbytes: int
    digest: bytes


def pack(chunk: memoryview, block_nbytes: int) -> PackedChunk:
    """Pack a chunk of whole pages in place, to the beginning of its memory.

    A block stays raw unless it shrinks by at least an eighth, because unpacking costs time too.
    """
    compress = _codec().compress
    sizes: list[int] = []
    end = 0
    for start in range(0, len(chunk), block_nbytes):
        block = chunk[start : start + block_nbytes]
        packed: bytes = compress(block, store_size=False)
        shrinks = 8 * len(packed) <= 7 * len(block)
        kept = packed if shrinks else block
        if shrinks or end < start:
            chunk[end : end + len(kept)] = kept
        sizes.append(len(kept))
        end += len(kept)
    nbytes = round_up(end, PAGE_NBYTES)
    chunk[end:nbytes] = bytes(nbytes - end)
    return PackedChunk(sizes, nbytes, digest(chunk[:nbytes]))


def unpack(blocks: memoryview, sizes: Sequence[int], block_nbytes: int) -> None:
    """Unpack in place: the stored blocks lie contiguously at the beginning of ``blocks``, which has
    room for all of them unpacked.

    Raises ValueError if a block does not have its expected size.
    """
    end = sum(sizes)
    stop = len(blocks)
    for size in reversed(sizes):
        if end == stop:
            return  # this block and all earlier ones are stored raw, in place
        start = (stop - 1) // block_nbytes * block_nbytes
        blocks[start:stop] = _unpacked(blocks[end - size : end], stop - start)
        end -= size
        stop = start


def page_of_packed(
    chunk: memoryview, sizes: Sequence[int], nbytes: int, block_nbytes: int
) -> bytes:
    """Return the page of a chunk of ``nbytes``, computed from its stored form. Raises like
    :func:`unpack`."""
    digests: list[bytes] = []
    end = 0
    for size, start in zip(sizes, range(0, nbytes, block_nbytes), strict=True):
        block_size = min(block_nbytes, nbytes - start)
        digests.append(digest(_unpacked(chunk[end : end + size], block_size)))
        end += size
    return b"".join(digests)


def _unpacked(stored: memoryview, nbytes: int) -> memoryview:
    """Return a block of ``nbytes``. Never allocates more, even for malformed input."""
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


def index_nbytes(hashed_nbytes: IntOrArray, chunk_nbytes: int, block_nbytes: int) -> IntOrArray:
    """Return the size of an image's index, or a column of sizes for many images."""
    blocks = ceil_div(hashed_nbytes, block_nbytes)
    chunks = ceil_div(hashed_nbytes, chunk_nbytes)
    return _SIZE.itemsize * blocks + DIGEST_NBYTES * chunks + DIGEST_NBYTES


@dataclass(frozen=True, eq=False)
class Index:
    """Location of the blocks of one image. ``sizes``: (B,) stored size of each block;
    ``digests``: (C, 16) digest of each chunk's stored bytes."""

    hashed_nbytes: int
    chunk_nbytes: int
    block_nbytes: int
    sizes: Ints
    digests: npt.NDArray[np.uint8]

    @cached_property
    def chunk_start(self) -> Ints:
        """(C + 1,): file offset of each chunk, then the end of the last one."""
        firsts = np.arange(0, len(self.sizes), self.chunk_nbytes // self.block_nbytes)
        if len(firsts):
            used = np.add.reduceat(self.sizes, firsts)
        else:
            used = self.sizes
        return np.concatenate([[0], np.cumsum(round_up(used, PAGE_NBYTES))]).astype(np.int64)

    def sizes_of(self, start: int, stop: int) -> list[int]:
        """Return the stored sizes of the blocks that hold [start, stop) of the image."""
        first = start // self.block_nbytes
        last = ceil_div(stop, self.block_nbytes)
        sizes: list[int] = self.sizes[first:last].tolist()
        return sizes

    def begin_of(self, start: int) -> int:
        """Return the file offset of the block that holds byte ``start`` of the image."""
        chunk = start // self.chunk_nbytes
        block_start = start // self.block_nbytes * self.block_nbytes
        before = self.sizes_of(chunk * self.chunk_nbytes, block_start)
        return int(self.chunk_start[chunk]) + sum(before)

    def encode(self) -> bytes:
        body = self.sizes.astype(_SIZE).tobytes() + self.digests.tobytes()
        return body + digest(body)

    @classmethod
    def decode(
        cls, data: bytes | memoryview, hashed_nbytes: int, chunk_nbytes: int, block_nbytes: int
    ) -> Index:
        """Decode the index of an image with these sizes.

        Raises ValueError if the checksum does not match or a block has an impossible size.
        """
        body = memoryview(data)[:-DIGEST_NBYTES]
        if digest(body) != data[-DIGEST_NBYTES:]:
            raise ValueError("it does not match its own checksum")
        blocks = ceil_div(hashed_nbytes, block_nbytes)
        sizes = np.frombuffer(body, _SIZE, blocks).astype(np.int64)
        digests = np.frombuffer(body, np.uint8, offset=blocks * _SIZE.itemsize)
        digests = digests.reshape(-1, DIGEST_NBYTES)
        whole = np.minimum(block_nbytes, hashed_nbytes - block_nbytes * np.arange(blocks))
        if not ((sizes > 0) & (sizes <= whole)).all():
            raise ValueError("a block has an impossible size")
        return cls(hashed_nbytes, chunk_nbytes, block_nbytes, sizes, digests)
