"""Weights that simulated trainers publish and engines fill."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .channel_truth import Values
from .engine import CHUNK_NBYTES


class Module(torch.nn.Module):
    """A module with one parameter."""

    def __init__(self, like: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(like.clone(), requires_grad=False)


def first_values(chunks: int) -> dict[str, torch.Tensor]:
    """Return the weights that training begins with. They fill ``chunks`` chunks of each image."""
    rng = np.random.default_rng(chunks)
    many = rng.integers(-(2**15), 2**15, chunks * CHUNK_NBYTES // 2 - 900, np.int16)
    return {
        "many": torch.from_numpy(many).view(torch.bfloat16).clone(),
        "norm": torch.arange(257, dtype=torch.float32),
        "odd": torch.arange(7, dtype=torch.uint8),
    }


def trained(values: Values, share: float, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """Return the weights after one more step, with a ``share`` of the units changed."""
    after = {name: tensor.clone() for name, tensor in values.items()}
    for tensor in after.values():
        units = tensor.view(torch.uint8).numpy()
        chosen = rng.random(units.shape) < share
        units[chosen] += rng.integers(1, 4, int(chosen.sum()), np.uint8)
    after["norm"][0] += 1  # each version is different
    return after


def model(live: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters under the names that the trainer gives them."""
    return {
        name: found.weight if isinstance(found, torch.nn.Module) else found
        for name, found in live.items()
    }
