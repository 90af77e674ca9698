"""The layout of an image, field by field."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from holdfast.core import safetensors
from holdfast.planner.box import Box
from holdfast.planner.image import ImageLayout, blocks_of, lay_out, shard_name, shard_names

Shape = tuple[int, ...]
ITEMSIZES = {
    "float32": 4,
    "bfloat16": 2,
    "int64": 8,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "float8_e8m0fnu": 1,
}


def layout_of(shards: Sequence[tuple[str, str, Shape]], **sizes: int) -> ImageLayout:
    """The layout of shards (name, dtype, shape)."""
    ndim = np.array([len(shape) for _, _, shape in shards], dtype=np.int64)
    lengths = np.ones((len(shards), max(ndim, default=1)), dtype=np.int64)
    for row, (_, _, shape) in enumerate(shards):
        lengths[row, : len(shape)] = shape
    dtypes = [dtype for _, dtype, _ in shards]
    itemsize = np.array([ITEMSIZES[dtype] for dtype in dtypes], dtype=np.int64)
    return lay_out([name for name, _, _ in shards], dtypes, lengths, ndim, itemsize, **sizes)


def header_of(layout: ImageLayout) -> dict[str, Any]:
    """The parsed JSON of the header."""
    header: dict[str, Any] = json.loads(layout.header[8:])
    return header


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


def test_pages_first_then_by_itemsize() -> None:
    """Shards of whole pages come first, then wide elements before narrow ones, otherwise in the
    order given."""
    shards = [
        ("a", "bool", (3,)),
        ("b", "bfloat16", (5,)),
        ("c", "float32", (7,)),
        ("d", "bool", (8192,)),
    ]
    shards += [("e", "int64", (2,)), ("f", "float32", (1,)), ("g", "bfloat16", (2048,))]
    layout = layout_of(shards)
    assert layout.order.tolist() == [3, 6, 4, 2, 5, 1, 0]
    sizes = [8192, 4096, 16, 28, 4, 10, 3]
    assert layout.start[layout.order].tolist() == [4096 + sum(sizes[:index]) for index in range(7)]


def test_chunks_and_blocks_cover_the_hashed_part() -> None:
    """Chunks follow on each other up to hashed_end; there is a digest per block."""
    layout = layout_of([("w", "uint8", (100_000,))], chunk_nbytes=65536, block_nbytes=8192)
    assert layout.hashed_end == 106_496
    assert [layout.chunk_range(index) for index in range(layout.chunks)] == [
        (0, 65536),
        (65536, 106_496),
    ]
    assert layout.blocks == 13
    assert layout.nbytes == 106_496 + 13 * 16
    for outside in (-1, 2):
        with pytest.raises(ValueError, match="chunk"):
            layout.chunk_range(outside)


def test_an_image_of_nothing() -> None:
    """A rank without shards still writes a valid image: one page of header and its digest."""
    layout = layout_of([])
    assert (len(layout.start), layout.data_end, layout.hashed_end, layout.nbytes) == (
        0,
        4096,
        4096,
        4112,
    )
    assert list(header_of(layout)) == ["__metadata__", "__holdfast_blocks__"]


def test_dtypes_unknown_to_readers_are_bytes() -> None:
    """A dtype that some readers do not know is written as bytes, with a dimension for the bytes of
    an element."""
    header = header_of(
        layout_of(
            [("c", "complex64", (3, 2)), ("s", "complex64", ()), ("e", "float8_e8m0fnu", (5,))]
        )
    )
    assert {name: (header[name]["dtype"], header[name]["shape"]) for name in "cse"} == {
        "c": ("U8", [3, 2, 8]),
        "s": ("U8", [8]),
        "e": ("U8", [5, 1]),
    }


def test_names_are_made_unique() -> None:
    """Names that repeat, or that the format reserves, are numbered; numbered ones never collide
    either."""
    names = ["a", "a", "a#2", "a", "__metadata__", "__holdfast_blocks__"]
    header = header_of(layout_of([(name, "uint8", (1,)) for name in names]))
    expected = ["a", "a#2", "a#2#2", "a#3", "__metadata__#2", "__holdfast_blocks__#2"]
    assert list(header) == ["__metadata__", *expected, "__holdfast_blocks__"]


def test_names_are_escaped() -> None:
    """Quotes, line breaks and letters of any script come back from the JSON as they were."""
    names = ['say "w"', "line\nbreak", "back\\slash", "κύμα", "comma, and: colon", "\u2028", "😀"]
    layout = layout_of([(name, "uint8", (1,)) for name in names])
    assert list(header_of(layout))[1:-1] == names


def test_too_long_a_header_names_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the header would exceed what readers accept, the data is one tensor and shards lie as
    before."""
    shards = [(f"w{index}", "float32", (5,)) for index in range(200)]
    full = layout_of(shards)
    monkeypatch.setattr(safetensors, "HEADER_NBYTES_MAX", 8000)
    layout = layout_of(shards)
    assert header_of(layout)["data"] == {"dtype": "U8", "shape": [4000], "data_offsets": [0, 4000]}
    assert list(header_of(layout)) == ["__metadata__", "data", "__holdfast_blocks__"]
    assert (layout.start - len(layout.header)).tolist() == (full.start - len(full.header)).tolist()
    assert layout.data_end == len(layout.header) + 4000


@pytest.mark.parametrize("length", range(3500, 4100, 7))
def test_header_and_digests_agree_at_every_size(length: int) -> None:
    """Wherever the header crosses a page, the digests' entry says exactly what follows the data."""
    layout = layout_of([("n" * length, "uint8", (65536 * 9 - 4096,))], block_nbytes=4096)
    end = header_of(layout)["__holdfast_blocks__"]["data_offsets"][1]
    assert len(layout.header) % 4096 == 0
    assert (
        len(layout.header) + end
        == layout.nbytes
        == layout.hashed_end + 16 * (layout.hashed_end // 4096)
    )


@pytest.mark.parametrize(
    ("chunk", "block"), [(65536, 6000), (10000, 8192), (4096, 0), (6144, 2048)]
)
def test_sizes_that_do_not_fit_are_refused(chunk: int, block: int) -> None:
    """A chunk must be a whole number of blocks, a block of pages."""
    with pytest.raises(ValueError, match="blocks"):
        layout_of([], chunk_nbytes=chunk, block_nbytes=block)


def test_shard_names() -> None:
    """A whole tensor keeps its name, a part shows its range; one by one and as columns."""
    shapes = [(4, 6), (4, 6), (), (9,)]
    boxes = [Box((0, 0), (4, 6)), Box((2, 0), (2, 6)), Box((), ()), Box((3,), (1,))]
    names = ["a", "b", "c", "d"]
    expected = ["a", "b[2:4,0:6]", "c", "d[3:4]"]
    assert [shard_name(*row) for row in zip(names, shapes, boxes, strict=True)] == expected
    shape, offsets, lengths = np.ones((4, 2), int), np.zeros((4, 2), int), np.ones((4, 2), int)
    for row, box in enumerate(boxes):
        shape[row, : box.ndim], offsets[row, : box.ndim], lengths[row, : box.ndim] = (
            shapes[row],
            box.offsets,
            box.lengths,
        )
    assert shard_names(names, shape, np.array([2, 2, 0, 1]), offsets, lengths) == expected


def test_blocks_of() -> None:
    """Blocks cover the bytes, the last one short."""
    assert [blocks_of(nbytes, 10) for nbytes in (0, 1, 10, 11)] == [0, 1, 1, 2]
