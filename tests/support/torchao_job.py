"""Tasks for rank processes: FSDP2 that gathers weights in eight bits, and optimizers with moments of
eight bits, by torchao."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast

__all__ = [
    "go_on_in_eight_bits",
    "go_on_with_moments_of_eight_bits",
    "load_in_eight_bits",
    "load_moments_of_eight_bits",
    "refused_moments",
    "weights_in_full",
]


class Job:
    """A model under FSDP2 and its optimizer. ``gathered``: FSDP2 gathers weights in eight bits."""

    def __init__(
        self, seed: int, optimizer: str = "", *, width: int = 128, gathered: bool = False
    ) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64))
        self.gathered = gathered
        if gathered:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
            convert_to_float8_training(self.model, config=config)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        kind: Any = torch.optim.AdamW
        if optimizer:
            import torchao.optim

            kind = getattr(torchao.optim, optimizer)
        self.optim = kind(self.model.parameters(), lr=0.01)

    @property
    def state(self) -> dict[str, Any]:
        """The state to save."""
        return {"model": self.model, "optim": self.optim}

    def losses(self, first: int, last: int) -> list[float]:
        """Train on batches that follow from the numbers of the steps; return the losses."""
        found = []
        for number in range(first, last):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(number))
            loss = (self.model(x) - x).square().mean()
            loss.backward()
            with torch.compiler.set_stance("force_eager"):  # compiling takes longer than all else
                self.optim.step()
            self.optim.zero_grad()
            if self.gathered:
                from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

                precompute_float8_dynamic_scale_for_fsdp(self.model)
            found.append(loss.item())
        return found


def go_on_in_eight_bits(uri: str, lazy: bool) -> list[float]:
    """Train, save, and train on; the losses after the save."""
    job = Job(1, gathered=True)
    for step in range(2):
        job.losses(step, step + 1)
        handle = holdfast.async_save(f"{uri}/{step}", job.state, lazy=lazy)
    losses = job.losses(2, 5)
    handle.wait()
    return losses


def load_in_eight_bits(uri: str) -> list[float]:
    """Load into a job that has trained, and train on."""
    job = Job(2, gathered=True)
    job.losses(7, 8)
    holdfast.load(uri, into=job.state)
    return job.losses(2, 5)


def weights_in_full(uri: str) -> bool:
    """Load into a job that knows nothing of eight bits, save that, and load it into one that does:
    whether the weights are the same all the way."""
    whole = holdfast.load(uri)["model"]
    job = Job(3)
    holdfast.load(uri, into=job.state)
    holdfast.save(f"{uri}-full", job.state)
    back = Job(4, gathered=True)
    holdfast.load(f"{uri}-full", into=back.state)
    return all(
        torch.equal(weight, whole[name])
        for name, weight in holdfast.load(f"{uri}-full")["model"].items()
    ) and all(
        torch.equal(old.full_tensor(), whole[name]) for name, old in job.model.named_parameters()
    )


def go_on_with_moments_of_eight_bits(uri: str, optimizer: str, lazy: bool) -> list[float]:
    """Train, save, and train on; the losses after the save."""
    job = Job(1, optimizer)
    job.losses(0, 2)
    handle = holdfast.async_save(uri, job.state, lazy=lazy)
    losses = job.losses(2, 4)
    handle.wait()
    return losses


def load_moments_of_eight_bits(uri: str, optimizer: str, again: str) -> list[float]:
    """Load into a job that has trained, save what was loaded, and train on."""
    job = Job(2, optimizer)
    job.losses(7, 8)
    holdfast.load(uri, into=job.state)
    holdfast.save(again, job.state)
    return job.losses(2, 4)


def refused_moments(uri: str) -> str:
    """What a save says where ranks have parts of different sizes."""
    job = Job(1, "AdamW8bit", width=129)
    job.losses(0, 1)
    try:
        holdfast.save(uri, job.state)
    except holdfast.HoldfastError as error:
        return str(error)
    return ""
