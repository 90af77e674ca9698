"""Jobs with some ranks that save and load without the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import holdfast

__all__ = ["actor_and_critic", "copies_of_one", "runs_of_groups"]

FULL = torch.arange(15.0).reshape(5, 3)


def _halves() -> tuple[Any, int]:
    """The group of this rank, of two ranks each, and its number."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = dist.get_rank() // 2
    return groups[half], half


def actor_and_critic(folder: str) -> dict[str, Any]:
    """Save and load a checkpoint in each of two groups of two ranks at the same time."""
    group, half = _halves()
    mesh = DeviceMesh.from_group(group, "cpu")
    state = {
        "w": distribute_tensor(FULL + half, mesh, [Shard(0)]),
        "own": torch.tensor(float(dist.get_rank())),
        "data": holdfast.PerRank({"at": dist.get_rank()}),
    }
    uri = Path(folder, f"half-{half}")
    holdfast.save(uri, state, process_group=group)
    into = {
        "w": distribute_tensor(FULL * 0, mesh, [Shard(1)]),
        "own": torch.tensor(-1.0),
        "data": holdfast.PerRank({"at": -1}),
    }
    holdfast.load(uri, into=into, process_group=group)
    with holdfast.open(uri) as checkpoint:
        world = checkpoint.world
    whole = into["w"].full_tensor()
    dist.barrier()
    return {
        "world": world,
        "whole": torch.equal(whole, FULL + half),
        "own": into["own"].item(),
        "data": into["data"].value,
    }


def runs_of_groups(folder: str) -> int:
    """Train with a Checkpointer in each of two groups of two ranks; return the step it resumes
    from.
    """
    group, half = _halves()
    uri = Path(folder, f"run-{half}")
    with holdfast.Checkpointer(uri, every=1, when_busy="wait", process_group=group) as checkpointer:
        for step in range(1, 3 + half):
            checkpointer.step(step, {"w": torch.full((10,), float(step))})
    state = {"w": torch.zeros(10)}
    with holdfast.Checkpointer(uri, process_group=group) as checkpointer:
        step = checkpointer.resume(state)
    assert state["w"][0] == step
    dist.barrier()
    return step


def copies_of_one(folder: str) -> str:
    """Save a replicated tensor on each of two ranks alone, then a sharded one.

    Return the error of the latter.
    """
    mesh = DeviceMesh("cpu", [0, 1])
    uri = Path(folder, f"of-{dist.get_rank()}")
    replicated = distribute_tensor(FULL, mesh, [Replicate()])
    holdfast.save(uri, {"w": replicated}, process_group="self")
    assert torch.equal(holdfast.load(uri, process_group="self")["w"], FULL)
    said = ""
    try:
        half = distribute_tensor(FULL, mesh, [Shard(0)])
        holdfast.save(Path(folder, f"half-{dist.get_rank()}"), {"w": half}, process_group="self")
    except holdfast.CoverageError as error:
        said = str(error)
    dist.barrier()
    return said
