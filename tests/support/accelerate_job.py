"""A training loop under Accelerate, as its user writes it. Arguments: see :func:`main`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from torch import nn

from holdfast.storage.integrations.accelerate import load_state, save_state
from holdfast.storage.integrations.newest import newest_checkpoint
from support.framework_jobs import die, leave, note_loss
from support.sharded_on_cpu import SHARDED, deepspeed_config, let_accelerate_shard


class Steps:
    """An object of the user's, with a state."""

    def __init__(self) -> None:
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.done = state_dict["done"]


def accelerator_of(sharded: str | None) -> Accelerator:
    """Return one on the CPU that shards the model as asked."""
    if sharded is None:
        return Accelerator(cpu=True)
    let_accelerate_shard(sharded)
    plugin: dict[str, Any] = {}
    if sharded.startswith("zero"):
        plugin["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=deepspeed_config(sharded))
    else:
        plugin["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=int(sharded[-1]), use_orig_params=True, auto_wrap_policy="NO_WRAP"
        )
    return Accelerator(**plugin)


def main() -> None:
    """Train for twelve steps, from the newest checkpoint if any, or until killed at a step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--die-at", type=int)
    parser.add_argument("--sharded", choices=SHARDED)
    args = parser.parse_args()
    accelerator = accelerator_of(args.sharded)
    rank = accelerator.process_index
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1))
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optim, 5, 0.5)
    model, optim, schedule = accelerator.prepare(model, optim, schedule)
    steps = Steps()
    accelerator.register_for_checkpointing(steps)
    checkpoints = Path(args.out, "checkpoints")
    newest = newest_checkpoint(checkpoints)
    accelerator.wait_for_everyone()
    if newest is not None:
        load_state(accelerator, newest)
    while steps.done < 12:
        generator = torch.Generator().manual_seed(100 * rank + steps.done)
        x = torch.randn(4, 8, generator=generator)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        accelerator.backward(loss)
        optim.step()
        schedule.step()
        optim.zero_grad()
        note_loss(args.out, steps.done, loss)
        steps.done += 1
        if steps.done == args.die_at:
            die()
        if steps.done % 2 == 0:
            save_state(accelerator, checkpoints / f"step-{steps.done}", step=steps.done)
    accelerator.end_training()


if __name__ == "__main__":
    main()
    leave()
