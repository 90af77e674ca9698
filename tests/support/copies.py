"""Checkpoints to copy, copies of them, and their contents."""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast.drivers.contract import Driver
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.format.manifest import MANIFEST_KEY
from holdfast.storage.operations.loading.load import run_build
from holdfast.storage.operations.maintenance.copy import Orders, copy_checkpoint
from holdfast.storage.operations.saving.save import SaveJob, run_save
from holdfast.storage.ranks.team import Team
from holdfast.storage.runtime.engine import start
from holdfast.storage.state.flattening.flatten import flatten

from .drivers import contents
from .ranks import save_as_ranks

BUDGET_NBYTES = 64 << 20
RANKS = 3
OLD, NEW, LAST = (
    {"who": who, "x": torch.full((5,), float(i)), "y": [torch.arange(i)]}
    for i, who in enumerate(["old", "new", "last"])
)


def run(work: Awaitable[Any]) -> Any:
    """Run ``work`` on the engine's loop, as copies do."""

    async def awaited() -> Any:
        return await work

    return start(awaited()).result(60)


async def save(driver: Driver, state: Any) -> None:
    """Save as a job of one rank."""
    await run_save(driver, Team(), SaveJob(flatten(state), None, BUDGET_NBYTES))


def loaded(driver: Driver) -> Any:
    """Load the checkpoint as a reader does."""
    return run(run_build(driver, 0, BUDGET_NBYTES))[0]


def copied(
    theirs: Driver,
    ours: Driver,
    *,
    overwrite: bool = False,
    budget_nbytes: int = BUDGET_NBYTES,
    image_nbytes: int | None = None,
) -> int:
    """Copy; return the number of bytes sent."""
    orders = Orders(overwrite, budget_nbytes, image_nbytes)
    _, sent = run(copy_checkpoint(theirs, ours, orders))
    return sent.nbytes


def checkpoint(elements: int = 4000) -> MemoryDriver:
    """Return storage with a checkpoint of three ranks, each with its own image."""
    storage = MemoryDriver()
    save_as_ranks(
        storage,
        [{"who": "new", "own": torch.full((elements,), float(rank))} for rank in range(RANKS)],
    )
    return storage


DEAD = "20200101T000000-00000000"


def prepared() -> MemoryDriver:
    """Return storage with a checkpoint and the leftovers of a dead attempt."""
    storage = MemoryDriver()
    run(save(storage, OLD))
    run(storage.put(f"data/{DEAD}/attempt.json", b"{}"))
    run(storage.put(f"data/{DEAD}/0.safetensors", b"half an image"))
    return storage


def images(storage: Driver) -> list[str]:
    """List the visible images of all attempts."""
    return sorted(
        key
        for key in run(contents(storage))
        if key.endswith(".safetensors") and key != MANIFEST_KEY
    )


def flipped(storage: MemoryDriver, key: str, at: int) -> None:
    """Flip a bit of a stored object."""
    data = bytearray(run(storage.get(key)))
    data[at] ^= 1
    run(storage.put(key, bytes(data)))


def attempts(storage: Driver) -> set[str]:
    """Return the ids of all attempts that have left a file."""
    return {key.split("/")[1] for key in run(contents(storage)) if key.startswith("data/")}


def steps_at(uri: str | Path) -> list[int | None]:
    """List the steps of the checkpoints at ``uri``."""
    return [c.step for c in holdfast.list_checkpoints(uri)]
