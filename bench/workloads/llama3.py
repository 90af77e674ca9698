"""Llama 3 as it is trained and published, with Hugging Face's names and the optimizer of a training
job. All benchmarks share these shapes.

Dimensions are those of the published ``config.json`` files of Meta's models. Tensors are sharded
along dimension 0, as by FSDP2. Scope: pure, and without torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ...errors import UsageError
from .spec import Listed, Spec

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

OPTIMIZERS = {
    "none": (),
    "adam": ("exp_avg", "exp_avg_sq"),
    "adam+master": ("master", "exp_avg", "exp_avg_sq"),
}
"""Optimizer tensors for each bf16 weight, in fp32: none (2 bytes per parameter), Adam's two moments
(10), or these and the master copy (14)."""


def llama3(name: str, optimizer: str = "none", layers: int | None = None) -> Listed:
    """Return the workload of that name, or its first ``layers`` layers between embedding and
    output. Raises UsageError for unknown names, and for more layers than the model has."""
    model = LLAMA3.get(name)
    if model is None:
        raise UsageError(
            f"--model {name!r} is not known", advice=f"Give one of {', '.join(LLAMA3)}."
        )
    if optimizer not in OPTIMIZERS:
        raise UsageError(
            f"--optimizer {optimizer!r} is not known",
            advice=f"Give one of {', '.join(OPTIMIZERS)}.",
        )
    title = name
    if layers is not None:
        if not 1 <= layers <= model.layers:
            raise UsageError(
                f"--layers {layers}, and {name} has {model.layers}",
                advice=f"Give a number from 1 to {model.layers}.",
            )
        if layers < model.layers:
            title += f", {layers} of {model.layers} layers"
        model = replace(model, layers=layers)
    if optimizer != "none":
        title += f", {optimizer}"
    return Listed(title, lambda: training_specs(dict(model.stage(0, 1)), optimizer))


def training_specs(
    parameters: Mapping[str, tuple[int, ...]], optimizer: str, prefix: str = ""
) -> Iterator[Spec]:
    """Yield the weights of a model, with ``prefix`` before their names, and the tensors of its
    optimizer."""
    for name, shape in parameters.items():
        yield Spec(f"{prefix}{name}", shape, "bfloat16", sharded=True)
    for name, shape in parameters.items():
        for kind in OPTIMIZERS[optimizer]:
            yield Spec(f"optim.{name}.{kind}", shape, "float32", sharded=True)
