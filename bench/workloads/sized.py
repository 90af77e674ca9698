"""States of a requested size: a Llama's proportions, or any number of equal tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ...core.forks.cached import cached_property
from ...core.units import GIB, size_text
from ...errors import UsageError
from .llama_dimensions import META, Llama, Parameter
from .spec import Spec, check_rank

__all__ = ["MASTER_AND_MOMENTS", "EqualTensors", "Sized", "equal_tensors", "scaled_parameters"]

MASTER_AND_MOMENTS = ("master", "exp_avg", "exp_avg_sq")
NBYTES_PER_PARAMETER = 14
"""The bf16 weight, and the optimizer's fp32 master copy and two moments."""
TENSORS_MAX = 1_000_000
LAYERS_MAX = TENSORS_MAX // 36

_BY_GIB = (
    (3.0, Llama(1, 2048, 5632, 512, 32000)),
    (0.9, Llama(1, 1024, 2816, 256, 32000)),
    (0.0, Llama(1, 128, 352, 32, 2000)),
)


def scaled_parameters(gib: float) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the parameters of a Llama whose whole state has about ``gib``
    GiB. The embedding is tied: there is no separate output matrix."""
    model = _scaled(gib)
    shapes: dict[str, tuple[int, ...]] = {META.embedding: (model.vocab, model.hidden)}
    for number in range(model.layers):
        shapes |= model.layer(number)
    return shapes | {META.norm: (model.hidden,)}


def _scaled(gib: float) -> Llama:
    model = next(model for least, model in _BY_GIB if gib >= least)
    rest = gib * GIB / NBYTES_PER_PARAMETER - model.vocab * model.hidden
    return replace(model, layers=max(1, round(rest / model.layer_parameters)))


@dataclass(frozen=True)
class Sized:
    """About ``wanted_nbytes`` in the proportions of a Llama trained in mixed precision, sharded
    along dimension 0 over the ranks."""

    wanted_nbytes: int

    @property
    def name(self) -> str:
        """Name, such as ``1.00 GiB``."""
        return size_text(self.wanted_nbytes)

    @property
    def world(self) -> None:
        """Any number of ranks."""
        return

    @cached_property
    def _specs(self) -> tuple[Spec, ...]:
        parameters: list[Parameter] = list(scaled_parameters(self.wanted_nbytes / GIB).items())
        weights = [Spec(f"model.{name}", shape, "bfloat16", True) for name, shape in parameters]
        optimizer = [
            Spec(f"optim.{name}.{kind}", shape, "float32", True)
            for name, shape in parameters
            for kind in MASTER_AND_MOMENTS
        ]
        return (*weights, *optimizer)

    def specs(self, rank: int, world: int) -> list[Spec]:
        """See :class:`.spec.Workload`. Raises UsageError if there are too many tensors for one
        process."""
        check_rank(rank, world)
        layers = _scaled(self.wanted_nbytes / GIB).layers
        if layers > LAYERS_MAX:
            raise UsageError(
                f"{self.name} would be {layers:,} layers, too many to name",
                advice="Give a smaller --size, or a --model.",
            )
        return list(self._specs)

    def nbytes(self, rank: int, world: int) -> int:
        """See :class:`.spec.Workload`."""
        check_rank(rank, world)
        model = _scaled(self.wanted_nbytes / GIB)
        ends = ((model.vocab, model.hidden), (model.hidden,))
        held = model.layers * _held(model.layer_shapes.values(), rank, world)
        return NBYTES_PER_PARAMETER * (held + _held(ends, rank, world))


def _held(shapes: Iterable[tuple[int, ...]], rank: int, world: int) -> int:
    """Return the elements that ``rank`` holds of tensors of these shapes."""
    local = (Spec("any", shape, "uint8", True).local_shape(rank, world) for shape in shapes)
    return sum(map(math.prod, local))


@dataclass(frozen=True)
class EqualTensors:
    """``count`` one-dimensional tensors of ``elements`` bf16 numbers each, sharded over the
    ranks."""

    count: int
    elements: int

    @property
    def name(self) -> str:
        """Name, such as ``100000 tensors of 16 B``."""
        return f"{self.count} tensors of {size_text(2 * self.elements)}"

    @property
    def world(self) -> None:
        """Any number of ranks."""
        return

    @cached_property
    def _specs(self) -> tuple[Spec, ...]:
        width = len(str(self.count - 1))
        shape = (self.elements,)
        return tuple(
            Spec(f"tensors.{number:0{width}}", shape, "bfloat16", True)
            for number in range(self.count)
        )

    def specs(self, rank: int, world: int) -> list[Spec]:
        """See :class:`.spec.Workload`."""
        check_rank(rank, world)
        return list(self._specs)

    def nbytes(self, rank: int, world: int) -> int:
        """See :class:`.spec.Workload`."""
        check_rank(rank, world)
        share = Spec("any", (self.elements,), "bfloat16", True)
        return self.count * math.prod(share.local_shape(rank, world)) * 2


def equal_tensors(nbytes: int, count: int) -> EqualTensors:
    """Return ``count`` tensors that take about ``nbytes`` together. Raises UsageError if a tensor
    would have no element, and for too many tensors."""
    if not 1 <= count <= TENSORS_MAX:
        raise UsageError(
            f"--tensors {count} is out of range", advice=f"Give a number from 1 to {TENSORS_MAX:,}."
        )
    elements = nbytes // (2 * count)
    if not elements:
        raise UsageError(
            f"{count:,} tensors do not fit in {size_text(nbytes)}",
            advice="Give a larger --size, or fewer --tensors.",
        )
    return EqualTensors(count, elements)
