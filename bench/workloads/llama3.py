"""Llama 3 as it is trained and published, with Hugging Face's names and the optimizer of a training
job.

Tensors are sharded along dimension 0, as by FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...errors import UsageError
from .llama_dimensions import LLAMA3, Llama
from .spec import Listed, Spec

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
    return Listed(title, lambda: training_specs(model, optimizer))


def training_specs(model: Llama, optimizer: str) -> Iterator[Spec]:
    """Yield the weights of a model, and the tensors of its optimizer."""
    parameters = list(model.stage(0, 1))
    for name, shape in parameters:
        yield Spec(name, shape, "bfloat16", sharded=True)
    for name, shape in parameters:
        for kind in OPTIMIZERS[optimizer]:
            yield Spec(f"optim.{name}.{kind}", shape, "float32", sharded=True)
