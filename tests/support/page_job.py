"""A how-to page as a job: its Python blocks are the script, and this program is the reader's part.

As a script: see :func:`main`. Every rank trains on the same batches, so that losses do not depend
on the number of ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import holdfast
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


@dataclass
class Page:
    """The script of a page on one rank, its last step, and the step after which the last rank is
    killed."""

    blocks: list[str]
    folder: Path
    total: int
    die_at: int | None
    rank: int = RANK
    world: int = WORLD

    def run(
        self, names: dict[str, Any], first: int = 0, together: int = 1, alone: int | None = None
    ) -> dict[str, Any]:
        """Run blocks as one script: from ``first`` up to ``together`` in a job of several ranks, up
        to ``alone`` (default: all) without others. Return the names that it leaves."""
        blocks = self.blocks[first : alone if self.world == 1 else together]
        return run_script("\n".join(blocks), self.folder, names)

    def note(self, step: int, loss: Any) -> None:
        """Record a step, counted from 1. After the fatal one, kill this process, once, when the
        step that was saved before it is committed."""
        note_loss(self.folder, step, loss, self.rank)
        died = self.folder / f"died-{step}"
        if step == self.die_at and self.rank == self.world - 1 and not died.exists():
            deadline = time.monotonic() + _COMMIT_S_MAX
            while newest_step(self.folder / "run") < step - 2:
                assert time.monotonic() < deadline, "the step is not committed"
                time.sleep(0.05)
            died.touch()
            die()


def network() -> nn.Module:
    """Return a small model."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def join() -> None:
    """Join the process group of the job, which may have one rank."""
    if WORLD > 1:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    """Return the loss of a model of 8 inputs on the batch of a step, which all ranks have."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    return nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))


def stepped(page: Page, model: nn.Module, optim: torch.optim.Optimizer, step: int) -> float:
    """Train for a step; return its loss."""
    loss = loss_of(model, step)
    optim.zero_grad()
    loss.backward()
    optim.step()
    page.note(step, loss)
    return loss.item()


def plain(page: Page, kind: str) -> None:
    """Run a plain training loop; ``kind``: how a job of several ranks divides the model."""
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
        schedule.step()
        return stepped(page, model, optim, schedule.last_epoch)

    page.run(
        {
            "model": model,
            "optim": optim,
            "schedule": schedule,
            "total": page.total,
            "train_step": train_step,
        },
        alone=1,
    )


def dcp(page: Page, kind: str) -> None:
    """Run a loop with a sharded model, whose state is as DCP's users write it."""
    from torch.distributed.checkpoint import state_dict
    from torch.distributed.fsdp import fully_shard

    model = network()
    if WORLD > 1:
        dist.init_process_group("gloo")
        fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)

    class Model:
        def state_dict(self) -> dict[str, Any]:
            return state_dict.get_model_state_dict(model)

        def load_state_dict(self, stored: dict[str, Any]) -> None:
            state_dict.set_model_state_dict(model, stored)

    class Optim:
        def state_dict(self) -> dict[str, Any]:
            return state_dict.get_optimizer_state_dict(model, optim)

        def load_state_dict(self, stored: dict[str, Any]) -> None:
            state_dict.set_optimizer_state_dict(model, optim, stored)

    state = {"model": Model(), "optim": Optim(), "step": 0}

    def train_step() -> None:
        stepped(page, model, optim, state["step"])

    names = {"state": state, "model": model, "optim": optim}
    page.run({**names, "total": page.total, "train_step": train_step}, together=3)


def accelerate(page: Page, kind: str) -> None:
    """Run a loop under Accelerate."""
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

    names = {"accelerator": accelerator, "total": page.total, "train_step": train_step}
    page.run(names, together=3)
    accelerator.end_training()


def lightning(page: Page, kind: str) -> None:
    """Run Lightning's Trainer with a module; its other arguments come from the environment."""
    os.environ |= {
        "PL_TRAINER_ACCELERATOR": "cpu",
        "PL_TRAINER_DEVICES": str(WORLD),
        "PL_TRAINER_MAX_STEPS": str(page.total),
        "PL_TRAINER_ENABLE_PROGRESS_BAR": "False",
        "PL_TRAINER_LOGGER": "False",
    }
    import lightning

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = loss_of(self.layers, self.global_step + 1)
            self.log("loss", loss)
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            page.note(self.global_step, outputs["loss"])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    data = torch.utils.data.DataLoader(torch.zeros(1000, 1))
    page.run({"model": Net(), "data": data})
    if (page.folder / "run.ckpt").exists():
        stock = lightning.Trainer()
        stock.fit(Net(), data, ckpt_path=str(page.folder / "run.ckpt"))
        assert stock.global_step == page.total


def transformers(page: Page, kind: str) -> None:
    """Run Hugging Face's Trainer with a language model, samples and arguments."""
    import transformers

    from support.trainer_job import model, samples

    class Note(transformers.TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **others: Any) -> None:
            if "loss" in logs:
                page.note(state.global_step, logs["loss"])

    transformers.trainer.DEFAULT_CALLBACKS.append(Note)
    arguments = transformers.TrainingArguments(
        str(page.folder / "out"),
        max_steps=page.total,
        save_steps=4,
        logging_steps=1,
        learning_rate=0.01,
        per_device_train_batch_size=4 // WORLD,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    alike = samples()[:1] * 48  # equal, so that it does not matter which ones a rank sees
    names = {"model": model(lora=False, dropout=0.0), "arguments": arguments, "data": alike}
    page.run(names, alone=2)


def torchtitan(page: Page, kind: str) -> None:
    """Run the page's configuration with parts of torchtitan's Trainer, which itself needs a GPU."""
    from support.torchtitan_job import Job, network

    join()
    configured = dataclasses.asdict(page.run({}, alone=1)["checkpoint"])
    Job(str(page.folder), configured | {"exclude_from_loading": ["dataloader"]}).run(note=page.note)
    page.run({"model": network(sharded=False)}, first=1)


def ray(page: Page, kind: str) -> None:
    """Run a training function of Ray Train: in its local mode, or on ``kind`` workers of a cluster
    on this host, which Ray restarts if they fail."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    from torch.distributed.fsdp import fully_shard

    names: dict[str, Any] = {}

    def loop() -> None:
        context = ray.train.get_context()
        here = dataclasses.replace(
            page, rank=context.get_world_rank(), world=context.get_world_size()
        )
        model = network()
        if dist.is_initialized():
            fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def train(state: dict[str, Any]) -> float:
            return stepped(here, model, optimizer, state["step"])

        given = {"model": model, "optimizer": optimizer, "steps": here.total, "train": train}
        names.update(here.run(given, alone=1))

    if kind:
        ray.init(num_cpus=int(kind) + 1, include_dashboard=False, log_to_driver=False)
        TorchTrainer(
            loop,
            scaling_config=ScalingConfig(num_workers=int(kind)),
            run_config=RunConfig(
                name="run",
                storage_path=str(page.folder),
                failure_config=FailureConfig(max_failures=1),
            ),
        ).fit()
        return
    folder = f"folder={str(page.folder / 'run')!r}"  # as the page says of this mode
    for call in ("load_reported(state", 'step=state["step"]'):
        page.blocks[0] = page.blocks[0].replace(f"{call})", f"{call}, {folder})")
    result = TorchTrainer(loop, scaling_config=ScalingConfig(num_workers=0)).fit()
    page.run(names | {"result": result}, first=1)


def megatron(page: Page, kind: str) -> None:
    """Run a GPT of Megatron-core, whose layers are divided over the ranks."""
    from support.megatron_job import Job, Layout

    join()
    with Job(Layout(WORLD, tensor=WORLD), seed=1) as job:

        def train_step(step: int) -> float:
            (loss,) = job.train(step, step + 1)
            page.note(step, loss)
            return loss

        folder = page.folder / "described"
        folder.mkdir(exist_ok=True)
        names = {
            "model": job.model,
            "optimizer": job.optimizer,
            "metadata": job.metadata,
            "total": page.total,
            "train_step": train_step,
            "folder": folder,
        }
        names = page.run(names, alone=1)
        page.run(names | {"described": job.described()}, first=1, together=2)


def deepspeed(page: Page, kind: str) -> None:
    """Run an engine of DeepSpeed; ``kind`` is its stage."""
    from support import deepspeed_jobs

    join()
    engine, zero = deepspeed_jobs.built(deepspeed_jobs.Job(int(kind), dtype=torch.bfloat16), 1)

    def train_step() -> float:
        loss = deepspeed_jobs.stepped(engine, zero, engine.global_steps)
        page.note(engine.global_steps, loss)
        return loss

    names = {"holdfast": holdfast, "engine": engine, "total": page.total, "train_step": train_step}
    page.run(names, first=1, together=2)


def torch_checkpointing(page: Page, kind: str) -> None:
    """Run a loop that saves with the page's manager, configured for the CPU and for any ranks."""
    from support.torch_checkpointing_job import settings, train

    join()
    page.blocks[0] = page.blocks[0].replace("Config(storage", "Config(**settings, storage")
    for step in range(newest_step(page.folder / "run"), page.total, 4):
        manager = page.run({"settings": settings(f"step {step}")})["manager"]
        train(manager, step + 1, step + 4, page.note)


PAGES: dict[str, Callable[[Page, str], None]] = {
    "checkpoint-a-training-loop.md": plain,
    "coming-from-dcp.md": dcp,
    "use-fsdp1-and-deepspeed.md": deepspeed,
    "use-with-accelerate.md": accelerate,
    "use-with-hugging-face.md": transformers,
    "use-with-lightning.md": lightning,
    "use-with-megatron.md": megatron,
    "use-with-ray-train.md": ray,
    "use-with-torch-checkpointing.md": torch_checkpointing,
    "use-with-torchtitan.md": torchtitan,
}


def main() -> None:
    """Run a page's script, which resumes, to its end, or until killed after a step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("page", choices=PAGES)
    parser.add_argument("--kind", default="")
    parser.add_argument("--total", type=int, default=PAGE_TOTAL)
    parser.add_argument("--die-at", type=int)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    page = Page(documented(args.page), args.folder, args.total, args.die_at)
    PAGES[args.page](page, args.kind)


if __name__ == "__main__":
    main()
    leave()
