"""A job under Lightning's Trainer, as its user starts it. Arguments: see :func:`main`."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.storage.integrations.lightning import (
    HoldfastAsyncCheckpointIO,
    HoldfastCheckpointIO,
    HoldfastFSDPStrategy,
    HoldfastModelParallelStrategy,
)
from support.framework_jobs import die, leave, note_loss

BATCHES = 6
"""Batches per epoch; checkpoints are saved within epochs, too."""
PLUGINS: dict[str, Any] = {
    "sync": HoldfastCheckpointIO,
    "async": HoldfastAsyncCheckpointIO,
    "lazy": lambda: HoldfastAsyncCheckpointIO(lazy=True),
}
STRATEGIES: dict[str, Any] = {
    "auto": lambda world: "ddp" if world > 1 else "auto",
    "fsdp2": lambda world: HoldfastModelParallelStrategy(
        data_parallel_size=world, tensor_parallel_size=1
    ),
    "tp": lambda world: HoldfastModelParallelStrategy(
        data_parallel_size=1, tensor_parallel_size=world
    ),
    "fsdp1": lambda world: HoldfastFSDPStrategy(),
}
"""Strategies by name. Each function takes the number of ranks."""


class Net(lightning.LightningModule):
    """Two layers, with dropout."""

    def __init__(self, args: argparse.Namespace, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.args = args
        self.layers = nn.Sequential(
            nn.Linear(8, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 1)
        )

    def configure_model(self) -> None:
        if self.args.strategy == "fsdp2":
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])
        elif self.args.strategy == "tp":
            plan = {"0": ColwiseParallel(), "3": RowwiseParallel()}
            parallelize_module(self.layers, self.device_mesh["tensor_parallel"], plan)
        elif self.args.strategy == "fsdp1":  # Lightning itself would require a GPU
            cpu = torch.device("cpu")
            self.layers = FullyShardedDataParallel(self.layers, device_id=cpu, use_orig_params=True)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.layers(x), y)
        note_loss(self.args.out, self.global_step, loss)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if self.global_step == self.args.die_at:
            die()

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        torch.manual_seed(self.global_step)  # Lightning keeps no generators in its checkpoints

    def configure_optimizers(self) -> Any:
        optim = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optim, 5, 0.5)
        return [optim], [{"scheduler": schedule, "interval": "step"}]


class Seen(Callback):
    """A callback whose state is a set and a path."""

    def __init__(self, folder: Path) -> None:
        self.state: dict[str, Any] = {"steps": set(), "folder": folder}

    def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
        self.state["steps"].add(trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


def batches(args: argparse.Namespace) -> Any:
    """Return the batches of this rank, the same in every run and for ranks that share a model."""
    made = torch.Generator().manual_seed(3)
    world = 1 if args.strategy == "tp" else args.world
    x = torch.randn(BATCHES * world * 4, 8, generator=made)
    rank = int(os.environ.get("LOCAL_RANK", "0")) % world
    mine = torch.utils.data.TensorDataset(x[rank::world], x[rank::world].sum(1, keepdim=True))
    return StatefulDataLoader(mine, batch_size=4)


def main() -> None:
    """Train to a step, from ``--resume`` if given, or until killed at a step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--folder")
    parser.add_argument("--plugin", choices=PLUGINS, default="sync")
    parser.add_argument("--strategy", choices=STRATEGIES, default="auto")
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--die-at", type=int)
    parser.add_argument("--resume")
    parser.add_argument("--again", help="where to save at the end")
    args = parser.parse_args()
    torch.manual_seed(1)
    folder = args.folder or os.path.join(args.out, "checkpoints")
    keep = ModelCheckpoint(
        folder,
        filename="{step}",
        monitor="step",
        mode="max",
        save_top_k=2,
        save_last=True,
        every_n_train_steps=2,
    )
    seen = Seen(Path(args.out))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=args.world,
        strategy=STRATEGIES[args.strategy](args.world),
        max_steps=args.steps,
        plugins=[PLUGINS[args.plugin]()],
        callbacks=[seen, keep],
        default_root_dir=args.out,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(args), batches(args), ckpt_path=args.resume)
    if args.again:
        trainer.save_checkpoint(args.again)
    left = trainer.strategy.broadcast(keep.best_k_models)
    if trainer.is_global_zero:
        done = {
            "best": sorted(left),
            "last": keep.last_model_path,
            "step": trainer.global_step,
            "seen": sorted(seen.state["steps"]),
        }
        Path(args.out, "done.json").write_text(json.dumps(done))


if __name__ == "__main__":
    main()
    leave()
