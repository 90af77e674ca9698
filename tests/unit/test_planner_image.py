"""The layout of an image, field by field."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from holdfast.core import safetensors
from holdfast.planner.image import ImageLayout, lay_out, shard_names

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
    monkeypatch.setattr(safetensors, "HEADER_NBYTES_MAX", 8000)
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
