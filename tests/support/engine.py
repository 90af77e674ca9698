"""An inference engine that takes weights as vLLM's models do. Loaders of packed parameters cut a
rank's part out of whole tensors. A rank has the layers of one pipeline stage, and its experts."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

PACKED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
"""Names of projections in the checkpoint -> the parameter that holds it, and its number there."""
ROWS = ("qkv_proj", "gate_up_proj", "embed_tokens", "lm_head")
COLUMNS = ("o_proj", "down_proj")


@dataclass
class Rank:
    """A model on one rank, with the ``layers`` of its stage."""

    tp: int
    tp_size: int
    layers: range
    parts: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)
    """Parts copied into each parameter, by number."""
    names: list[str] = field(default_factory=list)
    """Names received, in order."""

    def misses(self, name: str) -> bool:
        """Return whether a tensor belongs to another stage."""
        layer = re.search(r"\.layers\.(\d+)\.", name)
        return layer is not None and int(layer[1]) not in self.layers

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Copy each tensor's part of this rank while the tensor is alive; return the parameters."""
        for name, tensor in weights:
            self.names.append(name)
            *path, module, kind = name.split(".")
            packed, number = PACKED.get(module, (module, 0))
            part = tensor
            if packed in ROWS:
                part = tensor.chunk(self.tp_size, 0)[self.tp]
            elif packed in COLUMNS:
                part = tensor.chunk(self.tp_size, 1)[self.tp]
            into = self.parts.setdefault(".".join([*path, packed, kind]), {})
            assert number not in into, f"{name} came twice"
            into[number] = part.clone()
        return set(self.parts)

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the packed parameters by name."""
        return {
            name: torch.cat([parts[i] for i in sorted(parts)]) if len(parts) > 1 else parts[0]
            for name, parts in self.parts.items()
        }


def expected(model: dict[str, torch.Tensor], rank: Rank) -> dict[str, torch.Tensor]:
    """Return the parameters of a rank, computed from all weights at once."""
    rank = Rank(rank.tp, rank.tp_size, rank.layers)
    rank.load_weights((name, w) for name, w in model.items() if not rank.misses(name))
    return rank.parameters


def stand_ins(registered: dict[str, Any]) -> dict[str, types.ModuleType]:
    """Return modules with the names that loaders of vLLM and SGLang import. Registered loaders are
    added to ``registered``."""

    class Loader:
        def __init__(self, load_config: SimpleNamespace) -> None:
            self.load_config = load_config

    def register(name: str) -> Callable[[type], type]:
        return lambda loader: registered.setdefault(name, loader)

    contents: dict[str, dict[str, Any]] = {
        "vllm.model_executor.model_loader": {"register_model_loader": register},
        "vllm.model_executor.model_loader.base_loader": {"BaseModelLoader": Loader},
        "vllm.model_executor.models.utils": {
            "is_pp_missing_parameter": lambda name, model: model.misses(name)
        },
        "sglang.srt.model_loader.loader": {"DefaultModelLoader": Loader},
    }
    made: dict[str, types.ModuleType] = {}
    for name, members in contents.items():
        for end in [i for i, c in enumerate(name) if c == "."] + [len(name)]:
            made.setdefault(name[:end], types.ModuleType(name[:end]))
        vars(made[name]).update(members)
    assert not made.keys() & sys.modules.keys()
    return made
