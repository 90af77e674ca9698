"""Jobs of Lightning's Trainer in parts, one for each combination of ModelCheckpoint's options, with
Lightning's own checkpoints or ours."""

from __future__ import annotations

import itertools
import logging
import os
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.storage.integrations.lightning import (
    HoldfastAsyncCheckpointIO,
    HoldfastCheckpointIO,
    HoldfastModelParallelStrategy,
)
from holdfast.storage.integrations.newest import is_stock

PLUGINS: dict[str, Any] = {
    "sync": HoldfastCheckpointIO,
    "async": HoldfastAsyncCheckpointIO,
    "lazy": lambda: HoldfastAsyncCheckpointIO(lazy=True),
}
MIDDLE, END = 8, 12
"""The last steps of the two parts of a run."""
SWITCHED = "switched"
"""Instead of a plugin: Lightning's own checkpoints in the first part."""

Case = tuple[Any, ...]
CASES: list[Case] = list(
    itertools.product(
        [(0, None), (1, None), (-1, None), (1, "score"), (2, "score")],  # save_top_k, monitor
        [(None, None), (True, True), ("link", "link"), (True, "link"), ("link", True)],  # save_last
        [None, 6],  # the step to go back to
        [None, 11],  # the step at which a batch fails, with save_on_exception
        [2, 3],  # every_n_train_steps
        [*PLUGINS, SWITCHED],
    )
)


class Net(lightning.LightningModule):
    """A layer whose steps are rated by a score."""

    def __init__(self, fails_at: int | None = None, is_sharded: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 2)
        self.fails_at, self.is_sharded = fails_at, is_sharded
        self.losses: dict[int, float] = {}

    def configure_model(self) -> None:
        """Shard the layer, with FSDP2."""
        if self.is_sharded:
            fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """Return the loss of a batch."""
        if self.global_step == self.fails_at:
            raise ZeroDivisionError
        loss = self.layer(batch[0]).pow(2).mean()
        self.losses[self.global_step] = float(loss.detach())
        self.log("score", float(self.global_step * 7 % 5))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def strategy_of(name: str, plugin: str | None) -> Any:
    """Return a strategy, for Lightning's own checkpoints if there is no plugin."""
    if name != "fsdp2":
        return name
    kind = ModelParallelStrategy if plugin is None else HoldfastModelParallelStrategy
    return kind(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)


def train(
    folder: Path,
    until: int,
    resume: str | None = None,
    plugin: str | None = None,
    strategy: str = "auto",
    fails_at: int | None = None,
    **options: Any,
) -> Net:
    """Train a tiny model until a step, with a checkpoint every two steps unless ``options`` differ;
    return it."""
    net = Net(fails_at, strategy == "fsdp2")
    rows = torch.arange(192.0).reshape(48, 4)[: 24 if strategy == "auto" else 48] / 96
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=2)
    options = {"every_n_train_steps": 2, "save_on_exception": fails_at is not None} | options
    trainer = lightning.Trainer(
        max_steps=until,
        accelerator="cpu",
        devices=1 if strategy == "auto" else dist.get_world_size(),
        strategy=strategy_of(strategy, plugin),
        callbacks=[ModelCheckpoint(folder, "{step}", **options)],
        plugins=None if plugin is None else [PLUGINS[plugin]()],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(net, data, ckpt_path=resume)
    except ZeroDivisionError:
        trainer.strategy.teardown()
    return net


def step_of(path: Path) -> int | None:
    """Return the step of a checkpoint."""
    if path.is_dir() and not is_stock(path, "meta.pt"):
        with holdfast.open(path) as c:
            return c.step
    file = path / "meta.pt" if path.is_dir() else path
    return int(torch.load(file, weights_only=True)["global_step"])


def left(folder: Path) -> dict[str, int | None]:
    """Return the steps of the checkpoints in a folder, by name."""
    if dist.is_initialized():
        dist.barrier()
    found = {path.name: step_of(path) for path in sorted(folder.glob("*.ckpt"))}
    if dist.is_initialized():
        dist.barrier()
    return found


def checkpoint_of(folder: Path, step: int | None) -> str | None:
    """Return the checkpoint of that step, or else the newest; None if there is none."""
    by_step = {}
    for path in sorted(folder.glob("step=*.ckpt")):  # in order of their versions
        by_step[int(path.stem.removeprefix("step=").partition("-v")[0])] = path
    found = by_step.get(step or -1) or by_step.get(max(by_step, default=-1))
    return None if found is None else str(found)


def outcome(folder: Path, case: Case, strategy: str, is_stock: bool) -> tuple[Any, ...]:
    """Train a run in two parts; then resume from its last checkpoints, each for itself.

    Return the checkpoints after each part, the losses of the second, and those after each resume.
    """
    (top, monitor), last, back, fails_at, every, plugin = case
    options = {
        "save_top_k": top,
        "monitor": monitor,
        "save_last": last[0],
        "every_n_train_steps": every,
        "strategy": strategy,
    }
    second = None if is_stock else plugin.replace(SWITCHED, "sync")
    train(folder, MIDDLE, plugin=None if plugin == SWITCHED else second, **options)
    before = left(folder)
    resume = checkpoint_of(folder, back)
    options["save_last"] = last[1]
    losses = train(folder, END, resume, second, fails_at=fails_at, **options).losses
    after = left(folder)
    ends = [str(path) for path in folder.glob("last*.ckpt")] or [checkpoint_of(folder, None)]
    options["save_last"] = None
    again = {
        end and Path(end).name: train(folder / "again", END + 1, end, second, **options).losses
        for end in sorted(ends, key=str)
    }
    return before, after, losses, again


def outcomes(parent: str, numbers: list[int], strategy: str) -> dict[int, Any]:
    """Return the outcome of each case with Lightning's own checkpoints, and with ours."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0", "WORLD_SIZE": world}
    os.environ |= {"LOCAL_WORLD_SIZE": world, "TORCHELASTIC_RUN_ID": "matrix"}
    for logger in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    found = {}
    for number in numbers:
        folders = [Path(parent, f"{number}-{kind}") for kind in ("stock", "ours")]
        found[number] = tuple(
            outcome(folder, CASES[number], strategy, is_stock)
            for folder, is_stock in zip(folders, (True, False), strict=True)
        )
    return found
