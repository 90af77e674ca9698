"""A training loop under Ray Train, as its user writes it. As a script: arguments are the folder,
the last step, and the number of workers, 0 for Ray's local mode."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
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
        if step == config.get("fails_at") and not resumed:
            raise RuntimeError("a worker fails")
        if step % 2 == 0:
            save_and_report({"loss": loss.item()}, state, step=step, folder=config["folder"])


def fit(out: Path, last: int) -> Any:
    """Train in this process, or with the other ones of torchrun, up to step ``last``."""
    config = {"out": str(out), "folder": str(out / "run"), "last": last}
    return TorchTrainer(
        loop, train_loop_config=config, scaling_config=ScalingConfig(num_workers=0)
    ).fit()


def fit_on_a_cluster(out: Path, last: int, workers: int) -> Any:
    """The same on a cluster of this host, whose storage is Ray's; workers fail once, at step 5."""
    ray.init(num_cpus=workers, include_dashboard=False, object_store_memory=100 << 20)
    config = {"out": str(out), "folder": None, "last": last, "fails_at": 5}
    trainer = TorchTrainer(
        loop,
        train_loop_config=config,
        torch_config=TorchConfig("gloo"),
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            "run",
            storage_path=str(out),
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    try:
        return trainer.fit()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    if int(sys.argv[3]):
        print(fit_on_a_cluster(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
    else:
        fit(Path(sys.argv[1]), int(sys.argv[2]))
