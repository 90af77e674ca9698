"""Test copies under every order of accesses and failures, called again after deaths."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.bits import difference
from support.effort import examples
from support.simulation.turns import Simulation, run_inline, save_of

import holdfast
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.format.digest import digest, page_of
from holdfast.storage.format.manifest import Manifest
from holdfast.storage.format.tables import ImageTable
from holdfast.storage.operations.loading.load import run_build
from holdfast.storage.operations.maintenance.copy import Orders, copy_checkpoint
from holdfast.storage.pipeline.verifier import verify_images

BUDGET_NBYTES = 64 << 20
OLD = {"who": "old", "x": torch.full((3,), 1.0)}
STATE = {"who": "new", "x": torch.arange(9000, dtype=torch.float64)}
BLOCK_NBYTES = 4096


async def source(images: int) -> MemoryDriver:
    """Make a checkpoint of several images of several small chunks, as other ranks would write it."""
    storage = MemoryDriver()
    await save_of(STATE)(storage)
    manifest = Manifest.decode(await storage.get("manifest.safetensors"))
    key, hashed = manifest.image_key(0), int(manifest.images.hashed_nbytes[0])
    data = (await storage.get(key))[:hashed]
    chunk_nbytes = 4 * BLOCK_NBYTES
    pages = [
        page_of(memoryview(data[a : a + chunk_nbytes]), BLOCK_NBYTES)
        for a in range(0, hashed, chunk_nbytes)
    ]
    digests = np.frombuffer(b"".join(map(digest, pages)), np.uint8).reshape(-1, 16)
    table = ImageTable(np.arange(images), np.full(images, hashed), np.tile(digests, (images, 1)))
    remade = replace(
        manifest, world=images, images=table, chunk_nbytes=chunk_nbytes, block_nbytes=BLOCK_NBYTES
    )
    for rank in range(images):
        await storage.put(remade.image_key(rank), data + b"".join(pages))
    await storage.put("manifest.safetensors", remade.encode())
    return storage


@pytest.mark.nightly(4)
@examples(60)
@given(
    seed=st.integers(0, 1 << 32),
    images=st.integers(1, 4),
    order=st.sampled_from(["any", "ascending", "serial"]),
    streams=st.integers(1, 3),
    deaths=st.integers(0, 2),
    over=st.booleans(),
)
def test_copies_in_any_order_with_deaths(
    seed: int, images: int, order: Any, streams: int, deaths: int, over: bool
) -> None:
    """A reader finds the old or the new checkpoint, and the last copy succeeds."""
    rng = random.Random(seed)

    async def run() -> None:
        sim = Simulation(lambda keys: rng.sample(sorted(keys), len(keys)))
        ours = sim.storage
        ours.traits = replace(
            ours.traits, part_order=order, streams=streams, part_nbytes=4 * BLOCK_NBYTES
        )
        theirs = await source(images)
        if over:
            await save_of(OLD)(ours)

        async def copy(driver: Any) -> Any:
            return await copy_checkpoint(theirs, driver, Orders(over, BUDGET_NBYTES))

        async def look() -> None:
            if "manifest.safetensors" in ours.objects:
                found = Manifest.decode(await ours.get("manifest.safetensors"))
                if found.world == images and found.block_nbytes == BLOCK_NBYTES:
                    assert (
                        await verify_images(ours, found, BUDGET_NBYTES, lambda done, total: None)
                    ).ok
                else:
                    assert difference(OLD, (await run_build(ours, 0, BUDGET_NBYTES))[0]) is None
            else:
                assert not over

        for number in range(deaths + 1):
            actor, left = (
                sim.add(f"copy {number}", copy),
                rng.randrange(1, 60) if number < deaths else 1 << 30,
            )
            await sim.settle()
            while actor.ready and left:
                left -= 1
                turn = rng.randrange(len(actor.waiting))
                actor.waiting.insert(0, actor.waiting.pop(turn))
                actor.at.insert(0, actor.at.pop(turn))
                await sim.step(actor)
                await look()
            if not actor.task.done():
                sim.crash(actor)
        assert sim.actors[-1].task.done()
        sim.actors[-1].task.result()
        assert difference(STATE, (await run_build(ours, 0, BUDGET_NBYTES))[0]) is None
        await sim.end()

    run_inline(run())


@examples(40)
@given(seed=st.integers(0, 1 << 32))
def test_a_copy_and_a_save_to_one_place(seed: int) -> None:
    """Each succeeds or is superseded, and the next save leaves nothing behind."""
    rng = random.Random(seed)

    async def run() -> None:
        sim = Simulation(lambda keys: rng.sample(sorted(keys), len(keys)))
        theirs = await source(2)

        async def copy(driver: Any) -> Any:
            return await copy_checkpoint(theirs, driver, Orders(True, BUDGET_NBYTES))

        async def look() -> None:
            if "manifest.safetensors" in sim.storage.objects:
                found = (await run_build(sim.storage, 0, BUDGET_NBYTES))[0]
                assert difference(OLD if found["who"] == "old" else STATE, found) is None

        names = ["save", "copy", "copy 2"]
        for name in rng.sample(names, 3):
            sim.add(name, save_of(OLD) if name == "save" else copy)
        await sim.run(rng.choice, look)
        errors = [actor.task.exception() for actor in sim.actors]
        assert all(
            error is None or isinstance(error, holdfast.SupersededError) for error in errors
        ), errors
        await sim.end()
        await save_of(OLD)(sim.storage)
        left = {info.key.split("/")[1] async for info in sim.storage.list("data")}
        current = Manifest.decode(await sim.storage.get("manifest.safetensors")).attempt
        fates = [await sim.storage.get(f"data/{a}/fate") for a in left - {current}]
        assert len(fates) <= 2
        assert all(fate.startswith(b"claim ") for fate in fates)

    run_inline(run())
