"""A small decoder-only transformer over bytes, the smallest language model that still learns, and
its training on all ranks of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import xxhash
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from .text import batch, part_of, read_text

RATE = 2e-3
RISING_STEPS = 8
"""Steps until the learning rate reaches its final value."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes. The defaults give 3.3 million parameters; with AdamW's two moments a checkpoint takes
    40 MB."""

    vocabulary: int = 256
    width: int = 256
    heads: int = 4
    layers: int = 4
    length: int = 64


class Transformer(nn.Module):
    """Maps tokens (batch, length), int64, to logits (batch, length, vocabulary). ``blocks`` are the
    units of sharding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.length, config.width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                config.width,
                config.heads,
                4 * config.width,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
                bias=False,
            )
            for _ in range(config.layers)
        )
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        x = self.embedding(tokens) + self.positions(torch.arange(length))
        causal = nn.Transformer.generate_square_subsequent_mask(length)
        for block in self.blocks:
            x = block(x, src_mask=causal, is_causal=True)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def digest_of(weights: Mapping[str, Any]) -> str:
    """Return a digest of whole weights in bf16, by name. Every rank that has a part of them calls
    this."""
    digest = xxhash.xxh3_128()
    model = weights["model"]
    named = model.state_dict() if isinstance(model, nn.Module) else model
    for name, tensor in sorted(named.items()):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest.update(name.encode())
        digest.update(whole.detach().bfloat16().contiguous().view(torch.int16).numpy().data)
    return digest.hexdigest()


class Learner:
    """Trains a Transformer with FSDP2 and AdamW, with the same losses on any number of ranks except
    for rounding. ``state`` goes into checkpoints; ``state["step"]`` is the last step."""

    def __init__(self, config: ModelConfig, rate: float = RATE) -> None:
        torch.manual_seed(0)
        self._rate = rate
        self._rank = dist.get_rank()
        self._world = dist.get_world_size()
        self._text = read_text()
        self._model = Transformer(config)
        mesh = init_device_mesh("cpu", (self._world,))
        for block in self._model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self._model, mesh=mesh)
        self._optim = torch.optim.AdamW(self._model.parameters(), lr=rate, betas=(0.9, 0.95))
        self.state: dict[str, Any] = {"model": self._model, "optim": self._optim, "step": 0}

    def take_step(self, step: int) -> float:
        """Train one step and return the mean loss of all ranks."""
        windows = part_of(batch(self._text, step), self._rank, self._world)
        tokens = torch.from_numpy(windows)
        logits = self._model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        for group in self._optim.param_groups:
            group["lr"] = self._rate * min(1.0, step / RISING_STEPS)
        self._optim.step()
        self._optim.zero_grad()
        self.state["step"] = step
        total = loss.detach()
        dist.all_reduce(total)
        return float(total) / self._world
