"""States to save: the tensors of a Llama that trains in mixed precision, at any size.

Per parameter 14 bytes: the bf16 weight, and the fp32 master copy and two moments of the optimizer.
All of it random normals: ones would compress ten thousandfold, and flatter libraries that
compress.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from .options import GIB

__all__ = [
    "MOMENTS",
    "State",
    "build",
    "digests",
    "flat_tensors",
    "nbytes_of",
    "parameter_shapes",
    "zero",
]

State = dict[str, Any]
NBYTES_PER_PARAMETER = 14
MOMENTS = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _Model:
    """Llama's proportions. The embedding is tied: there is no separate output matrix."""

    hidden: int
    ffn: int
    kv: int
    vocab: int

    @property
    def layer(self) -> dict[str, tuple[int, ...]]:
        h = self.hidden
        f = self.ffn
        kv = self.kv
        return {
            "attention.wq.weight": (h, h),
            "attention.wk.weight": (kv, h),
            "attention.wv.weight": (kv, h),
            "attention.wo.weight": (h, h),
            "feed_forward.w1.weight": (f, h),
            "feed_forward.w2.weight": (h, f),
            "feed_forward.w3.weight": (f, h),
            "attention_norm.weight": (h,),
            "ffn_norm.weight": (h,),
        }


_MODELS = (
    (3.0, _Model(2048, 5632, 512, 32000)),
    (0.9, _Model(1024, 2816, 256, 32000)),
    (0.0, _Model(128, 352, 32, 2000)),
)


def parameter_shapes(gib: float) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters of a model whose whole state has about ``gib`` GiB."""
    model = next(m for least, m in _MODELS if gib >= least)
    rest = gib * GIB / NBYTES_PER_PARAMETER - model.vocab * model.hidden
    layers = max(1, round(rest / sum(map(_volume, model.layer.values()))))
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (model.vocab, model.hidden)}
    for number in range(layers):
        shapes |= {f"layers.{number}.{name}": shape for name, shape in model.layer.items()}
    return shapes | {"norm.weight": (model.hidden,)}


def _volume(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def build(gib: float, seed: int = 0, *, share: int = 1) -> State:
    """A state of about ``gib`` GiB, or one ``share``-th of its rows; the same for the same seed."""
    random = torch.Generator().manual_seed(seed)
    optimizer = {
        name: {
            kind: torch.empty(rows // share, *rest).normal_(generator=random) for kind in MOMENTS
        }
        for name, (rows, *rest) in parameter_shapes(gib).items()
    }
    model = {name: moments["master"].to(torch.bfloat16) for name, moments in optimizer.items()}
    return {"model": model, "optim": optimizer, "step": 100}


def _walk(state: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            yield prefix + key, value
        elif isinstance(value, Mapping):
            yield from _walk(value, f"{prefix}{key}.")


def flat_tensors(state: State) -> dict[str, torch.Tensor]:
    """The tensors of a state by their full names."""
    return dict(_walk(state, ""))


def nbytes_of(state: State) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for tensor in flat_tensors(state).values())


def digests(state: State) -> dict[str, bytes]:
    """A digest of the bytes of every tensor: two states with the same are equal bit for bit."""
    return {name: _digest(tensor) for name, tensor in flat_tensors(state).items()}


def _digest(tensor: torch.Tensor) -> bytes:
    return xxhash.xxh3_128_digest(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def zero(state: State) -> None:
    """Overwrite every tensor, so that a load that does nothing is found out."""
    for tensor in flat_tensors(state).values():
        tensor.zero_()
