"""Training of a sharded model that torch_checkpointing saves and loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.barriers import DefaultStoreBarrierConfig
from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.staging import CheckpointStagerConfig


def settings(name: str, *, asynchronous: bool = False) -> dict[str, Any]:
    """Return a manager's configuration for models and optimizers on the CPU, without storage.

    ``name``: of the storage.
    """
    spec = ItemSpec(resharder=DefaultResharder(), required=False)
    # The default is a counter of the process, which may differ between ranks.
    generation = f"{name} {dist.get_world_size() if dist.is_initialized() else 1}"
    writer = CheckpointWriterConfig(barrier_config=DefaultStoreBarrierConfig(generation=generation))
    save: Any = SyncCheckpointSaverConfig(writer_config=writer)
    if asynchronous:
        staging = CheckpointStagerConfig(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        save = AsyncCheckpointSaverConfig(writer_config=writer, staging_config=staging)
    return {"items": dict.fromkeys(("model", "momenta"), spec), "save": save}


def train(
    checkpoints: CheckpointManager, first: int, last: int, note: Callable[[int, float], None]
) -> None:
    """Train from the checkpoint before step ``first``, if that is not 1, to step ``last``, and save
    that; pass each step and its loss to ``note``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    fully_shard(model)
    momenta = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    if first > 1:
        into = {"model": model.state_dict(), "momenta": momenta}
        checkpoints.load(f"step-{first - 1}", into, strict=True)
    for step in range(first, last + 1):
        model.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                assert isinstance(p.grad, DTensor)
                momenta[name].mul_(0.9).add_(p.grad)
                p.sub_(momenta[name], alpha=0.01)
        note(step, loss.item())
    with _OnTheCpu():
        checkpoints.save(f"step-{last}", {"model": model.state_dict(), "momenta": momenta})
    dist.barrier()
    checkpoints.close()


class _OnTheCpu(TorchFunctionMode):
    """Moves tensors to the CPU: torch_checkpointing gathers metadata of shards in tensors on a GPU,
    whatever the process group."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.cuda:
            return args[0]
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)
