"""A small decoder-only transformer over bytes: the smallest language model that still learns.

Pre-norm blocks, rotary positions, causal attention, no bias. Independent of ranks and checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["Block", "ModelConfig", "Transformer"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes. The defaults give 3.3 million parameters; with AdamW's two moments a checkpoint takes
    40 MB."""

    vocabulary: int = 256
    width: int = 256
    heads: int = 4
    layers: int = 4


class Transformer(nn.Module):
    """Maps tokens (batch, length), int64, to logits (batch, length, vocabulary)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(_initialise)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """Attention and a two-layer perceptron, each added to its input. The unit of sharding."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_2 = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._attention(self.norm_1(x))
        mixed: torch.Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return mixed

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width / heads)
        mixed = F.scaled_dot_product_attention(_rotated(q), _rotated(k), v, is_causal=True)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions: rotate pairs of features by an angle that grows with the position."""
    length, width = x.shape[-2:]
    speed = 10_000.0 ** -(torch.arange(0, width, 2, device=x.device) / width)
    angle = torch.outer(torch.arange(length, device=x.device), speed)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), dim=-1)


def _initialise(module: nn.Module) -> None:
    """Initialise the weight of one Linear or Embedding; leave other modules unchanged.

    Embeddings are as large as the blocks' outputs. Small ones learn more slowly, and double every
    rounding error.
    """
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.5 if isinstance(module, nn.Embedding) else 0.02)
