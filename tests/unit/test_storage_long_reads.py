"""Reads of several chunks at once are verified before anything is delivered."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import holdfast
from holdfast.drivers.memory import STORES, MemoryDriver
from holdfast.errors import DamagedError
from holdfast.planner.image import BLOCK_NBYTES, CHUNK_NBYTES
from holdfast.planner.loading import LoadPlan, Targets
from holdfast.storage.format.manifest import Manifest
from holdfast.storage.pipeline.image_reader import ImageReader, plan_reads
from holdfast.storage.protocol.current import read_manifest
from holdfast.storage.runtime.engine import CPU_THREADS, run

NBYTES = 3 * CHUNK_NBYTES + 5 * BLOCK_NBYTES + 99
LONG_NBYTES = 2 * CHUNK_NBYTES
NAME = "long-reads"


class Handed(MemoryDriver):
    """Hands over memory that is there already."""

    def __init__(self) -> None:
        super().__init__(f"{NAME}/saved")
        self.traits = replace(self.traits, hands_over=True, read_nbytes=LONG_NBYTES)


@pytest.fixture
def manifest() -> Manifest:
    """Of an image of four chunks, the last of which is short."""
    STORES.pop(NAME, None)
    content = torch.arange(NBYTES, dtype=torch.int32).to(torch.uint8)
    holdfast.save(f"memory://{NAME}/saved", {"w": content})
    return run(read_manifest(Handed()))[0]


def _wanted(start: int, stop: int) -> Targets:
    """Elements [start, stop) of the tensor."""
    column = np.array([[stop - start]], np.int64)
    zero = np.zeros(1, np.int64)
    return Targets(zero, np.array([[start]], np.int64), column, zero, column, zero)


def _read(manifest: Manifest, plan: LoadPlan, delivered: list[int]) -> None:
    """Run the plan; note the numbers of delivered reads."""
    reader = ImageReader(Handed(), manifest, 1 << 30)
    run(reader.run(plan, lambda read, buffer: delivered.append(read)))


def _flip(manifest: Manifest, position: int) -> None:
    key = f"saved/{manifest.image_key(0)}"
    data, created_s = STORES[NAME][key]
    changed = bytearray(data)
    changed[position] ^= 1
    STORES[NAME][key] = (bytes(changed), created_s)


def test_a_read_is_as_long_as_the_driver_wants_where_threads_have_enough_of_them(
    manifest: Manifest,
) -> None:
    """Reads of a small image are single chunks, so that each thread gets some."""
    targets = _wanted(0, NBYTES)
    assert len(plan_reads(Handed(), manifest, targets).start) == 4
    large = np.array([64 * CPU_THREADS * CHUNK_NBYTES], np.int64)
    images = replace(manifest.images, hashed_nbytes=large)
    plan = plan_reads(Handed(), replace(manifest, images=images), targets)
    assert plan.start.tolist() == [0, LONG_NBYTES]


def test_a_read_that_begins_and_ends_within_chunks_is_verified(manifest: Manifest) -> None:
    """Block digests verify the ends of a read; damage anywhere in it prevents its delivery."""
    start = CHUNK_NBYTES // 2
    plan = plan_reads(Handed(), manifest, _wanted(start, start + CHUNK_NBYTES), LONG_NBYTES)
    _flip(manifest, int(plan.start[0]) - 1)
    _flip(manifest, int(plan.stop[0]))
    delivered: list[int] = []
    _read(manifest, plan, delivered)
    assert delivered == [0]
    for position in (int(plan.start[0]), CHUNK_NBYTES, int(plan.stop[0]) - 1):
        _flip(manifest, position)
        with pytest.raises(DamagedError, match="not what was written"):
            _read(manifest, plan, delivered)
        _flip(manifest, position)
    assert delivered == [0]
