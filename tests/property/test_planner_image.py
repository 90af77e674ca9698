"""Images, read back with the safetensors library."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.effort import examples

from holdfast.planner.columns import Ints
from holdfast.planner.image import BLOCKS_NAME, DIGEST_NBYTES, PAGE_NBYTES, ImageLayout, lay_out
from holdfast.storage.format.tables import ImageTable

Shard = tuple[str, str, list[int]]
"""Name, dtype and shape."""
DTYPES = [
    "bool",
    "uint8",
    "int8",
    "float8_e4m3fn",
    "float8_e5m2",
    "int16",
    "uint16",
    "float16",
    "bfloat16",
]
DTYPES += [
    "int32",
    "uint32",
    "float32",
    "float64",
    "int64",
    "uint64",
    "complex64",
    "complex128",
    "float8_e8m0fnu",
]
AS_BYTES = {"complex64", "complex128", "float8_e8m0fnu"}

SHARDS = st.tuples(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | st.sampled_from(["a", "b", BLOCKS_NAME]),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 9) | st.sampled_from([64, 1024]), max_size=3).filter(
        lambda shape: math.prod(shape) < 1e5
    ),
)


def laid_out(
    shards: Sequence[Shard], chunk_nbytes: int = 1 << 24, block_nbytes: int = 4096
) -> tuple[ImageLayout, list[torch.dtype], Ints, Ints]:
    """The layout of the shards, their torch dtypes, and the bytes of an element and of all of each."""
    dtypes = [getattr(torch, dtype) for _, dtype, _ in shards]
    itemsize = np.array([dtype.itemsize for dtype in dtypes], dtype=np.int64)
    lengths = np.array(
        [[*shape, *[1] * (3 - len(shape))] for *_, shape in shards], dtype=np.int64
    ).reshape(-1, 3)
    ndim = np.array([len(shape) for *_, shape in shards], dtype=np.int64)
    names = [name for name, _, _ in shards]
    sizes = {"chunk_nbytes": chunk_nbytes, "block_nbytes": block_nbytes}
    layout = lay_out(names, [dtype for _, dtype, _ in shards], lengths, ndim, itemsize, **sizes)
    return layout, dtypes, itemsize, lengths.prod(axis=1) * itemsize


@examples(120)
@given(st.lists(SHARDS, max_size=12), st.integers(0, 1000))
def test_safetensors_reads_the_image(shards: list[Shard], seed: int) -> None:
    """An image is a valid safetensors file with every shard's dtype, shape and bytes."""
    layout, dtypes, itemsize, nbytes = laid_out(shards)
    rng = np.random.default_rng(seed)
    file = bytearray(layout.nbytes)
    file[: len(layout.header)] = layout.header
    # Bytes of 0 and 1 are values of every dtype, bool too.
    data = [rng.integers(0, 2, size, dtype=np.uint8).tobytes() for size in nbytes.tolist()]
    for start, content in zip(layout.start.tolist(), data, strict=True):
        file[start : start + len(content)] = content
    file[layout.hashed_end :] = digests = rng.bytes(DIGEST_NBYTES * layout.blocks)

    read = safetensors.torch.load(bytes(file))
    *names, blocks = list(json.loads(layout.header[8:]))[1:]
    assert read.keys() == {*names, BLOCKS_NAME}
    assert read[blocks].numpy().tobytes() == bytes(layout.hashed_end - layout.data_end) + digests
    for unique, row in zip(names, layout.order.tolist(), strict=True):
        name, dtype, shape = shards[row]
        tensor, extra = read[unique], [int(itemsize[row])] if dtype in AS_BYTES else []
        assert unique.startswith(name)
        assert list(tensor.shape) == shape + extra
        assert tensor.dtype == (torch.uint8 if extra else dtypes[row])
        assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == data[row]


@examples(120)
@given(st.lists(SHARDS, max_size=12))
def test_shards_are_aligned_and_leave_no_holes(shards: list[Shard]) -> None:
    """Shards are adjacent and aligned to their elements; those of whole pages to pages."""
    layout, _, itemsize, nbytes = laid_out(shards)
    assert (layout.start % itemsize == 0).all()
    assert (layout.start[nbytes % PAGE_NBYTES == 0] % PAGE_NBYTES == 0).all()
    ends = len(layout.header) + np.cumsum(nbytes[layout.order])
    assert (layout.start + nbytes)[layout.order].tolist() == ends.tolist()
    assert layout.data_end == (ends[-1] if shards else len(layout.header))
    assert layout.hashed_end % PAGE_NBYTES == len(layout.header) % PAGE_NBYTES == 0
    assert 0 <= layout.hashed_end - layout.data_end < PAGE_NBYTES
    assert layout.nbytes == layout.hashed_end + DIGEST_NBYTES * layout.blocks


@examples(120)
@given(
    st.lists(SHARDS, max_size=12), st.sampled_from([4096, 8192, 65536]), st.sampled_from([1, 2, 5])
)
def test_chunks_and_blocks_cover_what_is_hashed(
    shards: list[Shard], block_nbytes: int, blocks: int
) -> None:
    """Whole chunks of whole blocks cover the hashed part; each block has a digest."""
    chunk_nbytes = block_nbytes * blocks
    layout, *_ = laid_out(shards, chunk_nbytes, block_nbytes)
    ranges = [layout.chunk_range(index) for index in range(layout.chunks)]
    assert [edge for pair in ranges for edge in pair][1:-1:2] == [start for start, _ in ranges[1:]]
    assert (ranges[0][0], ranges[-1][1]) == (0, layout.hashed_end)
    assert all(stop - start == chunk_nbytes for start, stop in ranges[:-1])
    assert 0 < ranges[-1][1] - ranges[-1][0] <= chunk_nbytes
    assert sum(-(-(stop - start) // block_nbytes) for start, stop in ranges) == layout.blocks
    assert layout.nbytes - layout.hashed_end == DIGEST_NBYTES * layout.blocks
    hashed = np.array([layout.hashed_end])
    table = ImageTable(
        np.zeros(1, np.int64), hashed, np.zeros((layout.chunks, DIGEST_NBYTES), np.uint8)
    )
    assert table.chunks(chunk_nbytes).tolist() == [layout.chunks]
    assert table.nbytes(block_nbytes).tolist() == [layout.nbytes]
    for index in (-1, layout.chunks):
        with pytest.raises(ValueError, match="chunk"):
            layout.chunk_range(index)
