"""Tasks for rank processes that train a small model under FSDP1, FSDP2, DDP or on its own, and save
and load it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

import holdfast

from .foreign_jobs import Refusals, outcome
from .training import Seen, Training

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Layout:
    """Form of a job: a strategy of FSDP1, "FSDP2", "DDP" or "plain"; ``orig``: use_orig_params."""

    kind: str
    orig: bool = True
    mesh: bool = False
    mixed: bool = False
    frozen: bool = False
    recomputed: bool = False


class Tied(nn.Module):
    """A module with sizes that no number of ranks divides, a buffer, and a tied parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3)
        self.norm = nn.LayerNorm(3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.last = nn.Linear(3, 3, bias=False)
        self.again = nn.Linear(3, 5)
        self.twin = nn.Linear(3, 3, bias=False)
        self.twin.weight = self.last.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        return x + self.again(self.twin(self.last(self.norm(self.first(x)).relu())))


def built(layout: Layout, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build a model and its optimizer, which has no state yet."""
    warnings.simplefilter("ignore")
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(4, 5), Tied(), nn.Linear(5, 3))
    if layout.frozen:
        model[1].again.bias.requires_grad_(False)  # type: ignore[union-attr,index]
    if layout.kind == "FSDP2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model[1], mesh=mesh)  # type: ignore[index]
        fully_shard(model, mesh=mesh)
    elif layout.kind == "DDP":
        model = DistributedDataParallel(model)
    elif layout.kind != "plain":
        model[1] = wrapped(model[1], layout)  # type: ignore[index,operator]
        model = wrapped(model, layout)
    if layout.recomputed:
        apply_activation_checkpointing(model, check_fn=lambda part: isinstance(part, Tied))
    names = dict(model.named_parameters())
    biases = [p for name, p in names.items() if name.endswith("bias")]
    others = [p for name, p in names.items() if not name.endswith("bias")]
    groups = [{"params": group} for group in (others, biases) if group]
    return model, torch.optim.AdamW(groups, lr=0.01)


def wrapped(module: nn.Module, layout: Layout) -> FullyShardedDataParallel:
    """Wrap ``module`` in FSDP1."""
    world = dist.get_world_size()
    mesh: DeviceMesh | None = None
    if layout.kind == "HYBRID_SHARD":
        mesh = init_device_mesh("cpu", (2, world // 2))
    elif layout.mesh:
        mesh = init_device_mesh("cpu", (world,))
    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return FullyShardedDataParallel(
        module,
        sharding_strategy=ShardingStrategy[layout.kind],
        device_id=CPU,
        use_orig_params=layout.orig,
        device_mesh=mesh,
        mixed_precision=mixed if layout.mixed else None,
    )


def step(model: nn.Module, optim: torch.optim.Optimizer, number: int) -> float:
    """Take a step on a batch that all ranks share; return its loss."""
    batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(number))
    loss = model(batch).float().square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    return loss.item()


def contents(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return all tensors, gathered by torch."""
    options = StateDictOptions(full_state_dict=True)
    of_model, of_optim = get_state_dict(model, optim, options=options)
    found = {f"model.{name}": tensor.clone() for name, tensor in of_model.items()}
    for name, entry in of_optim["state"].items():
        found |= {f"optim.{name}.{key}": value.clone() for key, value in entry.items()}
    return found


def training(layout: Layout, seed: int) -> Training:
    """Build a job that has not stepped yet."""
    model, optim = built(layout, seed)
    return Training(model, optim, partial(step, model, optim), partial(contents, model, optim))


def save_and_go_on(uri: str, layout: Layout) -> Seen:
    """See :meth:`Training.save_and_go_on`."""
    return training(layout, 1).save_and_go_on(uri)


def load_and_go_on(uri: str, layout: Layout, used: bool = False) -> Seen:
    """Load into a new job, or with ``used`` into one that has trained, and train for two steps."""
    job = training(layout, 2)
    if used:
        job.step(9)
        with torch.no_grad():
            job.model(torch.ones(6, 4))  # SHARD_GRAD_OP, and a root module, keep what they gathered
    holdfast.load(uri, into=job.state)
    return job.seen()


def save_after_forward(uri: str, layout: Layout) -> dict[str, torch.Tensor]:
    """Save while the parameters gathered by a forward exist; return the state before it."""
    model, optim = built(layout, 1)
    step(model, optim, 0)
    held = contents(model, optim)
    model.eval()
    model(torch.ones(6, 4))  # gathers
    holdfast.save(uri, {"model": model, "optim": optim})
    return held


def refused(uri: str) -> dict[str, tuple[str, str]]:
    """Save and load unsupported forms of FSDP1's state; return the errors of both."""
    layout = Layout("FULL_SHARD")
    model, optim = built(layout, 1)
    step(model, optim, 0)
    refusals = Refusals(uri, {"model": model, "optim": optim})
    tried = refusals.tried
    tried("optimizer alone", {"optim": optim})
    flat_model, flat_optim = built(Layout("FULL_SHARD", orig=False), 1)
    tried("flat optimizer alone", {"optim": flat_optim})
    with FullyShardedDataParallel.summon_full_params(flat_model):
        tried("gathered", {"model": flat_model})
    column = nn.Linear(3, 4)
    column.weight = nn.Parameter(column.weight.detach().t().contiguous().t())
    tried("column-major", {"model": wrapped(column, layout)})
    tried("own making", {"model": wrapped(nn.Sequential(nn.Linear(2, 2), Extra()), layout)})
    for entry in optim.state.values():
        entry["rows"] = torch.ones(entry["exp_avg"].numel() + 1)
    tried("other shape", {"model": model, "optim": optim})
    return refusals.errors


class Extra(nn.Linear):
    """A module with extra state."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: int) -> None:
        """Accept anything."""


def load_differing_steps(uri: str) -> list[str]:
    """Load steps that differ between parameters into a job where FSDP1 has one step for all; return
    the errors. Do the same with factored moments, which FSDP1 cannot hold."""
    model, optim = built(Layout("plain"), 1)
    step(model, optim, 0)
    first = next(iter(optim.state.values()))
    first["step"] += 1
    holdfast.save(f"{uri}/steps", {"model": model, "optim": optim})
    first["exp_avg"] = first["exp_avg"][0].clone()
    holdfast.save(f"{uri}/rows", {"model": model, "optim": optim})
    fresh, fresh_optim = built(Layout("FULL_SHARD", orig=False), 2)
    into = {"model": fresh, "optim": fresh_optim}
    return [
        outcome(lambda name=name: holdfast.load(f"{uri}/{name}", into=into))
        for name in ("steps", "rows")
    ]


def save_replaced_data(uri: str) -> dict[str, torch.Tensor]:
    """Save a model whose original parameters were given new data; return the state."""
    model, optim = built(Layout("FULL_SHARD"), 1)
    step(model, optim, 0)
    for parameter in model.parameters():
        parameter.data = parameter.data + 1
    holdfast.save(uri, {"model": model, "optim": optim})
    return contents(model, optim)
