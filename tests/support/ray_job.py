"""A training loop under Ray Train, in its local mode or on a cluster of this host. Arguments: see
:func:`main`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from holdfast.storage.integrations.ray import load_reported, save_and_report
from support.framework_jobs import die, note_loss


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
    first = state["step"] + 1
    context = ray.train.get_context()
    for step in range(state["step"] + 1, config["last"] + 1):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optim.zero_grad()
        loss.backward()
        optim.step()
        note_loss(config["out"], step, loss, context.get_world_rank())
        state["step"] = step
        if step == config.get("die_at") and first == 1 and context.get_world_rank() == 1:
            die()
        if step % 2 == 0:
            save_and_report({"loss": loss.item()}, state, step=step, folder=config["folder"])


def fit(out: Path, last: int) -> Any:
    """Train in this process, or with the other ones of torchrun, up to step ``last``."""
    config = {"out": str(out), "folder": str(out / "run"), "last": last}
    return TorchTrainer(
        loop, train_loop_config=config, scaling_config=ScalingConfig(num_workers=0)
    ).fit()


def fit_on_cluster(out: Path, last: int, workers: int, die_at: int | None) -> Any:
    """Train with workers of a cluster of this host. The second one is killed at a step, once."""
    ray.init(num_cpus=workers + 1, include_dashboard=False, log_to_driver=False)
    config = {"out": str(out), "folder": None, "last": last, "die_at": die_at}
    return TorchTrainer(
        loop,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name="run",
            storage_path=str(out / "storage"),
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=3),
        ),
    ).fit()


def main() -> None:
    """Train up to a step: in this process, or with the other ones of torchrun, or on a cluster."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("last", type=int)
    parser.add_argument("--cluster", type=int, metavar="WORKERS")
    parser.add_argument("--die-at", type=int)
    args = parser.parse_args()
    if args.cluster is None:
        fit(args.out, args.last)
    else:
        fit_on_cluster(args.out, args.last, args.cluster, args.die_at)


if __name__ == "__main__":
    main()
