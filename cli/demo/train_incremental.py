"""The training script of ``holdfast demo --incremental``, which torchrun starts on every rank.

It fine-tunes adapters beside frozen weights, which FSDP2 shards, and saves each checkpoint twice:
whole and incrementally. With ``--resume STEP`` it resumes from that incremental checkpoint, and
saves nothing. The batch has a fixed number of parts, whose gradients are added in order. So the
result is the same, bit for bit, on any number of ranks that divides the number of parts.
"""

from __future__ import annotations

import argparse
import datetime
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import xxhash
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast

from .journal import Journal
from .model import RATE, ModelConfig, Transformer
from .plan import INCREMENTAL, WHOLE, checkpoint_uri
from .text import batch, part_of, read_text

ADAPTER_RANK = 4


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter (LoRA, Hu 2021)."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Parameter(torch.randn(ADAPTER_RANK, frozen.in_features) / 16)
        self.up = nn.Parameter(torch.zeros(frozen.out_features, ADAPTER_RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapted: torch.Tensor = self.frozen(x) + x @ self.down.T @ self.up.T
        return adapted


class Tuner:
    """Trains the adapters of a Transformer on batches of ``parts``. ``state`` goes into
    checkpoints."""

    def __init__(self, parts: int) -> None:
        torch.manual_seed(0)
        self._parts = parts
        self._text = read_text()
        self._model = Transformer(ModelConfig()).requires_grad_(False)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        block: Any
        for block in self._model.blocks:
            for name in ("linear1", "linear2"):
                frozen = getattr(block, name)
                setattr(block, name, Adapted(frozen))
                fully_shard(frozen, mesh=mesh)
            fully_shard(block.self_attn, mesh=mesh)
        self._adapters = [each for each in self._model.parameters() if each.requires_grad]
        self._optim = torch.optim.AdamW(self._adapters, lr=RATE)
        frozen, adapters = (
            {name: p for name, p in self._model.named_parameters() if p.requires_grad == trained}
            for trained in (False, True)
        )
        self.state: dict[str, Any] = {
            "frozen": frozen, "adapters": adapters, "optim": self._optim, "step": 0
        }  # fmt: skip

    def take_step(self, step: int) -> float:
        """Train one step and return the mean loss of the batch."""
        windows = batch(self._text, step)
        world = dist.get_world_size()
        numbers = part_of(np.arange(self._parts), dist.get_rank(), world)
        parts = [part_of(windows, number, self._parts) for number in numbers]
        own = torch.stack([self._gradient(torch.from_numpy(part)) for part in parts])
        all_ranks = [torch.empty_like(own) for _ in range(world)]
        dist.all_gather(all_ranks, own)
        mean = torch.cat(all_ranks).mean(0)
        gradients = torch.split(mean[1:], [each.numel() for each in self._adapters])
        for adapter, gradient in zip(self._adapters, gradients, strict=True):
            adapter.grad = gradient.view_as(adapter)
        self._optim.step()
        self.state["step"] = step
        return float(mean[0])

    def _gradient(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of a part of the batch, and its gradients, in one row."""
        logits = self._model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        gradients = torch.autograd.grad(loss, self._adapters)
        return torch.cat([loss.detach().view(1), *(each.flatten() for each in gradients)])

    def digest(self) -> str:
        """Return a digest of all weights and moments, equal on all ranks."""
        moments = [value for each in self._optim.state.values() for value in each.values()]
        digest = xxhash.xxh3_128()
        for value in [*self._model.state_dict().values(), *moments]:
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            digest.update(whole.detach().contiguous().numpy().data)
        return digest.hexdigest()


def main() -> None:
    """Run one rank of the job. Raises the error of training, or of a save."""
    job = _arguments()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    journal = Journal(job.journal, dist.get_rank())
    tuner = Tuner(job.parts)
    if job.resume:
        holdfast.load(checkpoint_uri(job.uri, job.resume, INCREMENTAL), into=tuner.state)
    bases: dict[str, str | None] = {WHOLE: None, INCREMENTAL: None}
    for step in range(tuner.state["step"] + 1, job.steps + 1):
        journal.write("step", step=step, loss=tuner.take_step(step))
        if step % job.every or job.resume:
            continue
        for kind, base in bases.items():
            uri = checkpoint_uri(job.uri, step, kind)
            report = holdfast.save(uri, tuner.state, step=step, base=base)
            written = report.written_nbytes
            journal.write("saved", step=step, into=kind, written=written, **asdict(report))
        bases[INCREMENTAL] = checkpoint_uri(job.uri, step, INCREMENTAL)
    journal.write("ended", digest=tuner.digest())
    dist.destroy_process_group()
    # torch's threads may still be releasing tensors; they abort the process if Python is shutting
    # down.
    os._exit(0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--journal", type=Path, required=True, help="folder for the journals of the ranks")
    add("--uri", required=True, help="where the checkpoints go")
    add("--steps", type=int, required=True)
    add("--parts", type=int, required=True, help="parts of a batch")
    add("--every", type=int, required=True, help="steps between two checkpoints")
    add("--resume", type=int, default=0, help="the step to resume from")
    return parser.parse_args()


if __name__ == "__main__":
    main()
