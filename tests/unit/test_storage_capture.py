"""An image is captured into host memory at one time, and hashed and written at another."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from holdfast.drivers.contract import Driver
from holdfast.drivers.memory import MemoryDriver
from holdfast.planner.image import CHUNK_NBYTES
from holdfast.storage.arenas.memory import Memory, reserved_memory
from holdfast.storage.format.digest import digest
from holdfast.storage.format.packed import Compression
from holdfast.storage.pipeline.capture import TensorChunks, capture_into
from holdfast.storage.pipeline.chunks import ChunkSource, MemoryChunks
from holdfast.storage.pipeline.image_writer import Callbacks, ImageWriter
from holdfast.storage.runtime.buffers import HostBuffer
from holdfast.storage.runtime.engine import CPU_THREADS, start
from holdfast.storage.state.flattening.flatten import flatten
from holdfast.storage.state.plan import SavePlan, plan_save


def state() -> dict[str, torch.Tensor]:
    """Return a state whose image has two full chunks and a short one."""
    return {"w": torch.arange(2 * CHUNK_NBYTES // 4 + 99, dtype=torch.int32), "b": torch.ones(300)}


def planned(tensors: dict[str, torch.Tensor]) -> SavePlan:
    """The image of a lone rank."""
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


def captured(plan: SavePlan, chunks: TensorChunks | None = None) -> MemoryChunks:
    """The chunks of the image, once it is captured."""
    memory = memory_of(plan)
    chunks = chunks or TensorChunks(plan.layout, plan.source)
    start(capture_into(memory, plan.layout, chunks)).result(60)
    return MemoryChunks(plan.layout, memory)


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
    image_chunks = captured(plan)
    for tensor in tensors.values():
        tensor.zero_()
    reached: list[str] = []
    digests = start(
        write(driver, plan, image_chunks, compression, budget_nbytes, reached.append)
    ).result(60)

    assert start(driver.get("image")).result(60) == image
    assert (digests == expected).all()
    assert reached == ["captured", "sealed"]


def test_packed_chunks_wait_for_those_before_them() -> None:
    """A packed chunk's position follows from earlier ones, also if the first is captured late."""

    class FirstComesLate(TensorChunks):
        """Chunks whose first chunk waits until a later one has been captured and packed."""

        another_is_packed = asyncio.Event()

        async def take(self, chunk: int) -> HostBuffer:
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
