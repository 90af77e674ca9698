"""8-bit moments as local tensors of DTensors: torchao's optimizers for parameters sharded by FSDP2.

Each such tensor has codes with the shape of the parameter's local part, and one scale per block of
elements in row-major order. If each rank's part consists of whole, consecutive blocks, codes are
laid out like the parameter, and scales are a flat range of the whole tensor's scales.

Scope: classes of torchao, recognized by name. For others, nothing tells which part of a whole an
inner tensor is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeGuard

import torch
from torch.distributed.tensor import DTensor, Replicate

from ....errors import StateError
from ..compat import stored_local
from .dtensor import layouts_on
from .shards import Shard

_ELEMENTS = "elements"
_BLOCKS = "blocks"
_SHARED = "shared"
_INNER = {
    "OptimState8bit": {"codes": _ELEMENTS, "scale": _BLOCKS, "qmap": _SHARED},
    "OptimStateFp8": {"codes": _ELEMENTS, "scale": _BLOCKS},
}
"""By class and inner tensor: the unit that has an item of it, or that all ranks share it."""


def is_block_scaled(value: object) -> TypeGuard[DTensor]:
    """Return whether ``value`` is a DTensor whose local part has codes and scales."""
    if not isinstance(value, DTensor):
        return False
    kind = type(stored_local(value))
    return kind.__name__ in _INNER and kind.__module__.startswith("torchao.")


def inner_of_blocks(tensor: DTensor, name: str, path: Callable[[], str]) -> torch.Tensor | Shard:
    """Return the inner tensor called ``name``; if ranks hold parts of it, the part.

    Raises StateError, naming ``path()``, unless ranks have whole, consecutive blocks.
    """
    local = stored_local(tensor)
    inner: torch.Tensor = getattr(local, name)
    kind = _INNER[type(local).__name__][name]
    if kind == _SHARED:
        return inner
    offsets = _offsets(tensor, local, path)
    if kind == _ELEMENTS:
        return Shard(inner, shape=tensor.shape, offset=offsets)
    rows = local.shape[0]
    blocks = inner.numel()
    return Shard(
        inner, shape=(blocks * tensor.shape[0] // rows,), offset=(blocks * offsets[0] // rows,)
    )


def _offsets(tensor: DTensor, local: torch.Tensor, path: Callable[[], str]) -> tuple[int, ...]:
    whole = tuple(tensor.shape)
    pieces = layouts_on(tensor.device_mesh).of(tensor, path).pieces
    of_rows = [piece for piece in pieces if piece.box.lengths == (local.shape[0], *whole[1:])]
    if len(pieces) != 1 or not of_rows or local.shape[0] * _parts(tensor) != whole[0]:
        raise StateError(
            f"{path()} is a {type(local).__name__} in a DTensor of shape {list(whole)} and "
            f"{tensor.placements}, whose ranks do not have equal numbers of whole rows",
            advice="Split only the first dimension, into equal parts; or use an optimizer whose "
            "state is not quantized.",
        )
    return tuple(of_rows[0].box.offsets)


def _parts(tensor: DTensor) -> int:
    sizes = zip(tensor.device_mesh.mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placed in sizes if not isinstance(placed, Replicate))
