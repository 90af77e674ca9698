"""States of a requested size: a Llama's proportions, or any number of equal tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...core.units import GIB, size_text
from ...errors import UsageError
from .llama3 import EMBEDDING, NORM, Llama, training_specs
from .spec import Listed, Spec

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
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (model.vocab, model.hidden)}
    for number in range(model.layers):
        shapes |= model.layer(number)
    return shapes | {NORM: (model.hidden,)}


def _scaled(gib: float) -> Llama:
    model = next(model for least, model in _BY_GIB if gib >= least)
    rest = gib * GIB / NBYTES_PER_PARAMETER - model.vocab * model.hidden
    return replace(model, layers=max(1, round(rest / model.layer_parameters)))


def sized(nbytes: int) -> Listed:
    """Return about ``nbytes`` in the proportions of a Llama trained in mixed precision. Listing its
    tensors raises UsageError if there are too many for one process."""
    return Listed(size_text(nbytes), lambda: _specs(nbytes), nbytes)


def _specs(nbytes: int) -> Iterator[Spec]:
    layers = _scaled(nbytes / GIB).layers
    if layers > LAYERS_MAX:
        raise UsageError(
            f"{size_text(nbytes)} would be {layers:,} layers, too many to name",
            advice="Give a smaller --size, or a --model.",
        )
    yield from training_specs(scaled_parameters(nbytes / GIB), "adam+master", "model.")


def equal_tensors(nbytes: int, count: int) -> Listed:
    """Return ``count`` one-dimensional bf16 tensors that take about ``nbytes`` together. Raises
    UsageError if a tensor would have no element, and for too many tensors."""
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
    width = len(str(count - 1))

    def specs() -> Iterator[Spec]:
        for number in range(count):
            yield Spec(f"tensors.{number:0{width}}", (elements,), "bfloat16", sharded=True)

    return Listed(f"{count} tensors of {size_text(2 * elements)}", specs)
