"""The shapes of Llama models with the names of transformers, shared by all benchmarks.

Dimensions are those of the published ``config.json`` files of Meta's Llama 3 models. Scope: pure,
and without torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"

Parameter = tuple[str, tuple[int, ...]]
"""Name and shape."""


@dataclass(frozen=True)
class Llama:
    """Dimensions of a Llama. ``kv`` is the width of keys and of values: the width of a head times
    the number of key heads."""

    layers: int
    hidden: int
    ffn: int
    kv: int
    vocab: int

    @property
    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes within one layer, by name."""
        return {
            "self_attn.q_proj.weight": (self.hidden, self.hidden),
            "self_attn.k_proj.weight": (self.kv, self.hidden),
            "self_attn.v_proj.weight": (self.kv, self.hidden),
            "self_attn.o_proj.weight": (self.hidden, self.hidden),
            "mlp.gate_proj.weight": (self.ffn, self.hidden),
            "mlp.down_proj.weight": (self.hidden, self.ffn),
            "mlp.up_proj.weight": (self.ffn, self.hidden),
            "input_layernorm.weight": (self.hidden,),
            "post_attention_layernorm.weight": (self.hidden,),
        }

    @property
    def layer_parameters(self) -> int:
        """Elements in one layer."""
        return sum(map(math.prod, self.layer_shapes.values()))

    @property
    def parameters(self) -> int:
        """Elements in total. Embedding and output are separate matrices."""
        ends = 2 * self.vocab * self.hidden + self.hidden
        return ends + self.layers * self.layer_parameters

    def layer(self, number: int) -> Iterator[Parameter]:
        """Yield the parameters of one layer."""
        for name, shape in self.layer_shapes.items():
            yield f"model.layers.{number}.{name}", shape

    def stage(self, index: int, stages: int) -> Iterator[Parameter]:
        """Yield the parameters of one of ``stages`` pipeline stages."""
        if index == 0:
            yield EMBEDDING, (self.vocab, self.hidden)
        for number in range(self.layers * index // stages, self.layers * (index + 1) // stages):
            yield from self.layer(number)
        if index == stages - 1:
            yield NORM, (self.hidden,)
            yield "lm_head.weight", (self.vocab, self.hidden)


LLAMA3 = {
    "llama3-8b": Llama(layers=32, hidden=4096, ffn=14336, kv=1024, vocab=128256),
    "llama3-70b": Llama(layers=80, hidden=8192, ffn=28672, kv=1024, vocab=128256),
    "llama3-405b": Llama(layers=126, hidden=16384, ffn=53248, kv=1024, vocab=128256),
}
"""Models by command-line name."""
