"""Images, read back with the safetensors library."""

import math

import numpy as np
import safetensors.torch
import torch
from holdfast.planner.image import BLOCKS_NAME, DIGEST_NBYTES, PAGE_NBYTES, lay_out
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = ["bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2", "int16", "uint16", "float16", "bfloat16"]
DTYPES += ["int32", "uint32", "float32", "float64", "int64", "uint64", "complex64", "complex128", "float8_e8m0fnu"]
AS_BYTES = {"complex64", "complex128", "float8_e8m0fnu"}

SHARDS = st.tuples(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(["a", "b", BLOCKS_NAME]),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 9) | st.sampled_from([64, 1024]), max_size=3).filter(lambda shape: math.prod(shape) < 1e5),
)


def random_bytes(rng, dtype, nbytes):
    """Bytes that are values of the dtype."""
    return rng.integers(0, 2 if dtype == "bool" else 256, nbytes, dtype=np.uint8).tobytes()


@settings(deadline=None, max_examples=120)
@given(st.lists(SHARDS, max_size=12), st.integers(0, 1000))
def test_safetensors_reads_the_image(shards, seed):
    """Header, data at ``start`` and digests are a valid safetensors file with every shard's dtype, shape and bytes."""
    dtypes = [getattr(torch, dtype) for _, dtype, _ in shards]
    itemsize = np.array([dtype.itemsize for dtype in dtypes], dtype=np.int64)
    lengths = np.array([[*shape, *[1] * (3 - len(shape))] for *_, shape in shards], dtype=np.int64).reshape(-1, 3)
    ndim = np.array([len(shape) for *_, shape in shards], dtype=np.int64)
    names = [name for name, _, _ in shards]
    layout = lay_out(names, [dtype for _, dtype, _ in shards], lengths, ndim, itemsize, block_nbytes=4096)

    rng = np.random.default_rng(seed)
    file = bytearray(layout.nbytes)
    file[: len(layout.header)] = layout.header
    data = [random_bytes(rng, dtype, math.prod(shape) * size) for (_, dtype, shape), size in zip(shards, itemsize)]
    for start, content in zip(layout.start.tolist(), data, strict=True):
        file[start : start + len(content)] = content
    file[layout.hashed_end :] = digests = rng.bytes(DIGEST_NBYTES * layout.blocks)

    read = safetensors.torch.load(bytes(file))
    blocks = read.pop(BLOCKS_NAME)
    assert blocks.numpy().tobytes() == bytes(layout.hashed_end - layout.data_end) + digests
    # Entries are in the order of the file; safetensors hands them out by name, so they are matched by it.
    assert len(read) == len(shards)
    for index, row in enumerate(layout.order.tolist()):
        name, dtype, shape = shards[row]
        tensor = read[name] if names.count(name) == 1 and name != BLOCKS_NAME and name in read else None
        if tensor is not None:
            extra = [int(itemsize[row])] if dtype in AS_BYTES else []
            assert list(tensor.shape) == shape + extra
            assert tensor.dtype == (torch.uint8 if extra else dtypes[row])
            assert tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() == data[row]
        assert index == 0 or layout.start[row] >= layout.start[layout.order[index - 1]]


@settings(deadline=None, max_examples=120)
@given(st.lists(SHARDS, max_size=12))
def test_shards_are_aligned_and_leave_no_holes(shards):
    """Every shard starts at a multiple of its itemsize, shards of whole pages at pages, one right after the other."""
    itemsize = np.array([getattr(torch, dtype).itemsize for _, dtype, _ in shards], dtype=np.int64)
    lengths = np.array([[*shape, *[1] * (3 - len(shape))] for *_, shape in shards], dtype=np.int64).reshape(-1, 3)
    ndim = np.full(len(shards), 3)
    layout = lay_out([name for name, _, _ in shards], [dtype for _, dtype, _ in shards], lengths, ndim, itemsize)
    nbytes = lengths.prod(axis=1) * itemsize
    assert (layout.start % itemsize == 0).all()
    assert (layout.start[nbytes % PAGE_NBYTES == 0] % PAGE_NBYTES == 0).all()
    ends = len(layout.header) + np.cumsum(nbytes[layout.order])
    assert (layout.start + nbytes)[layout.order].tolist() == ends.tolist()
    assert layout.data_end == (ends[-1] if len(shards) else len(layout.header))
    assert layout.hashed_end % PAGE_NBYTES == len(layout.header) % PAGE_NBYTES == 0
    assert 0 <= layout.hashed_end - layout.data_end < PAGE_NBYTES
    assert layout.nbytes == layout.hashed_end + DIGEST_NBYTES * layout.blocks
