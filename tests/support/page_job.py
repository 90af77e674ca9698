"""A how-to page as a job: its blocks of Python are the script, this program is what its reader has.

As a script: see :func:`main`. Every rank trains on the same batches, so that losses do not depend
on the number of ranks.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from support.framework_jobs import (
    PAGE_TOTAL,
    die,
    documented,
    leave,
    newest_step,
    note_loss,
    run_script,
)

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
_COMMIT_S_MAX = 30.0


class Page:
    """The script of a page, and the moment when its job is killed."""

    def __init__(self, name: str, folder: Path, die_at: int | None) -> None:
        self.folder = folder
        self.blocks = documented(name)
        self._die_at = die_at

    def run(self, names: dict[str, Any], blocks: slice = slice(None)) -> dict[str, Any]:
        """Run blocks as one script; return the names that it leaves."""
        return run_script("\n".join(self.blocks[blocks]), self.folder, names)

    def note(self, step: int, loss: Any) -> None:
        """Record a step, counted from 1. The last rank is killed after the fatal one, once the step
        that was saved before it is committed."""
        note_loss(self.folder, step, loss, RANK)
        if step == self._die_at and RANK == WORLD - 1:
            deadline = time.monotonic() + _COMMIT_S_MAX
            while newest_step(self.folder / "run") < step - 2:
                assert time.monotonic() < deadline, "the step is not committed"
                time.sleep(0.05)
            die()


def network() -> nn.Module:
    """Return a small model."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    """Return the loss of a model of 8 inputs on the batch of a step, which all ranks have."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    return nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))


def plain(page: Page, kind: str) -> None:
    """A loop of one's own; ``kind`` is how a job of several ranks divides the model."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model = network()
    if WORLD > 1:
        dist.init_process_group("gloo")
        if kind == "ddp":
            model = DistributedDataParallel(model)
        elif kind == "fsdp2":
            fully_shard(model)
        else:
            cpu = torch.device("cpu")
            model = FullyShardedDataParallel(model, device_id=cpu, use_orig_params=True)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optim, 5, 0.5)

    def train_step() -> float:
        step = schedule.last_epoch + 1
        loss = loss_of(model, step)
        optim.zero_grad()
        loss.backward()
        optim.step()
        schedule.step()
        page.note(step, loss)
        return loss.item()

    page.run(
        {
            "model": model,
            "optim": optim,
            "schedule": schedule,
            "total": PAGE_TOTAL,
            "train_step": train_step,
        },
        slice(1),
    )


def accelerate(page: Page, kind: str) -> None:
    """A loop under Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    model, optim = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))

    def train_step(step: int) -> float:
        loss = loss_of(model, step)
        optim.zero_grad()
        accelerator.backward(loss)
        optim.step()
        page.note(step, loss)
        return loss.item()

    page.run({"accelerator": accelerator, "total": PAGE_TOTAL, "train_step": train_step})
    accelerator.end_training()


PAGES: dict[str, Callable[[Page, str], None]] = {
    "checkpoint-a-training-loop.md": plain,
    "use-with-accelerate.md": accelerate,
}


def main() -> None:
    """Run a page's script, which resumes, to its end, or until killed after a step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("page", choices=PAGES)
    parser.add_argument("--kind", default="")
    parser.add_argument("--die-at", type=int)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    PAGES[args.page](Page(args.page, args.folder, args.die_at), args.kind)


if __name__ == "__main__":
    main()
    leave()
