"""A training loop under Ray Train in its local mode. Arguments: the folder and the last step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from holdfast.storage.integrations.ray import load_reported, save_and_report
from support.framework_jobs import note_loss


def loop(config: dict[str, Any]) -> None:
    """Train from what was reported last, saving every second step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    if dist.is_initialized():
        fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optim": optim, "step": 0}
    resumed = load_reported(state, folder=config["folder"])
    assert resumed == (state["step"] != 0)
    context = ray.train.get_context()
    for step in range(state["step"] + 1, config["last"] + 1):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optim.zero_grad()
        loss.backward()
        optim.step()
        note_loss(config["out"], step, loss, context.get_world_rank())
        state["step"] = step
        if step % 2 == 0:
            save_and_report({"loss": loss.item()}, state, step=step, folder=config["folder"])


def fit(out: Path, last: int) -> Any:
    """Train in this process, or with the other ones of torchrun, up to step ``last``."""
    config = {"out": str(out), "folder": str(out / "run"), "last": last}
    return TorchTrainer(
        loop, train_loop_config=config, scaling_config=ScalingConfig(num_workers=0)
    ).fit()


if __name__ == "__main__":
    fit(Path(sys.argv[1]), int(sys.argv[2]))
