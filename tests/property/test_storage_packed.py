"""Packed images come back, whatever range of them is read."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.effort import examples
from support.tiny import tiny

from holdfast.drivers.memory import MemoryDriver
from holdfast.planner.image import ImageLayout
from holdfast.storage.format.digest import digest, page_of
from holdfast.storage.format.manifest import MANIFEST_KEY, Manifest
from holdfast.storage.format.packed import Index, pack, page_of_packed, unpack
from holdfast.storage.format.tables import ImageTable
from holdfast.storage.pipeline.image_writer import Packing
from holdfast.storage.pipeline.unpacking import Unpacked

PAGE = 4096


@st.composite
def contents(draw: st.DrawFn, pages_max: int = 24) -> bytes:
    """Draw whole pages of bytes, in runs that shrink to nothing, by half, or not at all."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    runs = draw(
        st.lists(
            st.tuples(st.sampled_from("zhr"), st.integers(1, 3 * PAGE)), min_size=1, max_size=12
        )
    )
    made = b"".join(
        bytes(n)
        if kind == "z"
        else rng.integers(0, 16 if kind == "h" else 256, n, np.uint8).tobytes()
        for kind, n in runs
    )
    return (made + bytes(-len(made) % PAGE))[: pages_max * PAGE]


@examples(60)
@given(content=contents(), pages=st.integers(1, 5))
def test_a_chunk_is_packed_and_unpacked_in_place(content: bytes, pages: int) -> None:
    """A packed chunk takes no more room, ends in zeros, and its page can be computed."""
    block_nbytes, chunk = pages * PAGE, memoryview(bytearray(content))
    page = page_of(chunk, block_nbytes)
    packed = pack(chunk, block_nbytes)
    raw = [
        min(block_nbytes, len(content) - start) for start in range(0, len(content), block_nbytes)
    ]
    used = sum(packed.sizes)
    assert packed.nbytes == -(-used // PAGE) * PAGE <= len(content)
    assert bytes(chunk[used : packed.nbytes]) == bytes(packed.nbytes - used)
    assert packed.digest == digest(chunk[: packed.nbytes])
    assert all(
        size == whole or 8 * size <= 7 * whole
        for size, whole in zip(packed.sizes, raw, strict=True)
    )
    assert page_of_packed(chunk, packed.sizes, len(content), block_nbytes) == page
    chunk[used:] = b"\xff" * (len(content) - used)
    unpack(chunk, packed.sizes, block_nbytes)
    assert bytes(chunk) == content


@functools.cache
def manifest() -> Manifest:
    """Return any manifest, whose images a test replaces."""
    return Manifest.decode(tiny("packed")[MANIFEST_KEY])


class OneImage:
    """One packed image and its reader."""

    def __init__(self, content: bytes, blocks: int, pages: int, order: list[int]) -> None:
        """Pack chunks of ``blocks`` blocks of ``pages`` pages: first those in ``order``."""
        block_nbytes = pages * PAGE
        chunk_nbytes = blocks * block_nbytes
        digests = page_of(memoryview(content), block_nbytes)
        none = np.empty(0, np.int64)
        self.content = content + digests
        sizes = (len(content), len(content), len(self.content), chunk_nbytes, block_nbytes)
        layout = ImageLayout(b"", none, none, *sizes)
        packing, chunks = (
            Packing(layout),
            [bytearray(content[slice(*layout.chunk_range(i))]) for i in range(layout.chunks)],
        )
        in_order = [*(i for i in order if i < layout.chunks), *range(layout.chunks)]
        for i in dict.fromkeys(in_order):
            packing.pack(i, memoryview(chunks[i]))
        stored = bytearray()
        for i, chunk in enumerate(chunks):
            start, nbytes = packing.place(i)
            assert (start % PAGE, start) == (0, len(stored))
            stored += chunk[:nbytes]
        self.stored = bytes(stored + digests + packing.index())
        assert len(self.stored) <= packing.nbytes_max
        images = ImageTable(
            np.array([0]),
            np.array([len(content)]),
            np.zeros((layout.chunks, 16), np.uint8),
            np.array([len(self.stored)]),
        )
        self.manifest = replace(
            manifest(),
            images=images,
            chunk_nbytes=chunk_nbytes,
            block_nbytes=block_nbytes,
            compression="lz4",
        )
        self.storage = MemoryDriver()
        self.key = self.manifest.image_key(0)

    async def reader(self) -> Unpacked:
        await self.storage.put(self.key, self.stored)
        return Unpacked(self.storage, self.manifest)


@examples(60)
@given(
    content=contents(),
    blocks=st.integers(1, 4),
    pages=st.integers(1, 3),
    order=st.permutations(range(8)),
    data=st.data(),
)
def test_any_range_of_a_packed_image_can_be_read(
    content: bytes, blocks: int, pages: int, order: list[int], data: st.DataObject
) -> None:
    """A range may begin anywhere, and cross blocks, chunks and final pages. The index survives."""
    image = OneImage(content, blocks, pages, order)
    ends = st.integers(0, len(image.content))
    ranges = [
        (0, len(image.content)),
        *(sorted((data.draw(ends), data.draw(ends))) for _ in range(4)),
    ]

    async def read() -> None:
        reader = await image.reader()
        for start, stop in ranges:
            assert (
                bytes(await reader.fetch(image.key, start, stop - start))
                == image.content[start:stop]
            )
        index = await reader.index(0)
        geometry = (len(content), blocks * pages * PAGE, pages * PAGE)
        assert Index.decode(index.encode(), *geometry).encode() == index.encode()
        assert image.stored.endswith(index.encode())

    asyncio.run(read())


def test_what_does_not_shrink_is_stored_as_it_is(rng: np.random.Generator) -> None:
    """For random bytes, the file is the image, followed by the index."""
    content = rng.integers(0, 256, 20 * PAGE, np.uint8).tobytes()
    image = OneImage(content, 3, 2, [])
    assert image.stored[: len(image.content)] == image.content


@pytest.mark.parametrize("nbytes", [PAGE, 20 * PAGE])
def test_zeros_take_a_page_for_each_chunk(nbytes: int) -> None:
    """They take no more than that."""
    image = OneImage(bytes(nbytes), 5, 1, [])
    chunks = -(-nbytes // (5 * PAGE))
    assert len(image.stored) == chunks * PAGE + nbytes // PAGE * (16 + 4) + chunks * 16 + 16
