"""The shapes of Llama models, shared by all benchmarks.

Dimensions are those of the published ``config.json`` files of Meta's Llama 3 models. Scope: pure,
and without torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ["HUGGING_FACE", "LLAMA3", "META", "Llama", "Names", "Parameter"]

Parameter = tuple[str, tuple[int, ...]]
"""Name and shape."""


@dataclass(frozen=True)
class Names:
    """A library's names of parameters. ``layer`` maps the role of a matrix to its name within a
    layer; ``prefix`` precedes the number of the layer."""

    embedding: str
    norm: str
    output: str
    prefix: str
    layer: Mapping[str, str]


META = Names(
    embedding="tok_embeddings.weight",
    norm="norm.weight",
    output="output.weight",
    prefix="layers.",
    layer={
        "query": "attention.wq.weight",
        "key": "attention.wk.weight",
        "value": "attention.wv.weight",
        "attention output": "attention.wo.weight",
        "gate": "feed_forward.w1.weight",
        "down": "feed_forward.w2.weight",
        "up": "feed_forward.w3.weight",
        "attention norm": "attention_norm.weight",
        "feed-forward norm": "ffn_norm.weight",
    },
)
"""Names in Meta's own code and in torchtitan."""

HUGGING_FACE = Names(
    embedding="model.embed_tokens.weight",
    norm="model.norm.weight",
    output="lm_head.weight",
    prefix="model.layers.",
    layer={
        "query": "self_attn.q_proj.weight",
        "key": "self_attn.k_proj.weight",
        "value": "self_attn.v_proj.weight",
        "attention output": "self_attn.o_proj.weight",
        "gate": "mlp.gate_proj.weight",
        "down": "mlp.down_proj.weight",
        "up": "mlp.up_proj.weight",
        "attention norm": "input_layernorm.weight",
        "feed-forward norm": "post_attention_layernorm.weight",
    },
)
"""Names in transformers."""


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
        """Shapes within one layer, by role."""
        return {
            "query": (self.hidden, self.hidden),
            "key": (self.kv, self.hidden),
            "value": (self.kv, self.hidden),
            "attention output": (self.hidden, self.hidden),
            "gate": (self.ffn, self.hidden),
            "down": (self.hidden, self.ffn),
            "up": (self.ffn, self.hidden),
            "attention norm": (self.hidden,),
            "feed-forward norm": (self.hidden,),
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

    def layer(self, number: int, names: Names = META) -> Iterator[Parameter]:
        """Yield the parameters of one layer."""
        for role, shape in self.layer_shapes.items():
            yield f"{names.prefix}{number}.{names.layer[role]}", shape

    def stage(self, index: int, stages: int, names: Names = META) -> Iterator[Parameter]:
        """Yield the parameters of one of ``stages`` pipeline stages."""
        if index == 0:
            yield names.embedding, (self.vocab, self.hidden)
        first = self.layers * index // stages
        last = self.layers * (index + 1) // stages
        for number in range(first, last):
            yield from self.layer(number, names)
        if index == stages - 1:
            yield names.norm, (self.hidden,)
            yield names.output, (self.vocab, self.hidden)


LLAMA3 = {
    "llama3-8b": Llama(layers=32, hidden=4096, ffn=14336, kv=1024, vocab=128256),
    "llama3-70b": Llama(layers=80, hidden=8192, ffn=28672, kv=1024, vocab=128256),
    "llama3-405b": Llama(layers=126, hidden=16384, ffn=53248, kv=1024, vocab=128256),
}
"""Models by command-line name."""
