"""States to save: the tensors of a Llama trained in mixed precision, at any size.

They take 14 bytes per parameter: the bf16 weight, and the optimizer's fp32 master copy and two
moments. All are random normals. Constants would compress ten thousandfold, and flatter libraries
that compress.
"""

from __future__ import annotations

import timeit
from collections.abc import Mapping
from typing import Any

import torch
import xxhash

from .workloads.llama3 import OPTIMIZERS
from .workloads.sized import scaled_parameters

State = dict[str, Any]


def build(gib: float, seed: int = 0, *, share: int = 1) -> State:
    """Build a state of about ``gib`` GiB, or one ``share``-th of its rows. The same seed gives the
    same state."""
    random = torch.Generator().manual_seed(seed)
    optimizer = {
        name: {
            kind: torch.empty(rows // share, *rest).normal_(generator=random)
            for kind in OPTIMIZERS["adam+master"]
        }
        for name, (rows, *rest) in scaled_parameters(gib).items()
    }
    model = {name: moments["master"].to(torch.bfloat16) for name, moments in optimizer.items()}
    return {"model": model, "optim": optimizer, "step": 100}


def flat_tensors(state: Mapping[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of a state by their full names, which start with ``prefix``."""
    found: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            found[prefix + key] = value
        elif isinstance(value, Mapping):
            found |= flat_tensors(value, f"{prefix}{key}.")
    return found


def nbytes_of(state: State) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.nbytes for tensor in flat_tensors(state).values())


def digests(state: State) -> dict[str, bytes]:
    """Return a digest of every tensor's bytes. States with equal digests are equal bit for bit."""
    return {name: _digest(tensor) for name, tensor in flat_tensors(state).items()}


def _digest(tensor: torch.Tensor) -> bytes:
    return xxhash.xxh3_128_digest(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def zero(state: State) -> None:
    """Zero every tensor, to expose a load that does nothing."""
    for tensor in flat_tensors(state).values():
        tensor.zero_()


def copy_s(state: State) -> float:
    """Return the seconds of a copy of a state into warm memory, with all of torch's threads: the
    fastest of three."""
    sources = flat_tensors(state).values()
    targets = [tensor.clone() for tensor in sources]

    def copy() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)

    return min(timeit.repeat(copy, number=1, repeat=3))
