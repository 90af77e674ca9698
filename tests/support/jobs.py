"""Tasks for rank processes. Every function runs on all ranks of a process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast


class Block(nn.Module):
    """A residual block of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(10)
        self.up = nn.Linear(10, 26)
        self.down = nn.Linear(26, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Three blocks and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(10, 3)
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def sharded(layout: str, seed: int, device: str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make a model and optimizer in a layout: fsdp, hsdp (replicas of shards), tp or loose."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = Model()
    world = dist.get_world_size()
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
    elif layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    else:
        whole = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        for block in model.blocks:
            parallelize_module(
                block, whole["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
        for module in (
            [block.norm for block in model.blocks] + [model.head] if layout == "tp" else []
        ):
            distribute_module(module, whole["tp"], None, replicated, localised)
        mesh = whole["dp"]
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def replicated(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
    """Convert the input of a layer with replicated parameters."""
    return DTensor.from_local(inputs[0], mesh, [Replicate()])


def localised(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
    """Convert the output of such a layer, for layers that take plain tensors."""
    return output.to_local()


def train(model: nn.Module, optim: torch.optim.Optimizer, first: int, last: int) -> None:
    """Take steps on batches that follow from their number."""
    for step in range(first, last):
        x = torch.randn(6, 10, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optim.step()
        optim.zero_grad()


def whole(value: Any) -> Any:
    """Return a state with every DTensor gathered."""
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return [whole(item) for item in value] if isinstance(value, list | tuple) else value


def state_of(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    """Return all of a job's state, gathered and by name, so that layouts can be compared."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    return {
        "model": whole(dict(model.state_dict())),
        "optim": whole(get_optimizer_state_dict(model, optim)),
    }


def fsdp_save(uri: str, layout: str, steps: int) -> dict[str, Any]:
    """Train and save; return the saved state."""
    model, optim = sharded(layout, 1)
    train(model, optim, 0, steps)
    holdfast.save(uri, {"model": model, "optim": optim, "step": steps})
    return state_of(model, optim)


def fsdp_load(
    uri: str, layout: str, more: int = 0, strict: bool = True, device: str = "cpu"
) -> dict[str, Any]:
    """Load into a job of another layout, train for ``more`` steps, and return the state."""
    model, optim = sharded(layout, 2, device)
    state = {"model": model, "optim": optim, "step": 0}
    holdfast.load(uri, into=state, strict=strict)
    train(model, optim, state["step"], state["step"] + more)
    return state_of(model, optim)


class Tied(nn.Module):
    """Two layers that share a weight of two rows: of three ranks, one has no part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(2, 4), nn.Linear(4, 2)
        self.head.weight = self.embed.weight


def fsdp_tied(uri: str, device: str, strict: bool) -> list[Any]:
    """Load into a tied model; return the weight by both names, and whether it is still one."""
    with torch.device(device):
        model = fully_shard(Tied(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    weight = model.embed.weight
    holdfast.load(uri, into=model, strict=strict)
    state = model.state_dict()
    whole = [state[f"{name}.weight"].full_tensor() for name in ("embed", "head")]
    return [*whole, model.embed.weight is model.head.weight is weight]


def fsdp_evaluated(uri: str, lazy: bool) -> list[dict[str, Any]]:
    """Save and load after an evaluation, with the optimizer ahead of the model; return both states."""
    states = []
    for seed in (1, 2):
        model, optim = sharded("fsdp", seed)
        train(model, optim, 0, 2)
        states.append({"optim": optim, "model": model})
        with torch.no_grad():
            model(torch.ones(6, 10))
        if seed == 1:
            handle = holdfast.async_save(uri, states[0], lazy=lazy)
            train(model, optim, 2, 3)
            handle.wait()
    holdfast.load(uri, into=states[1])
    train(states[1]["model"], states[1]["optim"], 2, 3)
    return [state_of(state["model"], state["optim"]) for state in states]


def fsdp_train(layout: str, steps: int) -> dict[str, Any]:
    """Train without a break; return the state."""
    model, optim = sharded(layout, 1)
    train(model, optim, 0, steps)
    return state_of(model, optim)


def one_memory(uri: str) -> bool:
    """Save and load two DTensors that are different parts of one local tensor."""
    rank = dist.get_rank()
    local = torch.full((3,), float(rank))
    meshes = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [1, 0])]
    parts = [DTensor.from_local(local, mesh, [Shard(0)], run_check=False) for mesh in meshes]
    holdfast.save(uri, parts)
    built = holdfast.load(uri)
    return [t.tolist() for t in built] == [[0.0] * 3 + [1.0] * 3, [1.0] * 3 + [0.0] * 3]
