"""A small decoder-only transformer over bytes: the smallest language model that still learns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


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
