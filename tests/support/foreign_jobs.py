"""Tasks for rank processes with layouts of other frameworks. Each returns the outcomes of saves and
loads."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

import holdfast


def outcome(call: Callable[[], Any]) -> str:
    """Return the kind and text of the error that ``call`` raised; "" if it raised none."""
    try:
        call()
    except holdfast.HoldfastError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Refusals:
    """Collects the errors of refused saves, and of loads of ``whole``, below ``uri``."""

    def __init__(self, uri: str, whole: dict[str, Any]) -> None:
        self._uri = uri
        self.errors: dict[str, tuple[str, str]] = {}
        """Errors of the save and the load, by name."""
        holdfast.save(f"{uri}/whole", whole)

    def tried(self, name: str, state: dict[str, Any]) -> None:
        """Try to save ``state``, and to load into it."""
        self.errors[name] = (
            outcome(lambda: holdfast.save(f"{self._uri}/{name}", state)),
            outcome(lambda: holdfast.load(f"{self._uri}/whole", into=state)),
        )


def fsdp1(seed: int, *, mesh: bool, orig: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a module that contains an FSDP1-sharded one, and an optimizer that has stepped."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    device_mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if mesh else None
    model[1] = FullyShardedDataParallel(
        model[1], device_id=torch.device("cpu"), use_orig_params=orig, device_mesh=device_mesh
    )
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optim)
    return model, optim


def step(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    """Take one step on a fixed batch."""
    model(torch.ones(2, 4)).square().sum().backward()
    optim.step()
    optim.zero_grad()


def fsdp1_leaves(uri: str) -> list[str]:
    """Save flat parameters of FSDP1 in plain dicts."""
    warnings.simplefilter("ignore")
    texts = []
    for orig in (True, False):
        model, _ = fsdp1(1, mesh=False, orig=orig)
        state = dict(model[1].named_parameters())
        texts += [
            outcome(lambda state=state: holdfast.save(uri, {"model": state})),
            outcome(lambda state=state: holdfast.load(uri, into={"model": state})),
        ]
    return texts


def _sharded(whole: torch.Tensor, width: int) -> ShardedTensor:
    """Cut ``whole`` into columns of this width, and deal them to the ranks in turn."""
    rank = dist.get_rank()
    parts = whole.split(width, dim=1)
    shards = [
        LocalShard.from_tensor_and_offsets(part.clone(), [0, number * width], rank)
        for number, part in enumerate(parts)
        if number % dist.get_world_size() == rank
    ]
    return init_from_local_shards(shards, *whole.shape)


def sharded_tensors(uri: str) -> bool:
    """Save ShardedTensors of several parts per rank, and FSDP1's. Return whether loads agree."""
    warnings.simplefilter("ignore")
    whole = torch.arange(70.0).reshape(5, 14)
    model, _ = fsdp1(1, mesh=False, orig=True)
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    before = dict(model.state_dict())
    holdfast.save(uri, {"table": _sharded(whole, 2), "model": before})
    into = {"table": _sharded(torch.zeros_like(whole), 5), "model": dict(model.state_dict())}
    for tensor in into["model"].values():
        for shard in tensor.local_shards() if isinstance(tensor, ShardedTensor) else []:
            shard.tensor.zero_()
    holdfast.load(uri, into=into)
    plain = {"table": torch.zeros_like(whole)}
    holdfast.load(uri, into=plain, strict="state")
    return (
        _same_shards(into["table"], _sharded(whole, 5))
        and all(_same_shards(into["model"][name], before[name]) for name in before)
        and torch.equal(plain["table"], whole)
    )


def _same_shards(a: Any, b: Any) -> bool:
    if not isinstance(a, ShardedTensor):
        return torch.equal(a, b)
    pairs = zip(a.local_shards(), b.local_shards(), strict=True)
    return all(torch.equal(one.tensor, other.tensor) for one, other in pairs)


def _hooked(tensor: DTensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> DTensor:
    """Return ``tensor`` with the hooks that Megatron-FSDP gives to its local tensor."""
    chunk = SimpleNamespace(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
    local = tensor._local_tensor
    local.__create_chunk_list__ = lambda: [chunk]  # type: ignore[attr-defined]
    local.__create_write_items__ = lambda fqn, tensor: []  # type: ignore[attr-defined]
    return tensor


def _wrapped(mesh: DeviceMesh) -> DTensor:
    """Return a DTensor whose local tensor consists of several."""
    local = LocalShardsWrapper([torch.ones(1, 2), torch.ones(1, 2)], [(0, 0), (1, 0)])
    return DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=torch.Size((4, 2)), stride=(2, 1)
    )


def hooked_tensors(uri: str) -> dict[str, str]:
    """Save and load DTensors with hooks that agree with their placements, or do not."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    def made(at: int, kind: Callable[[Any], Any] = lambda tensor: tensor) -> DTensor:
        even = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Shard(0)])
        return _hooked(kind(even), (2 * at, 0), (2, 2))

    right = made(rank)
    turned = made(world - 1 - rank)
    optimized = made(world - 1 - rank, nn.Parameter)
    module = nn.Linear(2, 4)
    module.weight = optimized
    buffered = nn.Module()
    buffered.register_buffer("cache", turned)
    moments = torch.optim.SGD([optimized], lr=0.1)
    items = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    items._local_tensor.__create_write_items__ = lambda fqn, tensor: []  # type: ignore[attr-defined]
    on_dtensor = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    other = SimpleNamespace(offsets=torch.Size((2 - 2 * rank, 0)), sizes=torch.Size((2, 2)))
    on_dtensor.__create_chunk_list__ = lambda: [other]  # type: ignore[method-assign]
    plain = torch.ones(3)
    plain.__create_chunk_list__ = lambda: [other]  # type: ignore[attr-defined]
    states = {
        "right": {"w": right},
        "turned": {"w": turned},
        "module": {"m": module},
        "buffer": {"m": buffered},
        "optimizer": {"o": moments},
        "items": {"w": items},
        "own": {"w": on_dtensor},
        "wrapped": {"w": _wrapped(mesh)},
        "plain": {"w": plain},
    }
    found = {}
    for name, state in states.items():
        found[f"save {name}"] = outcome(
            lambda state=state, name=name: holdfast.save(f"{uri}/{name}", state)
        )
        found[f"load {name}"] = outcome(
            lambda state=state: holdfast.load(f"{uri}/right", into=state)
        )
    return found


def uneven_tensors(uri: str) -> dict[str, str]:
    """Save and load DTensors whose local tensors have other sizes than their placements imply."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    shapes = {"longer first": [(3, 2), (1, 2)][rank], "padded": (2, 2), "none expected": (1, 2)}
    sizes = {"longer first": (4, 2), "padded": (3, 2), "none expected": (1, 2)}
    for name in shapes:
        holdfast.save(
            f"{uri}/good {name}", {"w": distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])}
        )
    found = {}
    for name, shape in shapes.items():
        whole = torch.Size(sizes[name])
        local = torch.full(shape, float(rank))
        w = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole, stride=(2, 1))
        found[f"save {name}"] = outcome(
            lambda w=w, name=name: holdfast.save(f"{uri}/{name}", {"w": w})
        )
        found[f"load {name}"] = outcome(
            lambda w=w, name=name: holdfast.load(f"{uri}/good {name}", into={"w": w})
        )
        found[f"committed {name}"] = str(Path(uri, name, "manifest.safetensors").exists())
    return found
