"""Llama 3 as it is trained and published, with Hugging Face's names and the optimizer of a training
job.

Tensors are sharded along dimension 0, as by FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...core.forks.cached import cached_property
from ...errors import UsageError
from .llama_dimensions import HUGGING_FACE, LLAMA3, Llama, Parameter
from .spec import Spec, check_rank, nbytes_of_specs

__all__ = ["OPTIMIZERS", "Llama3", "llama3"]

OPTIMIZERS = {
    "none": (),
    "adam": ("exp_avg", "exp_avg_sq"),
    "adam+master": ("master", "exp_avg", "exp_avg_sq"),
}
"""Optimizer tensors for each bf16 weight, in fp32: none (2 bytes per parameter), Adam's two moments
(10), or these and the master copy (14)."""


@dataclass(frozen=True)
class Llama3:
    """A Llama 3. ``title`` names the model, and ``model`` has its dimensions."""

    title: str
    model: Llama
    optimizer: str = "none"

    @property
    def name(self) -> str:
        """Name, such as ``llama3-8b, 2 of 32 layers, adam``."""
        text = self.title
        whole = LLAMA3.get(self.title, self.model)
        if self.model != whole:
            text += f", {self.model.layers} of {whole.layers} layers"
        if self.optimizer != "none":
            text += f", {self.optimizer}"
        return text

    @property
    def world(self) -> None:
        """Any number of ranks."""
        return

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Names and shapes of all weights."""
        return tuple(self.model.stage(0, 1, HUGGING_FACE))

    @cached_property
    def _specs(self) -> tuple[Spec, ...]:
        return tuple(self._listed())

    def _listed(self) -> Iterator[Spec]:
        for name, shape in self.parameters:
            yield Spec(name, shape, "bfloat16", sharded=True)
        for name, shape in self.parameters:
            for kind in OPTIMIZERS[self.optimizer]:
                yield Spec(f"optim.{name}.{kind}", shape, "float32", sharded=True)

    def specs(self, rank: int, world: int) -> list[Spec]:
        """See :class:`.spec.Workload`."""
        check_rank(rank, world)
        return list(self._specs)

    def nbytes(self, rank: int, world: int) -> int:
        """See :class:`.spec.Workload`."""
        return nbytes_of_specs(self.specs(rank, world), rank, world)


def llama3(name: str, optimizer: str = "none", layers: int | None = None) -> Llama3:
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
    if layers is not None:
        if not 1 <= layers <= model.layers:
            raise UsageError(
                f"--layers {layers}, and {name} has {model.layers}",
                advice=f"Give a number from 1 to {model.layers}.",
            )
        model = replace(model, layers=layers)
    return Llama3(name, model, optimizer)
