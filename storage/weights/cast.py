"""Converts the weights of a state to the dtype that is published."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...errors import StateError, UsageError


def checked_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return the floating-point dtype to publish: ``"bf16"``, ``"bfloat16"``, ``torch.bfloat16``
    and the like. None: each tensor keeps its own. Raises UsageError."""
    short = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    found = dtype
    if isinstance(dtype, str):
        found = getattr(torch, short.get(dtype, dtype), None)
    if found is None and dtype is None:
        return None
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UsageError(f"dtype={dtype!r}", advice='Give a floating-point dtype, such as "bf16".')
    return found


def cast_weights(state: object, dtype: torch.dtype | None) -> object:
    """Return ``state`` with its modules expanded and its floating-point tensors in ``dtype``.

    Tensors that already have that dtype are not copied. Raises StateError for an object that is
    neither a module, a container, a tensor nor a plain value.
    """
    if isinstance(state, torch.nn.Module):
        return state if dtype is None else cast_weights(state.state_dict(), dtype)
    if isinstance(state, torch.Tensor):
        if dtype is None or not state.is_floating_point() or state.dtype == dtype:
            return state
        return state.detach().to(dtype)
    if isinstance(state, Mapping):
        return {key: cast_weights(value, dtype) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [cast_weights(value, dtype) for value in state]
    if hasattr(state, "state_dict"):
        raise StateError(
            f"a {type(state).__name__} is no set of weights",
            advice="Publish modules and tensors; save the rest with a Checkpointer.",
        )
    return state
