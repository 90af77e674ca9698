"""The layout of an image: a safetensors file that ends with the digests of its blocks.

    0             header: 8 bytes length, JSON, padded with spaces to a multiple of 4096
    header end    tensors, without holes: first those of whole pages, then by itemsize, so that
                  each is aligned to its elements, and large ones to pages
    data_end      zeros up to
    hashed_end    a 16-byte xxh3-128 digest of each block of [0, hashed_end), in order
    nbytes        end of file

To a safetensors reader, everything after ``data_end`` is one more tensor, ``__holdfast_blocks__``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..core import safetensors
from ..core.units import ceil_div, round_up
from .columns import Ints, volumes

CHUNK_NBYTES = 16 << 20
BLOCK_NBYTES = 64 << 10
PAGE_NBYTES = 4096
DIGEST_NBYTES = 16
BLOCKS_NAME = "__holdfast_blocks__"


@dataclass(frozen=True, eq=False)
class ImageLayout:
    """The positions of the n shards of an image. All offsets and sizes are bytes of the image's
    file.

    ``header``       the file's first bytes, a multiple of 4096; tensor data starts right behind
    ``start``        (n,) offset of each shard, in the given order
    ``order``        (n,) shards by ascending ``start``
    ``data_end``     end of the last shard
    ``hashed_end``   ``data_end`` rounded up to 4096; blocks and chunks cover [0, hashed_end)
    ``nbytes``       size of the file
    """

    header: bytes
    start: Ints
    order: Ints
    data_end: int
    hashed_end: int
    nbytes: int
    chunk_nbytes: int = CHUNK_NBYTES
    block_nbytes: int = BLOCK_NBYTES

    @classmethod
    def of_sizes(
        cls, hashed_end: int, nbytes: int, chunk_nbytes: int, block_nbytes: int
    ) -> ImageLayout:
        """Return the layout of an image whose contents are unknown: one that is in memory."""
        no_shards = np.zeros(1, np.int64)
        return cls(
            *(b"", no_shards, no_shards, hashed_end, hashed_end, nbytes), chunk_nbytes, block_nbytes
        )

    @property
    def chunks(self) -> int:
        """Number of chunks; the last may be short."""
        return ceil_div(self.hashed_end, self.chunk_nbytes)

    @property
    def blocks(self) -> int:
        """Number of blocks, and so of digests; the last may be short."""
        return ceil_div(self.hashed_end, self.block_nbytes)

    def chunk_range(self, index: int) -> tuple[int, int]:
        """Return ``(start, stop)`` of a chunk. Raises ValueError if there is no such chunk."""
        if not 0 <= index < self.chunks:
            raise ValueError(f"chunk {index} of an image of {self.chunks}")
        return index * self.chunk_nbytes, min((index + 1) * self.chunk_nbytes, self.hashed_end)


def shard_names(
    fqns: Sequence[str], shape: Ints, ndim: Ints, offsets: Ints, lengths: Ints
) -> list[str]:
    """Return the names of n shards in their images, from columns (n,) and, padded, (n, D).

    That is the tensor's name for a whole tensor, otherwise a text like ``wq[0:128,0:4096]``.
    """
    names = list(fqns)
    for row in np.flatnonzero((lengths != shape).any(axis=1)).tolist():
        dims = slice(int(ndim[row]))
        ranges = zip(offsets[row, dims].tolist(), lengths[row, dims].tolist(), strict=True)
        names[row] += f"[{','.join(f'{offset}:{offset + length}' for offset, length in ranges)}]"
    return names


def lay_out(
    names: Sequence[str],
    dtypes: Sequence[str],
    lengths: Ints,
    ndim: Ints,
    itemsize: Ints,
    *,
    chunk_nbytes: int = CHUNK_NBYTES,
    block_nbytes: int = BLOCK_NBYTES,
) -> ImageLayout:
    """Lay out an image of n shards.

    The shards are given by name, torch's name of the dtype, (n, D) padded lengths, (n,) number of
    dimensions and (n,) bytes per element, a power of two.

    Reserved names and repeated names get ``#2``, ``#3`` and so on appended. A dtype unknown to
    safetensors is written as bytes, with an extra dimension of ``itemsize``. If the header would be
    longer than readers accept, it names a single tensor "data" instead. Raises ValueError unless
    chunks are a whole number of blocks, and blocks of pages.
    """
    if (
        min(chunk_nbytes, block_nbytes) < 1
        or chunk_nbytes % block_nbytes
        or block_nbytes % PAGE_NBYTES
    ):
        raise ValueError(
            f"chunks of {chunk_nbytes} bytes in blocks of {block_nbytes} in pages of {PAGE_NBYTES}"
        )
    nbytes = volumes(lengths) * itemsize
    order = np.argsort(
        np.where(nbytes % PAGE_NBYTES == 0, np.iinfo(np.int64).min, -itemsize), kind="stable"
    )
    stop = np.empty_like(nbytes)
    stop[order] = np.cumsum(nbytes[order])
    start = stop - nbytes
    data_nbytes = int(nbytes.sum())
    entries = _entries(_unique(names), dtypes, lengths, ndim, itemsize, start, stop)
    header = _header([entries[row] for row in order.tolist()], data_nbytes, block_nbytes)
    if len(header) - 8 > safetensors.HEADER_NBYTES_MAX:
        whole = [
            f'"data":{{"dtype":"U8","shape":[{data_nbytes}],"data_offsets":[0,{data_nbytes}]}}'
        ]
        header = _header(whole, data_nbytes, block_nbytes)
    data_end = len(header) + data_nbytes
    hashed_end = round_up(data_end, PAGE_NBYTES)
    size = hashed_end + DIGEST_NBYTES * ceil_div(hashed_end, block_nbytes)
    return ImageLayout(
        header, start + len(header), order, data_end, hashed_end, size, chunk_nbytes, block_nbytes
    )


def _unique(names: Sequence[str]) -> list[str]:
    """Return the names, with a number appended to each reserved or repeated one."""
    taken = {"__metadata__", BLOCKS_NAME}
    if len(taken.union(names)) == len(taken) + len(names):
        return list(names)
    result = []
    counts = dict.fromkeys(taken, 1)
    for name in names:
        unique = name
        while unique in counts:
            counts[name] += 1
            unique = f"{name}#{counts[name]}"
        counts[unique] = 1
        result.append(unique)
    return result


def _entries(
    names: Sequence[str],
    dtypes: Sequence[str],
    lengths: Ints,
    ndim: Ints,
    itemsize: Ints,
    start: Ints,
    stop: Ints,
) -> list[str]:
    kinds = list(
        zip(dtypes, ndim.tolist(), itemsize.tolist(), map(tuple, lengths.tolist()), strict=True)
    )
    known = {kind: _fragment(*kind) for kind in set(kinds)}
    columns = zip(safetensors.quoted(names), kinds, start.tolist(), stop.tolist(), strict=True)
    return [f"{name}:{known[kind]}[{begin},{end}]}}" for name, kind, begin, end in columns]


def _fragment(dtype: str, ndim: int, itemsize: int, lengths: tuple[int, ...]) -> str:
    """Return the common part of the entries of all shards of one dtype and shape."""
    code = safetensors.DTYPES.get(dtype)
    if code is None:
        return safetensors.entry_prefix("U8", (*lengths[:ndim], itemsize))
    return safetensors.entry_prefix(code, lengths[:ndim])


def _header(entries: Sequence[str], data_nbytes: int, block_nbytes: int) -> bytes:
    """Return the header of an image with these entries, followed by the digests' own."""
    text = ",".join(('{"__metadata__":{"format":"pt","holdfast":"image/1"}', *entries))
    size = PAGE_NBYTES
    while True:
        # The header's size determines the number of blocks, which is part of the header: grow until
        # both agree.
        hashed_end = round_up(size + data_nbytes, PAGE_NBYTES)
        end = hashed_end - size + DIGEST_NBYTES * ceil_div(hashed_end, block_nbytes)
        digests = safetensors.entry("U8", (end - data_nbytes,), data_nbytes, end)
        tail = f',"{BLOCKS_NAME}":{digests}}}'
        needed = safetensors.framed_nbytes(len(text) + len(tail), PAGE_NBYTES)
        if needed <= size:
            return safetensors.framed((text + tail).encode("ascii"), size)
        size = needed
