"""Loops under Accelerate in two parts, one for each combination of options, with Accelerate's own
checkpoints or ours."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from torch import nn

from holdfast.storage.integrations.accelerate import async_save_state, load_state, save_state
from support.accelerate_job import Steps

BATCHES = 6
"""Per epoch and rank."""
MIDDLE, END = 8, 14
"""The last steps of the two parts of a run."""
FIRST = 5
"""The iteration of the first save."""
NEXT, TAKEN = "next", "taken"
"""The first free iteration, and the newest one that is saved."""
SWITCHED = "switched"
"""Instead of a kind of save: Accelerate itself saves in the first part."""

Case = dict[str, Any]
AXES: dict[str, list[Any]] = {
    "total_limit": [None, 1, 2, 3],
    "back": [0, 1, 2],  # how many checkpoints before the newest to load
    "iteration": [NEXT, 0, TAKEN],  # of the first save in the second part
    "is_automatic": [True, False],
    "objects": [(1, 1), (2, 2), (1, 2), (2, 1)],  # registered in the two parts
    "accumulation": [1, 2],
    "is_stateful": [True, False],
    "mode": ["sync", "async", "lazy", SWITCHED],
}


def is_comparable(case: Case) -> bool:
    """Return whether a case has one outcome with Accelerate, and begins alike with ours.

    With one checkpoint at most, our asynchronous saves keep two; and Accelerate's ranks hang if one
    deletes a taken name just before the other looks for it.
    """
    return case["total_limit"] != 1 or (
        case["mode"] in ("sync", SWITCHED) and case["iteration"] != TAKEN
    )


_ALL: list[Case] = [
    dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())
]
CASES = [case for case in _ALL if is_comparable(case)][::23]


class Loop:
    """A training loop and its accelerator."""

    def __init__(self, case: Case, folder: Path, iteration: int, objects: int, mode: str) -> None:
        PartialState._reset_state()
        AcceleratorState._reset_state()
        self.folder, self.mode, self.is_stateful = folder, mode, case["is_stateful"]
        self.is_automatic = case["is_automatic"]
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=case["accumulation"],
            dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=case["is_stateful"]),
            project_config=ProjectConfiguration(
                str(folder),
                automatic_checkpoint_naming=case["is_automatic"],
                total_limit=case["total_limit"],
                iteration=iteration,
            ),
        )
        torch.manual_seed(dist.get_rank())
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1))
        optim = torch.optim.AdamW(model.parameters(), lr=0.01)
        x = torch.randn(BATCHES * 8, 8, generator=torch.Generator().manual_seed(3))
        data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
        self.model, self.optim, self.schedule, self.loader = self.accelerator.prepare(
            model,
            optim,
            torch.optim.lr_scheduler.StepLR(optim, 5, 0.5),
            torch.utils.data.DataLoader(data, batch_size=4, shuffle=True),
        )
        self.objects = [Steps() for _ in range(objects)]
        self.accelerator.register_for_checkpointing(*self.objects)

    def path(self, iteration: int) -> Path:
        """Return the folder of a checkpoint."""
        return self.folder / "checkpoints" / f"checkpoint_{iteration}"

    def save(self) -> None:
        """Save as the case says."""
        accelerator = self.accelerator
        to = None if self.is_automatic else self.path(accelerator.save_iteration)
        if self.mode == "stock":
            accelerator.save_state(to)
        elif self.mode == "sync":
            save_state(accelerator, to)
        else:
            self.saving = async_save_state(accelerator, to, lazy=self.mode == "lazy")

    def load(self, iteration: int | None) -> None:
        """Load a checkpoint, or the newest."""
        load = Accelerator.load_state if self.mode == "stock" else load_state
        load(self.accelerator, None if iteration is None else self.path(iteration))

    def train(self, until: int) -> dict[int, float]:
        """Train up to a step, saving every second one; return the losses."""
        losses: dict[int, float] = {}
        steps = self.objects[0]
        loader = self.loader
        if not self.is_stateful and steps.done % BATCHES:
            loader = self.accelerator.skip_first_batches(loader, steps.done % BATCHES)
        while steps.done < until:
            for x, y in loader:
                with self.accelerator.accumulate(self.model):
                    loss = nn.functional.mse_loss(self.model(x), y)
                    self.accelerator.backward(loss)
                    self.optim.step()
                    self.schedule.step()
                    self.optim.zero_grad()
                steps.done += 1
                losses[steps.done] = loss.item()
                if steps.done % 2 == 0:
                    self.save()
                if steps.done == until:
                    break
            loader = self.loader
        if self.mode in ("async", "lazy"):
            self.saving.wait()
        return losses


def left(folder: Path) -> list[int]:
    """Return the iterations whose checkpoints have files."""
    dist.barrier()
    found = {path.parent.name for path in folder.glob("checkpoints/*/*") if path.is_file()}
    dist.barrier()
    return sorted(int(name.removeprefix("checkpoint_")) for name in found)


def outcome(parent: str, number: int, is_stock: bool) -> tuple[Any, ...]:
    """Train as a case says.

    Return the iterations left after each part; the losses of the second, or how it failed; its next
    iteration; and the step that the checkpoint to resume from then has.
    """
    case = CASES[number]
    folder = Path(parent, f"{number}-{is_stock}")
    second = "stock" if is_stock else case["mode"].replace(SWITCHED, "sync")
    first = "stock" if case["mode"] == SWITCHED else second
    Loop(case, folder, FIRST, case["objects"][0], first).train(MIDDLE)
    before = left(folder)
    iteration = {NEXT: before[-1] + 1, TAKEN: before[-1]}.get(case["iteration"], 0)
    loop = Loop(case, folder, iteration, case["objects"][1], second)
    back = case["back"]
    losses: Any = "not loaded"
    with contextlib.suppress(Exception):
        loop.load(None if back == 0 and case["is_automatic"] else before[-1 - back :][0])
        losses = "not saved"
        losses = loop.train(END)
    has_failed = isinstance(losses, str)
    after = left(folder), losses, loop.accelerator.save_iteration
    newest = before[-1] if has_failed else loop.accelerator.save_iteration - 1
    loop = Loop(case, folder, 0, case["objects"][0 if has_failed else 1], second)
    loop.load(None if case["is_automatic"] else newest)
    return before, *after, loop.objects[0].done


def outcomes(parent: str, numbers: list[int]) -> dict[int, Any]:
    """Return the outcome of each case with Accelerate's own checkpoints, and with ours."""
    os.environ |= {"WORLD_SIZE": str(dist.get_world_size()), "RANK": str(dist.get_rank())}
    os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # of a group that exists
    return {
        number: (outcome(parent, number, True), outcome(parent, number, False))
        for number in numbers
    }
