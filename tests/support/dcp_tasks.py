"""Tasks for rank processes that save and load through torch's distributed checkpoint (DCP)."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor

import holdfast
from holdfast.storage.integrations.dcp import HoldfastReader, HoldfastWriter
from support.jobs import sharded, state_of, train


def dcp_save(uri: str, layout: str, steps: int, plain: bool = False) -> dict[str, Any]:
    """Train, save through DCP, and return the saved state. ``plain``: with DCP's own writer."""
    model, optim = sharded(layout, 1)
    train(model, optim, 0, steps)
    model_state, optim_state = get_state_dict(model, optim)
    state = {"model": model_state, "optim": optim_state, "step": steps, "betas": (0.9, [1, 2])}
    dcp.save(state, storage_writer=FileSystemWriter(uri) if plain else HoldfastWriter(uri))
    return state_of(model, optim)


def dcp_load(uri: str, layout: str, plain: bool = False) -> dict[str, Any]:
    """Load through DCP, or its own reader (``plain``), into another job; return its state."""
    model, optim = sharded(layout, 2)
    model_state, optim_state = get_state_dict(model, optim)
    state = {"model": model_state, "optim": optim_state, "step": 0}
    dcp.load(state, storage_reader=FileSystemReader(uri) if plain else HoldfastReader(uri))
    set_state_dict(model, optim, model_state_dict=model_state, optim_state_dict=optim_state)
    assert state["step"] == 2
    return state_of(model, optim)


def arranged(step: int) -> dict[str, Any]:
    """Return replicated, sharded and plain tensors, whose values follow from ``step``."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(35.0).reshape(7, 5) + step
    return {
        "sharded": distribute_tensor(full, mesh, [Shard(0)]),
        "replicated": distribute_tensor(full + 1, mesh, [Replicate()]),
        "plain": full + 2,
        "short": distribute_tensor(full[:1] + 3, mesh, [Shard(0)]),  # most ranks have no part of it
        "step": step,
    }


def arranged_full(step: int) -> dict[str, Any]:
    """Return the same state, gathered."""
    full = torch.arange(35.0).reshape(7, 5) + step
    return {
        "sharded": full,
        "replicated": full + 1,
        "plain": full + 2,
        "short": full[:1] + 3,
        "step": step,
    }


def accepts(function: Callable[..., Any], option: str) -> bool:
    """Return whether this torch has an option of DCP; 2.6, the oldest supported, has fewer."""
    return option in inspect.signature(function).parameters


def caching_planner() -> DefaultSavePlanner:
    """Return a planner that caches plans, if this torch has one."""
    if accepts(DefaultSavePlanner, "enable_plan_caching"):
        return DefaultSavePlanner(enable_plan_caching=True)
    return DefaultSavePlanner()


def cached_plans(folder: str) -> None:
    """Save with the plans that DCP caches at the first save; the last save replaces the first."""
    for step in range(4):
        writer = HoldfastWriter(f"{folder}/{step % 3}")
        dcp.save(arranged(step), storage_writer=writer, planner=caching_planner())


def one_refused(uri: str) -> None:
    """Save while rank 1 has a value that cannot be stored."""
    state = arranged(1)
    if dist.get_rank() == 1:
        state["hook"] = print
    dcp.save(state, storage_writer=HoldfastWriter(uri))


def two_uris(folder: str) -> None:
    """Save on ranks that disagree on the location."""
    dcp.save(arranged(1), storage_writer=HoldfastWriter(f"{folder}/{dist.get_rank()}"))


def of_some_ranks(uri: str) -> None:
    """Save and load on all ranks but the first, in a process group of their own."""
    ranks = list(range(1, dist.get_world_size()))
    group = dist.new_group(ranks)
    mesh = DeviceMesh("cpu", ranks)
    if dist.get_rank() == 0:
        return
    full = torch.arange(12.0)
    state = {"w": distribute_tensor(full, mesh, [Shard(0)]), "p": full + 1}
    dcp.save(state, storage_writer=HoldfastWriter(uri), process_group=group)
    into = {"w": distribute_tensor(full * 0, mesh, [Shard(0)]), "p": full * 0}
    dcp.load(into, storage_reader=HoldfastReader(uri), process_group=group)
    assert isinstance(into["w"], DTensor)
    assert torch.equal(into["w"].to_local(), state["w"].to_local())
    assert torch.equal(into["p"], full + 1)


def each_alone(folder: str) -> None:
    """Save and load a separate checkpoint on every rank."""
    rank = dist.get_rank()
    uri = f"{folder}/{rank}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.save({"w": torch.full((3,), rank)}, storage_writer=HoldfastWriter(uri), no_dist=True)
        into = {"w": torch.full((3,), -1)}
        dcp.load(into, storage_reader=HoldfastReader(uri), no_dist=True)
    assert into["w"].tolist() == [rank] * 3


def without_collectives(uri: str, *, refused: bool = False) -> None:
    """Save without any coordination by DCP. ``refused``: rank 1 has a value that cannot be stored."""
    state = arranged(5)
    if refused and dist.get_rank() == 1:
        state["hook"] = print
    writer = HoldfastWriter(uri, deadline_s=20)
    dcp.save(state, storage_writer=writer, use_collectives=False)


def refused_without_collectives(uri: str) -> None:
    """See :func:`without_collectives`."""
    without_collectives(uri, refused=True)


def several_boxes(uri: str) -> dict[str, Any]:
    """Load the state of :func:`arranged` with Holdfast's own load, into other layouts."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    zeros = torch.zeros(7, 5)
    into = {
        "sharded": distribute_tensor(zeros, mesh, [Shard(1)]),
        "replicated": distribute_tensor(zeros, mesh, [Shard(0)]),
        "plain": zeros.clone(),
        "short": zeros[:1].clone(),
        "step": 0,
    }
    holdfast.load(uri, into=into)
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in into.items()}
