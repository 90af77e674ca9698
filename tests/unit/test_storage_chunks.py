"""Chunks of images: captured into host memory, read from files, written in the driver's order."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.drivers import Counting
from support.given import Serve
from support.ordered import Ordered

import holdfast
from holdfast.drivers.contract import Driver, PartOrder, Upload, segments
from holdfast.drivers.memory import MemoryDriver
from holdfast.planner.image import CHUNK_NBYTES, PAGE_NBYTES, ImageLayout, lay_out
from holdfast.storage.arenas.memory import Memory, reserved_memory
from holdfast.storage.format.digest import digest
from holdfast.storage.format.packed import Compression
from holdfast.storage.pipeline.capture import TensorChunks, capture_into
from holdfast.storage.pipeline.chunks import ChunkSource, MemoryChunks
from holdfast.storage.pipeline.file_chunks import Enclosed, FileChunks, Stretch
from holdfast.storage.pipeline.image_writer import Callbacks, ImageWriter, Opening, writing_order
from holdfast.storage.runtime.buffers import HostBuffer
from holdfast.storage.runtime.engine import CPU_THREADS, start
from holdfast.storage.state.flattening.flatten import flatten
from holdfast.storage.state.plan import SavePlan, plan_save


def state() -> dict[str, torch.Tensor]:
    """Return a state whose image has two full chunks and a short one."""
    return {"w": torch.arange(2 * CHUNK_NBYTES // 4 + 99, dtype=torch.int32), "b": torch.ones(300)}


def planned(tensors: dict[str, torch.Tensor]) -> SavePlan:
    """Return the image of a lone rank."""
    return plan_save(flatten(tensors), 0, None)


async def write(
    driver: Driver,
    plan: SavePlan,
    chunks: ChunkSource,
    compression: Compression | None = None,
    budget_nbytes: int | None = None,
    reached: Any = lambda what: None,
) -> npt.NDArray[np.uint8]:
    """Write the image to the key "image"; return the digests of its chunks."""

    async def key() -> str:
        return "image"

    callbacks = Callbacks(lambda: reached("captured"), lambda: reached("sealed"))
    writer = ImageWriter(driver, plan.layout, chunks, budget_nbytes, callbacks, compression)
    return (await writer.write(key)).digests


def memory_of(plan: SavePlan) -> Memory:
    """Memory for the image."""
    return reserved_memory(plan.layout.nbytes)


def captured(plan: SavePlan, chunks: TensorChunks | None = None) -> Memory:
    """Capture the image into memory."""
    memory = memory_of(plan)
    chunks = chunks or TensorChunks(plan.layout, plan.source)
    start(capture_into(memory, plan.layout, chunks)).result(60)
    return memory


@pytest.mark.parametrize(
    ("compression", "budget_nbytes"), [(None, CHUNK_NBYTES), ("lz4", CHUNK_NBYTES), ("lz4", None)]
)
def test_an_image_captured_first_is_written_with_the_same_bytes(
    compression: Compression | None, budget_nbytes: int | None
) -> None:
    """An image captured before the state changes has the bytes of one captured while written."""
    driver = MemoryDriver()
    plan = planned(state())
    direct = TensorChunks(plan.layout, plan.source)
    expected = start(write(driver, plan, direct, compression)).result(60)
    image = start(driver.get("image")).result(60)
    start(driver.delete("image")).result(60)

    tensors = state()
    plan = planned(tensors)
    memory = captured(plan)
    before = digest(memory.view[: plan.layout.hashed_end])
    image_chunks = MemoryChunks(plan.layout, memory, packed=compression is not None)
    for tensor in tensors.values():
        tensor.zero_()
    reached: list[str] = []
    digests = start(
        write(driver, plan, image_chunks, compression, budget_nbytes, reached.append)
    ).result(60)

    assert start(driver.get("image")).result(60) == image
    assert (digests == expected).all()
    assert reached == ["captured", "sealed"]
    assert digest(memory.view[: plan.layout.hashed_end]) == before  # it may be restored from there


def test_packed_chunks_wait_for_those_before_them() -> None:
    """A packed chunk's position follows from earlier ones, also if the first is captured late."""

    class FirstComesLate(TensorChunks):
        """Chunks whose first chunk waits until a later one has been captured and packed."""

        another_is_packed = asyncio.Event()

        async def take(self, chunk: int, parts: object = None) -> HostBuffer:
            if chunk == 0:
                async with asyncio.timeout(60):
                    await self.another_is_packed.wait()
            if chunk == CPU_THREADS:
                self.another_is_packed.set()
            return await super().take(chunk)

    tensors = {"w": torch.arange(CPU_THREADS * CHUNK_NBYTES // 4 + 99, dtype=torch.int32)}
    digests: list[bytes] = []
    for source in (TensorChunks, FirstComesLate):
        driver = MemoryDriver()
        plan = planned(tensors)
        chunks = source(plan.layout, plan.source)
        budget_nbytes = (CPU_THREADS + 1) * CHUNK_NBYTES
        start(write(driver, plan, chunks, "lz4", budget_nbytes)).result(120)
        digests.append(digest(start(driver.get("image")).result(60)))
    in_turn, out_of_turn = digests
    assert out_of_turn == in_turn


def calls_in(work: Callable[[], None]) -> int:
    """Return the number of Python functions that this thread calls during ``work``."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("count", [2, 4000])
def test_short_tensors_are_copied_by_a_few_calls_however_many_there_are(count: int) -> None:
    """Adjacent short tensors are copied together, also around others and at the range's ends."""
    tensors = {f"t{i:04}": torch.full((i % 37,), i % 251, dtype=torch.uint8) for i in range(count)}
    tensors["long"] = torch.arange(1 << 20, dtype=torch.int32)
    tensors["strided"] = torch.arange(2000, dtype=torch.int16)[::2]
    tensors["page"] = torch.arange(1024, dtype=torch.int32)
    plan = planned(tensors)
    end = plan.layout.hashed_end
    start = (plan.layout.data_end - count * 9 // 2) // 8 * 8  # within a tensor
    whole = HostBuffer.allocate(end)
    part = HostBuffer.allocate(end)
    plan.source.copy(0, end, whole)
    assert calls_in(lambda: plan.source.copy(start, end - 8, part)) < 150
    assert part.view[: end - 8 - start] == whole.view[start : end - 8]

    names = [plan.tensors.names[row] for row in plan.shards.tensor.tolist()]
    for name, at in zip(names, plan.layout.start.tolist(), strict=True):
        tensor = tensors[name]
        assert bytes(whole.view[at : at + tensor.nbytes]) == tensor.numpy().tobytes()


@pytest.mark.parametrize("fails", [False, True])
def test_a_capture_lets_go_of_the_tensors(fails: bool) -> None:
    """They can be freed while the image waits in memory, and if a chunk cannot be copied."""

    class Broken(TensorChunks):
        async def copy_range(self, start: int, stop: int, buffer: HostBuffer) -> None:
            if fails and start == CHUNK_NBYTES:
                raise MemoryError("none left")
            await super().copy_range(start, stop, buffer)

    tensors = state()
    freed = weakref.ref(tensors["w"])
    plan = planned(tensors)
    layout = plan.layout
    memory = memory_of(plan)
    chunks = Broken(layout, plan.source)
    del tensors, plan
    assert freed() is not None
    with pytest.raises(MemoryError) if fails else contextlib.nullcontext():
        start(capture_into(memory, layout, chunks)).result(60)
    assert freed() is None


SMALL_NBYTES = 16 * PAGE_NBYTES


def layout_of(sizes: list[int]) -> ImageLayout:
    """Return an image of tensors of bytes."""
    count = len(sizes)
    return lay_out(
        [f"t{number}" for number in range(count)],
        ["uint8"] * count,
        np.array(sizes, np.int64).reshape(-1, 1),
        np.ones(count, np.int64),
        np.ones(count, np.int64),
        chunk_nbytes=SMALL_NBYTES,
        block_nbytes=PAGE_NBYTES,
    )


async def nothing() -> None:
    """Check nothing."""


async def image_of(layout: ImageLayout, chunks: FileChunks) -> bytes:
    """Return all chunks, which are taken at the same time."""
    buffers = await asyncio.gather(*map(chunks.take, range(layout.chunks)))
    image = bytearray()
    for chunk, buffer in enumerate(buffers):
        image += buffer.view[: len(range(*layout.chunk_range(chunk)))]
        chunks.pool.give(buffer)
    return bytes(image)


def begin_of(content: memoryview) -> int:
    """Return the start of the enclosed bytes: their first byte says how many are before them."""
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
    driver = Counting(coalesce_nbytes=gap_nbytes, align_nbytes=align_nbytes)
    layout = layout_of(sizes)
    in_order = [places[number] for number in range(len(sizes))]
    for key, file in files.items():
        asyncio.run(driver.put(key, bytes(file)))
    image = asyncio.run(image_of(layout, FileChunks(layout, driver, in_order, nothing)))
    for number, start in enumerate(layout.start.tolist()):
        assert image[start : start + sizes[number]] == contents[number]
    assert max(stop - start for _, start, stop in driver.reads) <= SMALL_NBYTES


def test_small_parts_that_are_close_together_are_one_read() -> None:
    """They may have other bytes between them. Parts that are further away are another read."""
    sizes = [100] * 50
    layout = layout_of(sizes)
    for distance, reads in [(110, 1), (200, 50)]:
        driver = Counting(coalesce_nbytes=50)
        asyncio.run(driver.put("f", bytes(50 * distance)))
        places = [(Stretch("f", distance * number, 100), 0, 100) for number in range(50)]
        asyncio.run(image_of(layout, FileChunks(layout, driver, places, nothing)))
        assert len(driver.reads) == reads


def test_what_is_copied_is_read_from_a_boundary_on() -> None:
    """Reads that are copied begin at a boundary; contiguous parts are read directly."""
    driver = Counting(coalesce_nbytes=0, align_nbytes=4096)
    asyncio.run(driver.put("f", bytes(50_000)))
    layout = layout_of([100, 200, 300])
    apart = [(Stretch("f", 10_000 * number, 300), 0, 100 * number) for number in (1, 2, 3)]
    asyncio.run(image_of(layout, FileChunks(layout, driver, apart, nothing)))
    assert [start for _, start, _ in driver.reads] == [10_000, 20_000, 30_000]
    driver.reads.clear()
    close = [(Stretch("f", at, nbytes), 0, nbytes) for at, nbytes in [(9000, 100), (8800, 200)]]
    layout = layout_of([100, 200])
    asyncio.run(image_of(layout, FileChunks(layout, driver, close, nothing)))
    assert [read[1:] for read in driver.reads] == [(8192, 9100)]
    connected = [(Stretch("f", at, nbytes), 0, nbytes) for at, nbytes in [(8800, 200), (9000, 100)]]
    layout = layout_of([200, 100])
    asyncio.run(image_of(layout, FileChunks(layout, driver, connected, nothing)))
    assert driver.reads[-1][1:] == (8800, 9100)


def test_what_is_found_to_be_wrong_is_raised() -> None:
    """The error replaces the chunk."""

    def wrong(content: memoryview) -> int:
        raise LookupError(len(content))

    driver = Counting(coalesce_nbytes=0)
    asyncio.run(driver.put("f", bytes(100)))
    layout = layout_of([10])
    place = Enclosed(Stretch("f", 20, 70), 10, 0, wrong)
    with pytest.raises(LookupError, match="70"):
        asyncio.run(image_of(layout, FileChunks(layout, driver, [(place, 0, 10)], nothing)))


@pytest.mark.nightly(14)
@pytest.mark.parametrize("order", ["any", "ascending", "serial"])
@pytest.mark.parametrize("budget_nbytes", [None, 128 << 20])
@pytest.mark.parametrize("streams", [1, 3])
def test_parts_arrive_in_the_order_asked_for(
    order: PartOrder, budget_nbytes: int | None, streams: int, serve: Serve
) -> None:
    """Parts begin in order within each segment, overlapping unless ``serial``."""
    drivers: list[Ordered] = []

    def make(location: str) -> Ordered:
        drivers.append(Ordered(order, location, streams))
        return drivers[-1]

    uri = serve(make)
    state = {"w": torch.from_numpy(np.random.default_rng(0).standard_normal(100 << 17))}
    holdfast.async_save(uri, state, budget_nbytes=budget_nbytes).wait(60)
    assert torch.equal(holdfast.load(uri)["w"], state["w"])
    (upload,) = drivers[0].uploads
    assert len(upload.begun) > 6
    end = upload.begun[-1] + 1  # the trailer is written last
    cut = segments(end, replace(drivers[0].traits, part_nbytes=16 << 20))
    if order != "any":
        for start, stop in cut:
            within = [at for at in upload.begun if start <= at < stop]
            assert within == sorted(within)
        assert upload.begun[:streams] == [start for start, _ in cut[:streams]]
    assert (upload.most == 1) == (order == "serial")


@pytest.mark.parametrize("hops", range(8))
def test_who_waits_for_an_upload_goes_before_who_comes_later(hops: int) -> None:
    """A caller that arrives as the upload opens does not overtake waiting callers."""

    async def run() -> None:
        go, went = asyncio.Event(), list[int]()

        async def create() -> Upload:
            await go.wait()
            return await MemoryDriver().create("x", 1)

        opening = Opening(create())

        async def ask(number: int) -> None:
            await opening.upload()
            went.append(number)

        tasks = [asyncio.ensure_future(ask(number)) for number in range(3)]
        await asyncio.sleep(0.01)
        go.set()
        for _ in range(hops):
            await asyncio.sleep(0)
        await asyncio.gather(*tasks, ask(3))
        assert went == [0, 1, 2, 3]
        await opening.drop()

    asyncio.run(run())


@pytest.mark.parametrize("nbytes", [1, 100, 1000])
@pytest.mark.parametrize("streams", [1, 3, 4])
@pytest.mark.parametrize("chunk_nbytes", [8, 16, 32])
def test_chunks_are_written_in_turn_from_each_segment(
    nbytes: int, streams: int, chunk_nbytes: int
) -> None:
    """Every chunk is written once, ascending within each segment."""
    traits = replace(Ordered("ascending", streams=streams).traits, part_nbytes=16)
    chunks = -(-nbytes // chunk_nbytes)
    order = writing_order(chunks, chunk_nbytes, nbytes, traits)
    assert sorted(order) == list(range(chunks))
    reached: dict[int, int] = {}
    for at in (chunk * chunk_nbytes for chunk in order):
        segment = max(begin for begin, _ in segments(nbytes, traits) if begin <= at)
        assert reached.get(segment, -1) < at
        reached[segment] = at
    if streams == 3 and (nbytes, chunk_nbytes) == (1000, 16):
        assert order[:4] == [0, 21, 42, 1]
