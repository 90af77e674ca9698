"""Tasks for rank processes with torchao: FSDP2 that gathers weights in eight bits, and optimizers with
moments of eight bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast

FLOAT8 = "float8"
"""The kind of a job that gathers its weights in eight bits. Other kinds are names of optimizers."""


class Job:
    """A sharded model and its optimizer."""

    def __init__(self, seed: int, kind: str, width: int = 128) -> None:
        import torchao.optim

        torch.manual_seed(seed)
        self.in_eight_bits = kind == FLOAT8
        self.model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64))
        if self.in_eight_bits:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
            convert_to_float8_training(self.model, config=config)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        make = getattr(torchao.optim, kind, torch.optim.AdamW)
        self.optim: Any = make(self.model.parameters(), lr=0.01)

    @property
    def state(self) -> dict[str, Any]:
        """Return the state to save."""
        return {"model": self.model, "optim": self.optim}

    def losses(self, first: int, last: int) -> list[float]:
        """Take steps on batches that follow from their number; return the losses."""
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        found = []
        for number in range(first, last):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(number))
            loss = (self.model(x) - x).square().mean()
            loss.backward()
            with torch.compiler.set_stance("force_eager"):  # compiling takes longer than the rest
                self.optim.step()
            self.optim.zero_grad()
            if self.in_eight_bits:  # computes the scales of the next gathering
                precompute_float8_dynamic_scale_for_fsdp(self.model)
            found.append(loss.item())
        return found


def save_and_train(uri: str, kind: str, lazy: bool) -> list[float]:
    """Train, save, and train on; return the losses after the save."""
    job = Job(1, kind)
    job.losses(0, 2)
    handle = holdfast.async_save(uri, job.state, lazy=lazy)
    losses = job.losses(2, 4)
    handle.wait()
    return losses


def load_and_train(uri: str, kind: str, again: str) -> list[float]:
    """Load into a job that has trained, save the loaded state, and train on."""
    job = Job(2, kind)
    job.losses(7, 8)
    holdfast.load(uri, into=job.state)
    holdfast.save(again, job.state)
    return job.losses(2, 4)


def weights_in_full(uri: str) -> bool:
    """Load into a job without eight bits, save that, and load it into one with them; return whether
    the weights are the same all the way."""
    whole = holdfast.load(uri)["model"]
    job = Job(3, "plain")
    holdfast.load(uri, into=job.state)
    holdfast.save(f"{uri}-full", job.state)
    back = Job(4, FLOAT8)
    holdfast.load(f"{uri}-full", into=back.state)
    stored = holdfast.load(f"{uri}-full")["model"]
    return all(torch.equal(weight, whole[name]) for name, weight in stored.items()) and all(
        torch.equal(old.full_tensor(), whole[name]) for name, old in job.model.named_parameters()
    )


def refused_moments(uri: str) -> str:
    """Return the error of a save in which ranks have parts of different sizes."""
    job = Job(1, "AdamW8bit", width=129)
    job.losses(0, 1)
    try:
        holdfast.save(uri, job.state)
    except holdfast.HoldfastError as error:
        return str(error)
    return ""
