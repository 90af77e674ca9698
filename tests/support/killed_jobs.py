"""Training jobs of every layout, killed in the middle of a save and resumed in another layout."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim.lr_scheduler import MultiStepLR
from torch.optim.swa_utils import AveragedModel

import holdfast

from . import fsdp1_jobs
from .jobs import Model, sharded
from .victims import COMMIT, tapped

EVERY = 2
"""Steps between saves; the job is killed in the second one."""
STEPS = 6


@dataclass(frozen=True)
class Job:
    """A training job; ``gradients`` runs backward and returns the loss; ``after`` ends a step."""

    state: dict[str, Any]
    gradients: Callable[[int], float]
    optims: Sequence[torch.optim.Optimizer]
    after: Callable[[], object] = lambda: None
    schedules: list[MultiStepLR] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.schedules.extend(MultiStepLR(optim, [1, 3, 5], 0.5) for optim in self.optims)

    @property
    def saved(self) -> dict[str, Any]:
        """All state: ``state`` and the parts that every job has."""
        return {"optims": list(self.optims), "schedules": self.schedules, **self.state}

    def step(self, number: int) -> float:
        """Take one step; return its loss."""
        loss = self.gradients(number)
        for optim, schedule in zip(self.optims, self.schedules, strict=True):
            optim.step()
            optim.zero_grad()
            schedule.step()
        self.after()
        return loss


def batch(number: int, features: int = 10) -> torch.Tensor:
    """Return the batch of a step, equal on all ranks."""
    return torch.randn(12, features, generator=torch.Generator().manual_seed(number))


def backward(model: nn.Module, features: int, number: int) -> float:
    """Run backward as most jobs do; return the loss."""
    loss = model(batch(number, features)).float().square().mean()
    loss.backward()
    return loss.item()


def whole(kind: str, orig: bool, seed: int) -> Job:
    """Make a job with FSDP1, DDP, or a bare module."""
    model, optim = fsdp1_jobs.built(fsdp1_jobs.Layout(kind, orig), seed)
    return Job({"model": model}, partial(backward, model, 4), [optim])


def in_shards(layout: str, seed: int) -> Job:
    """Make a job with FSDP2, replicas of shards, or tensor parallelism."""
    model, optim = sharded(layout, seed)
    return Job({"model": model}, partial(backward, model, 10), [optim])


def averaged(seed: int) -> Job:
    """Make a job with FSDP2 and a sharded moving average of the weights, which affects its loss."""
    model, optim = sharded("fsdp", seed)
    average = AveragedModel(Model())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(average.module, mesh=mesh, reshard_after_forward=True)

    def gradients(number: int) -> float:
        with torch.no_grad():
            of_average = average(batch(number)).square().mean().item()
        return backward(model, 10, number) + of_average

    def update() -> None:
        holdfast.fence()
        average.update_parameters(model)

    return Job({"model": model, "average": average}, gradients, [optim], after=update)


def staged(seed: int) -> Job:
    """Make a pipeline of two stages, on two ranks or on one."""
    torch.manual_seed(seed)
    stages = [nn.Sequential(nn.Linear(10, 7), nn.Tanh()), nn.Linear(7, 3)]
    rank = dist.get_rank()
    mine = [rank] if dist.get_world_size() == 2 else [0, 1]
    model = nn.ModuleDict({str(i): stages[i] for i in mine})
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)

    def gradients(number: int) -> float:
        if len(mine) == 2:
            between = stages[0](batch(number))
        elif rank == 0:
            between = stages[0](batch(number))
            dist.send(between.detach(), 1)
        else:
            between = torch.empty(12, 7, requires_grad=True)
            dist.recv(between.detach(), 0)
        loss = torch.zeros(())
        if 1 in mine:
            loss = stages[1](between).square().mean()
            loss.backward()
        if mine == [0]:
            gradient = torch.empty(12, 7)
            dist.recv(gradient, 1)
            between.backward(gradient)
        elif mine == [1]:
            dist.send(between.grad, 0)
        told = loss.detach()
        dist.broadcast(told, dist.get_world_size() - 1)
        return told.item()

    return Job({"model": model}, gradients, [optim])


def zero(seed: int) -> Job:
    """Make a job in which only one rank holds the moments of each parameter."""
    torch.manual_seed(seed)
    model = Model()
    optim = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    return Job({"model": model}, partial(backward, model, 10), [optim])


KINDS: dict[str, Callable[[int], Job]] = {
    "plain": partial(whole, "plain", True),
    "DDP": partial(whole, "DDP", True),
    "FSDP2": partial(whole, "FSDP2", True),
    **{
        f"{kind}{'' if orig else ' flat'}": partial(whole, kind, orig)
        for kind in ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD")
        for orig in (True, False)
    },
    **{layout: partial(in_shards, layout) for layout in ("fsdp", "hsdp", "tp")},
    "averaged": averaged,
    "staged": staged,
    "zero": zero,
}


def losses_of(kind: str, uri: str | None) -> tuple[int, list[float]]:
    """Train to the end, from the start or from a run; return the first step and the losses."""
    if uri is None:
        job = KINDS[kind](1)
        return 0, [job.step(number) for number in range(STEPS)]
    job = KINDS[kind](2)
    with _saving(uri) as checkpointer:
        begin = checkpointer.resume(job.saved)
        losses = []
        for number in range(begin, STEPS):
            losses.append(job.step(number))
            checkpointer.step(number + 1, job.saved)
    return begin, losses


def run_until_killed(kind: str, uri: str, at: int) -> None:
    """Train; in the second save, rank 0 dies before its ``at``-th system call, or the commit."""
    job = KINDS[kind](1)
    with _saving(uri) as checkpointer, contextlib.ExitStack() as taps:
        for number in range(STEPS):
            job.step(number)
            if number + 1 == 2 * EVERY and dist.get_rank() == 0:
                checkpointer.wait()
                taps.enter_context(tapped(partial(_die, at)))
            checkpointer.step(number + 1, job.saved)


def _saving(uri: str) -> holdfast.Checkpointer:
    return holdfast.Checkpointer(uri, every=EVERY, when_busy="wait", grace_s=None)


def _die(at: int, number: int, label: str) -> None:
    if number == at or label == COMMIT:
        os.kill(os.getpid(), signal.SIGKILL)
