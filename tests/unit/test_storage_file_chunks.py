"""Chunks of an image that are read from files: every byte is where the image has it, in few requests."""

from __future__ import annotations

import asyncio
import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.drivers.contract import Buffer
from holdfast.drivers.memory import MemoryDriver
from holdfast.planner.image import PAGE_NBYTES, ImageLayout, lay_out
from holdfast.storage.pipeline.file_chunks import Enclosed, FileChunks, Stretch

CHUNK_NBYTES = 16 * PAGE_NBYTES


class Counting(MemoryDriver):
    """Records the starts and sizes of reads."""

    def __init__(self, gap_nbytes: int, align_nbytes: int = 1) -> None:
        super().__init__()
        self.traits = dataclasses.replace(
            self.traits, coalesce_nbytes=gap_nbytes, align_nbytes=align_nbytes
        )
        self.starts: list[int] = []
        self.sizes: list[int] = []

    async def read(self, key: str, start: int, into: Buffer) -> None:
        self.starts.append(start)
        self.sizes.append(len(memoryview(into)))
        await super().read(key, start, into)


def layout_of(sizes: list[int]) -> ImageLayout:
    """An image of tensors of bytes."""
    count = len(sizes)
    return lay_out(
        [f"t{number}" for number in range(count)],
        ["uint8"] * count,
        np.array(sizes, np.int64).reshape(-1, 1),
        np.ones(count, np.int64),
        np.ones(count, np.int64),
        chunk_nbytes=CHUNK_NBYTES,
        block_nbytes=PAGE_NBYTES,
    )


async def nothing() -> None:
    """No check."""


async def image_of(layout: ImageLayout, chunks: FileChunks) -> bytes:
    """All chunks, which are taken at the same time."""
    buffers = await asyncio.gather(*map(chunks.take, range(layout.chunks)))
    image = bytearray()
    for chunk, buffer in enumerate(buffers):
        image += buffer.view[: len(range(*layout.chunk_range(chunk)))]
        chunks.pool.give(buffer)
    return bytes(image)


def begin_of(content: memoryview) -> int:
    """Where the bytes are that are enclosed: their first byte says how many are before them."""
    return 1 + content[0]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([0, 10, 1 << 20]),
    st.sampled_from([1, 4096]),
    st.floats(0, 1),
)
def test_every_byte_is_where_the_image_has_it(
    seed: int, gap_nbytes: int, align_nbytes: int, enclosed: float
) -> None:
    """Tensors may lie anywhere in any files, at positions known before or after the read."""
    rnd = random.Random(seed)
    sizes = [rnd.choice([1, 7, 300, 5000, 40_000]) for _ in range(rnd.randint(1, 40))]
    contents = [rnd.randbytes(nbytes) for nbytes in sizes]
    files = {f"f{number}": bytearray() for number in range(rnd.randint(1, 3))}
    places: dict[int, tuple[Stretch | Enclosed, int, int]] = {}
    for number in rnd.sample(range(len(sizes)), len(sizes)):
        key = rnd.choice(list(files))
        file = files[key]
        file += rnd.randbytes(rnd.choice([0, 0, 5, 500]))
        start = len(file)
        before = rnd.randint(0, 255)
        skip = rnd.randint(0, 9)
        if rnd.random() < enclosed:
            file += bytes([before]) + rnd.randbytes(before + skip)
            where = Stretch(key, start, len(file) - start + sizes[number] + 3)
            place = Enclosed(where, sizes[number], skip, begin_of)
            places[number] = (place, 0, sizes[number])
            file += contents[number] + bytes(3)
        else:
            file += rnd.randbytes(skip) + contents[number]
            places[number] = (Stretch(key, start, skip + sizes[number]), skip, sizes[number])
    driver = Counting(gap_nbytes, align_nbytes)
    layout = layout_of(sizes)
    in_order = [places[number] for number in range(len(sizes))]
    for key, file in files.items():
        asyncio.run(driver.put(key, bytes(file)))
    image = asyncio.run(image_of(layout, FileChunks(layout, driver, in_order, nothing)))
    for number, start in enumerate(layout.start.tolist()):
        assert image[start : start + sizes[number]] == contents[number]
    assert max(driver.sizes) <= CHUNK_NBYTES


def test_small_parts_that_are_close_together_are_one_read() -> None:
    """Also where something else is between them; what is further away is another one."""
    sizes = [100] * 50
    layout = layout_of(sizes)
    for distance, reads in [(110, 1), (200, 50)]:
        driver = Counting(gap_nbytes=50)
        asyncio.run(driver.put("f", bytes(50 * distance)))
        places = [(Stretch("f", distance * number, 100), 0, 100) for number in range(50)]
        asyncio.run(image_of(layout, FileChunks(layout, driver, places, nothing)))
        assert len(driver.sizes) == reads


def test_what_is_copied_is_read_from_a_boundary_on() -> None:
    """Reads that are copied begin at a boundary; contiguous parts are read directly."""
    driver = Counting(0, 4096)
    asyncio.run(driver.put("f", bytes(50_000)))
    layout = layout_of([100, 200, 300])
    apart = [(Stretch("f", 10_000 * number, 300), 0, 100 * number) for number in (1, 2, 3)]
    asyncio.run(image_of(layout, FileChunks(layout, driver, apart, nothing)))
    assert driver.starts == [10_000, 20_000, 30_000]
    driver.starts.clear()
    close = [(Stretch("f", at, nbytes), 0, nbytes) for at, nbytes in [(9000, 100), (8800, 200)]]
    layout = layout_of([100, 200])
    asyncio.run(image_of(layout, FileChunks(layout, driver, close, nothing)))
    assert (driver.starts, driver.sizes[-1]) == ([8192], 9100 - 8192)
    connected = [(Stretch("f", at, nbytes), 0, nbytes) for at, nbytes in [(8800, 200), (9000, 100)]]
    layout = layout_of([200, 100])
    asyncio.run(image_of(layout, FileChunks(layout, driver, connected, nothing)))
    assert (driver.starts[-1], driver.sizes[-1]) == (8800, 300)


def test_what_is_found_to_be_wrong_is_raised() -> None:
    """In the place of the chunk."""

    def wrong(content: memoryview) -> int:
        raise LookupError(len(content))

    driver = Counting(0)
    asyncio.run(driver.put("f", bytes(100)))
    layout = layout_of([10])
    place = Enclosed(Stretch("f", 20, 70), 10, 0, wrong)
    with pytest.raises(LookupError, match="70"):
        asyncio.run(image_of(layout, FileChunks(layout, driver, [(place, 0, 10)], nothing)))
