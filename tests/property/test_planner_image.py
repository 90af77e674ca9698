"""The layout of an image: field by field, and read back with the safetensors library."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.effort import examples

from holdfast.core import safetensors as headers
from holdfast.planner.columns import Ints
from holdfast.planner.image import (
    BLOCKS_NAME,
    DIGEST_NBYTES,
    PAGE_NBYTES,
    ImageLayout,
    lay_out,
    shard_names,
)
from holdfast.storage.format.tables import ImageTable

Shard = tuple[str, str, Sequence[int]]
"""Name, dtype and shape."""
AS_BYTES = ("complex64", "complex128", "float8_e8m0fnu")
DTYPES = [*headers.DTYPES, *AS_BYTES]

SHARDS = st.tuples(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | st.sampled_from(["a", "b", BLOCKS_NAME]),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 9) | st.sampled_from([64, 1024]), max_size=3).filter(
        lambda shape: math.prod(shape) < 1e5
    ),
)


def laid_out(
    shards: Sequence[Shard], **sizes: int
) -> tuple[ImageLayout, list[torch.dtype], Ints, Ints]:
    """Return the layout of the shards, their torch dtypes, and the bytes per element and shard."""
    dtypes = [getattr(torch, dtype) for _, dtype, _ in shards]
    itemsize = np.array([dtype.itemsize for dtype in dtypes], dtype=np.int64)
    lengths = np.array(
        [[*shape, *[1] * (3 - len(shape))] for *_, shape in shards], dtype=np.int64
    ).reshape(-1, 3)
    ndim = np.array([len(shape) for *_, shape in shards], dtype=np.int64)
    names = [name for name, _, _ in shards]
    layout = lay_out(names, [dtype for _, dtype, _ in shards], lengths, ndim, itemsize, **sizes)
    return layout, dtypes, itemsize, lengths.prod(axis=1) * itemsize


def layout_of(shards: Sequence[Shard], **sizes: int) -> ImageLayout:
    """Return only the layout."""
    return laid_out(shards, **sizes)[0]


def header_of(layout: ImageLayout) -> dict[str, Any]:
    """Return the parsed JSON of the header."""
    header: dict[str, Any] = json.loads(layout.header[8:])
    return header


@examples(120)
@given(st.lists(SHARDS, max_size=12), st.integers(0, 1000))
def test_safetensors_reads_the_image(shards: list[Shard], seed: int) -> None:
    """An image is a valid safetensors file with every shard's dtype, shape and bytes."""
    layout, dtypes, itemsize, nbytes = laid_out(shards, block_nbytes=4096)
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
@example([("bytes", "uint8", [9]), ("a number", "float64", [1])])
def test_shards_are_aligned_and_leave_no_holes(shards: list[Shard]) -> None:
    """Shards are adjacent and aligned to their elements; whole pages are aligned to pages."""
    layout, _, itemsize, nbytes = laid_out(shards, block_nbytes=4096)
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
    layout, *_ = laid_out(shards, chunk_nbytes=chunk_nbytes, block_nbytes=block_nbytes)
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


def test_header_of_one_tensor() -> None:
    """The header says format, tensor and digests; it fills whole pages and knows its own length."""
    layout = layout_of([("w", "float32", (3, 2))])
    assert header_of(layout) == {
        "__metadata__": {"format": "pt", "holdfast": "image/1"},
        "w": {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24]},
        "__holdfast_blocks__": {
            "dtype": "U8",
            "shape": [4072 + 16],
            "data_offsets": [24, 4096 + 16],
        },
    }
    assert struct.unpack("<Q", layout.header[:8]) == (len(layout.header) - 8,)
    assert len(layout.header) == 4096
    assert layout.start.tolist() == [4096]
    assert (layout.data_end, layout.hashed_end, layout.nbytes) == (4120, 8192, 8208)


def test_names_are_made_unique() -> None:
    """Repeated and reserved names are numbered; numbered ones do not collide either."""
    names = ["a", "a", "a#2", "a", "__metadata__", "__holdfast_blocks__"]
    header = header_of(layout_of([(name, "uint8", (1,)) for name in names]))
    expected = ["a", "a#2", "a#2#2", "a#3", "__metadata__#2", "__holdfast_blocks__#2"]
    assert list(header) == ["__metadata__", *expected, "__holdfast_blocks__"]


def test_too_long_a_header_names_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A header that readers would not accept names one tensor; shards lie as before."""
    shards = [(f"w{index}", "float32", (5,)) for index in range(200)]
    full = layout_of(shards)
    monkeypatch.setattr(headers, "HEADER_NBYTES_MAX", 8000)
    layout = layout_of(shards)
    assert header_of(layout)["data"] == {"dtype": "U8", "shape": [4000], "data_offsets": [0, 4000]}
    assert list(header_of(layout)) == ["__metadata__", "data", "__holdfast_blocks__"]
    assert (layout.start - len(layout.header)).tolist() == (full.start - len(full.header)).tolist()
    assert layout.data_end == len(layout.header) + 4000


def test_header_and_digests_agree_at_every_size() -> None:
    """Wherever the header crosses a page, the digests' entry covers exactly what follows."""
    for length in range(3500, 4100, 20):
        layout = layout_of([("n" * length, "uint8", (65536 * 9 - 4096,))], block_nbytes=4096)
        end = header_of(layout)["__holdfast_blocks__"]["data_offsets"][1]
        assert len(layout.header) % 4096 == 0
        assert len(layout.header) + end == layout.nbytes
        assert layout.nbytes == layout.hashed_end + 16 * (layout.hashed_end // 4096)


def test_shard_names() -> None:
    """A whole tensor keeps its name; a part shows its range."""
    shape = np.array([[4, 6], [4, 6], [1, 1], [9, 1]])
    offsets = np.array([[0, 0], [2, 0], [0, 0], [3, 0]])
    lengths = np.array([[4, 6], [2, 6], [1, 1], [1, 1]])
    names = shard_names("abcd", shape, np.array([2, 2, 0, 1]), offsets, lengths)
    assert names == ["a", "b[2:4,0:6]", "c", "d[3:4]"]


@pytest.mark.parametrize(
    ("chunk", "block"), [(65536, 6000), (10000, 8192), (4096, 0), (6144, 2048)]
)
def test_sizes_that_do_not_fit_are_refused(chunk: int, block: int) -> None:
    """A chunk must be a whole number of blocks, a block of pages."""
    with pytest.raises(ValueError, match="blocks"):
        layout_of([], chunk_nbytes=chunk, block_nbytes=block)
