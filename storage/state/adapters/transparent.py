"""Tensors around one tensor that has their shape and their dtype: weights that FSDP2 gathers in
eight bits, as torchao trains with them.

What such a tensor is around is all of its data, and that is stored, under its own name; so it moves
to and from weights that nothing is around. What it keeps besides is derived from that, and it drops
that itself when it is detached.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..compat import stored_local

__all__ = ["forget_derived", "seen_through"]


def seen_through(local: torch.Tensor) -> torch.Tensor:
    """The tensor that the detached ``local`` is around; ``local`` itself, where there is none."""
    around: Any = local
    if not hasattr(around, "__tensor_flatten__"):
        return local
    names, _ = around.__tensor_flatten__()
    if len(names) != 1:
        return local
    inner = getattr(around, names[0])
    if (inner.shape, inner.dtype) != (local.shape, local.dtype):
        return local
    return seen_through(inner)


def forget_derived(parameters: Iterable[torch.Tensor]) -> None:
    """Have parameters that were filled forget what they derived from what they held before, such as
    the scale for their next gathering."""
    for parameter in parameters:
        if not isinstance(parameter, DTensor):
            continue
        local: Any = stored_local(parameter)
        detached = local.detach()
        if seen_through(detached) is not detached:
            _, *derived = local.__tensor_flatten__()[0]
            for name in derived:
                setattr(local, name, None)
