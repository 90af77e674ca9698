"""Runs of torchtitan's loop in two parts, one for each combination of the manager's options."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpointer import CheckpointManager

from holdfast.storage.integrations.torchtitan import HoldfastCheckpointManager
from support.torchtitan_job import Job

MIDDLE, END = 7, 12
"""The last steps of the two parts of a run."""
SWITCHED = "switched"
"""Instead of an asynchronous mode: torchtitan's own manager runs the first part."""

Case = dict[str, Any]
AXES: dict[str, list[Any]] = {
    "keep_latest_k": [0, 2, 3],
    "load_step": [-1, 4, 6, 0, 5],
    "interval": [2, 3],
    "last_save_model_only": [False, True],
    "enable_first_step_checkpoint": [False, True],
    "begins": ["anew", "from a seed", "from a model", "from a job"],
    "again": [{}, {"exclude_from_loading": ["lr_scheduler"]}, {"load_only": True}],
    "async_mode": ["disabled", "async", "async_with_pinned_mem", SWITCHED],
}
CASES: list[Case] = [
    dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())
][::29]


def left(folder: Path) -> list[int]:
    """Return the steps that have a folder with files."""
    dist.barrier()
    found = {path.parent.name for path in folder.glob("step-*/*") if path.is_file()}
    dist.barrier()
    return sorted(int(name.removeprefix("step-")) for name in found)


def loaded(job: Job, step: int) -> float | str:
    """Load a step; return an output of the model, or "refused"."""
    try:
        job.checkpoints.load(step)
    except (Exception, CheckpointException):
        return "refused"
    return job.model(torch.ones(1, 8)).item()


def outcome(parent: str, number: int, is_stock: bool) -> tuple[list[int], dict[int, Any], Any]:
    """Train as a case says, with torchtitan's own manager or ours; in the second part, the model
    learns something else.

    Return the steps left after the first part; those left in the end, as loaded; and the losses of
    the second part, or the kind of its error.
    """
    case = dict(CASES[number])
    begins, again, back = (case.pop(name) for name in ("begins", "again", "load_step"))
    if is_stock or case["async_mode"] == SWITCHED:
        case["async_mode"] = "disabled"
    mode = CASES[number]["async_mode"]
    second = CheckpointManager if is_stock else HoldfastCheckpointManager
    first = CheckpointManager if mode == SWITCHED else second
    folder = Path(parent, f"{number}-{second.__name__}")
    case["folder"] = str(folder)
    if begins == "from a seed":
        Job("", case, first).checkpoints.save(0, last_step=True)
    elif begins != "anew":
        case["initial_load_path"] = f"{parent}/{first.__name__}/step-2"
        case["initial_load_model_only"] = begins == "from a model"
    Job("", case, first).run(MIDDLE)
    before = left(folder)
    try:
        job = Job("", case | again | {"load_step": back}, second)
        job.shift = 1.0
        losses: Any = job.run(END)
    except FileNotFoundError:
        losses = "missing"
    except (Exception, CheckpointException):
        losses = "refused"
    case.pop("initial_load_path", None)
    after = left(folder)  # a load may abandon some
    job = Job("", case, second)
    return before, {step: loaded(job, step) for step in after}, losses


def outcomes(parent: str, numbers: list[int]) -> dict[int, Any]:
    """Return the outcome of each case with torchtitan's own manager, and with ours."""
    for manager in (CheckpointManager, HoldfastCheckpointManager):
        Job(parent, {"folder": manager.__name__}, manager).run(2)
    return {
        number: (outcome(parent, number, True), outcome(parent, number, False))
        for number in numbers
    }
