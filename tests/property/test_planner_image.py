"""Images, read back with the safetensors library."""

import json
import math

import numpy as np
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.planner.image import BLOCKS_NAME, DIGEST_NBYTES, PAGE_NBYTES, lay_out

DTYPES = ["bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2", "int16", "uint16", "float16", "bfloat16"]
DTYPES += ["int32", "uint32", "float32", "float64", "int64", "uint64", "complex64", "complex128", "float8_e8m0fnu"]
AS_BYTES = {"complex64", "complex128", "float8_e8m0fnu"}

SHARDS = st.tuples(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(["a", "b", BLOCKS_NAME]),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 9) | st.sampled_from([64, 1024]), max_size=3).filter(lambda shape: math.prod(shape) < 1e5),
)


def laid_out(shards):
    """The layout of the shards, their torch dtypes, and bytes of each."""
    dtypes = [getattr(torch, dtype) for _, dtype, _ in shards]
    itemsize = np.array([dtype.itemsize for dtype in dtypes], dtype=np.int64)
    lengths = np.array([[*shape, *[1] * (3 - len(shape))] for *_, shape in shards], dtype=np.int64).reshape(-1, 3)
    ndim = np.array([len(shape) for *_, shape in shards], dtype=np.int64)
    names = [name for name, _, _ in shards]
    layout = lay_out(names, [dtype for _, dtype, _ in shards], lengths, ndim, itemsize, block_nbytes=4096)
    return layout, dtypes, itemsize, lengths.prod(axis=1) * itemsize


@settings(deadline=None, max_examples=120)
@given(st.lists(SHARDS, max_size=12), st.integers(0, 1000))
def test_safetensors_reads_the_image(shards, seed):
    """Header, data at ``start`` and digests are a valid safetensors file with every shard's dtype, shape and bytes."""
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


@settings(deadline=None, max_examples=120)
@given(st.lists(SHARDS, max_size=12))
def test_shards_are_aligned_and_leave_no_holes(shards):
    """Every shard starts at a multiple of its itemsize, shards of whole pages at pages, one right after the other."""
    layout, _, itemsize, nbytes = laid_out(shards)
    assert (layout.start % itemsize == 0).all()
    assert (layout.start[nbytes % PAGE_NBYTES == 0] % PAGE_NBYTES == 0).all()
    ends = len(layout.header) + np.cumsum(nbytes[layout.order])
    assert (layout.start + nbytes)[layout.order].tolist() == ends.tolist()
    assert layout.data_end == (ends[-1] if shards else len(layout.header))
    assert layout.hashed_end % PAGE_NBYTES == len(layout.header) % PAGE_NBYTES == 0
    assert 0 <= layout.hashed_end - layout.data_end < PAGE_NBYTES
    assert layout.nbytes == layout.hashed_end + DIGEST_NBYTES * layout.blocks
