"""Composite tensors: made up of inner tensors by torch's protocol ``__tensor_flatten__``.

Examples are quantized weights and 8-bit moments. Such a tensor is stored as a dict of its inner
tensors, keyed by attribute, plus a *description* of everything else: type, shape, dtype, and the
context that the tensor reports. A load fills the inner tensors of an existing tensor whose
description agrees, and never creates one. So no stored class name is ever looked up.

A DTensor may have a composite local tensor: torchao's 8-bit moments of parameters sharded by FSDP2.
Such a tensor has codes with the shape of the parameter's local part, and one scale per block of
elements in row-major order. If each rank's part consists of whole, consecutive blocks, codes are
laid out like the parameter, and scales are a flat range of the whole tensor's scales. These classes
are recognized by name. For others, nothing tells which part of a whole an inner tensor is.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch.distributed.tensor import DTensor, Replicate

from ....errors import StateError
from ...format.values import encode_value
from ..compat import stored_local
from .dtensor import layouts_on
from .shards import Shard
from .tensors import TensorLike, local_of

DESCRIPTION = "__tensor_flatten__"
"""Key of the description, next to the inner tensors."""

_ELEMENTS = "elements"
_BLOCKS = "blocks"
_SHARED = "shared"
_INNER = {
    "OptimState8bit": {"codes": _ELEMENTS, "scale": _BLOCKS, "qmap": _SHARED},
    "OptimStateFp8": {"codes": _ELEMENTS, "scale": _BLOCKS},
}
"""By class and inner tensor: the unit that has an item of it, or that all ranks share it."""


def is_made_of(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether ``value`` is a composite tensor without a more specific adapter."""
    return _is_block_scaled(value) or (
        isinstance(value, torch.Tensor)
        and hasattr(type(value), "__tensor_flatten__")
        and not isinstance(value, DTensor)
        and not hasattr(value, "wait")  # a pending result
        and value.layout is torch.strided
        and not value.is_nested
    )


def parts_by_name(tensor: torch.Tensor, path: str) -> dict[Any, object]:
    """Return the inner tensors of ``tensor`` and its description.

    Raises StateError for a context that cannot be described.
    """
    made = _made(tensor)
    _, context = made.__tensor_flatten__()
    described = {
        "type": type(made).__qualname__,
        "shape": list(tensor.shape),
        "dtype": _described(tensor.dtype, path),
        "context": _described(context, path),
    }
    return {**inner_tensors(tensor, path), DESCRIPTION: json.dumps(described)}


def memories_of(tensor: TensorLike) -> Iterator[TensorLike]:
    """Yield ``tensor`` itself; or, if it is composite, its inner tensors at any depth."""
    if not is_made_of(tensor):
        yield tensor
        return
    for inner in inner_tensors(tensor).values():
        yield from memories_of(inner)


def inner_tensors(tensor: torch.Tensor, path: str = "a tensor") -> dict[object, Any]:
    """Return the inner tensors by name; Shards if ranks hold parts of them."""
    names, _ = _made(tensor).__tensor_flatten__()
    if _is_block_scaled(tensor):
        return {name: _inner_of_blocks(tensor, name, path) for name in names}
    return {name: getattr(tensor, name) for name in names}


def _made(tensor: torch.Tensor) -> Any:
    """Return the owner of the inner tensors: ``tensor``, or its local part."""
    if _is_block_scaled(tensor):
        return stored_local(tensor)
    return tensor


def _is_block_scaled(value: object) -> TypeGuard[DTensor]:
    """Return whether ``value`` is a DTensor whose local part has codes and scales."""
    if not isinstance(value, DTensor):
        return False
    kind = type(stored_local(value))
    return kind.__name__ in _INNER and kind.__module__.startswith("torchao.")


def _inner_of_blocks(tensor: DTensor, name: str, path: str) -> torch.Tensor | Shard:
    """Return the inner tensor called ``name``; if ranks hold parts of it, the part.

    Raises StateError, naming ``path``, unless ranks have whole, consecutive blocks.
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


def _offsets(tensor: DTensor, local: torch.Tensor, path: str) -> tuple[int, ...]:
    whole = tuple(tensor.shape)
    pieces = layouts_on(tensor.device_mesh).of(tensor, lambda: path).pieces
    of_rows = [piece for piece in pieces if piece.box.lengths == (local.shape[0], *whole[1:])]
    if len(pieces) != 1 or not of_rows or local.shape[0] * _parts(tensor) != whole[0]:
        raise StateError(
            f"{path} is a {type(local).__name__} in a DTensor of shape {list(whole)} and "
            f"{tensor.placements}, whose ranks do not have equal numbers of whole rows",
            advice="Split only the first dimension, into equal parts; or use an optimizer whose "
            "state is not quantized.",
        )
    return tuple(of_rows[0].box.offsets)


def _parts(tensor: DTensor) -> int:
    sizes = zip(tensor.device_mesh.mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placed in sizes if not isinstance(placed, Replicate))


def _described(value: object, path: str) -> object:
    """Return ``value``, found in a tensor's context, as JSON.

    Types are named without their module, because libraries move them.
    """
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: _described(getattr(value, field.name), path)
            for field in dataclasses.fields(value)
        }
        return {"type": type(value).__qualname__, **fields}
    if isinstance(value, Mapping):
        return {str(key): _described(item, path) for key, item in value.items()}
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return [_described(item, path) for item in value]
    try:
        return encode_value(value, path)
    except StateError as error:
        raise StateError(
            f"{path} is a tensor made of tensors, whose context holds a "
            f"{type(value).__qualname__}, which cannot be described"
        ) from error


def agrees(stored: object, present: object) -> bool:
    """Return whether a stored description matches a tensor's.

    Fields that one of them lacks are ignored, because libraries add some.
    """
    if isinstance(stored, str) and isinstance(present, str):
        try:
            return _agree(json.loads(stored), json.loads(present))
        except (ValueError, RecursionError):
            return False
    return False


def _agree(a: object, b: object) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return all(_agree(a[key], b[key]) for key in a.keys() & b.keys())
    return a == b


def with_present(
    state: object, present: object, keys: tuple[object, ...], problems: dict[str, str]
) -> object:
    """Return ``state``, built from a checkpoint, with composite tensors in place of their dicts.

    Each dict of inner tensors is replaced by the tensor at the same place in ``present``, whose
    inner tensors these are. Adds an entry to ``problems``, by name, if there is no such tensor.
    """
    if is_made_of(present) or (isinstance(state, Mapping) and DESCRIPTION in state):
        problem = _problem(state, present)
        if problem is None:
            return present
        name = ".".join(map(str, keys))
        problems[name] = f"{name}: {problem}"
        return state
    if isinstance(state, dict):
        for key, item in state.items():
            here = present.get(key) if isinstance(present, Mapping) else None
            state[key] = with_present(item, here, (*keys, key), problems)
    elif isinstance(state, list | tuple):
        known = present if isinstance(present, list | tuple) else ()
        heres = (*known, *[None] * len(state))
        items = [
            with_present(item, here, (*keys, number), problems)
            for number, (item, here) in enumerate(zip(state, heres, strict=False))
        ]
        return type(state)(items)
    return state


def _problem(state: object, present: object) -> str | None:
    """Return why the stored ``state`` does not match the tensor ``present``; None if it does."""
    if not isinstance(state, Mapping) or DESCRIPTION not in state:
        return f"something other than a {type(present).__qualname__} in the checkpoint"
    if not is_made_of(present):
        return (
            f"a tensor made of tensors in the checkpoint, {state[DESCRIPTION]}, but none in the "
            f"state that could be filled (an optimizer creates them in its first step)"
        )
    parts = parts_by_name(present, "")
    description = parts.pop(DESCRIPTION)
    if not agrees(state[DESCRIPTION], description):
        return f"{state[DESCRIPTION]} in the checkpoint, {description} in the state"
    for name, part in parts.items():
        if not _is_filled(state.get(name), part):
            return f"its inner tensor {name!r} cannot be filled with the one in the checkpoint"
    return None


def _is_filled(state: object, part: object) -> bool:
    if is_made_of(part):
        return _problem(state, part) is None
    return (
        isinstance(state, torch.Tensor | Shard)
        and isinstance(part, torch.Tensor | Shard)
        and state.shape == part.shape
        and local_of(state).data_ptr() == local_of(part).data_ptr()
    )
