"""Transparent wrappers: tensors around one tensor with the same shape and dtype.

Examples are weights that FSDP2 gathers in eight bits, as torchao trains with them. The inner tensor
is all of the data, and is stored under the wrapper's name, so it moves to and from unwrapped
weights. Everything else in the wrapper is derived from it, and the wrapper drops that when
detached.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..compat import stored_local


def seen_through(local: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside the detached ``local``; ``local`` itself if it wraps none."""
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
    """Reset values that filled parameters derived from their old contents.

    An example is the scale for their next gathering.
    """
    for parameter in parameters:
        if not isinstance(parameter, DTensor):
            continue
        local: Any = stored_local(parameter)
        detached = local.detach()
        if seen_through(detached) is not detached:
            _, *derived = local.__tensor_flatten__()[0]
            for name in derived:
                setattr(local, name, None)
