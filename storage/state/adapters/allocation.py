"""Allocates tensors for a state built from a checkpoint, on their owner's device and in its layout.

Nothing here reads or communicates: given a stored tensor's entry, it returns an empty tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor.placement_types import Placement

from ....errors import MismatchError
from ..compat import ShardedTensor, overlaps_itself
from ..dtypes import dtype_name
from .composite import inner_tensors, is_made_of
from .dtensor import mesh_layout
from .multipart import InParts, parts_of
from .shards import Shard


@dataclass(frozen=True, slots=True)
class Entry:
    """A stored tensor. ``keys`` lead to it from the object whose state contains it.

    ``placements``: its layout as a DTensor; None if it was none, or nothing was recorded. ``own``:
    each rank stored its own tensor under this name.
    """

    keys: tuple[object, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple[str, ...] | None = None
    own: bool = False


Allocate = Callable[[Entry], torch.Tensor | Shard | InParts | None]
"""Function that returns the tensor to fill with an entry; None if this rank has no place for it."""


def value_at(present: object, keys: Sequence[object]) -> object:
    """Return the item under ``keys`` in ``present``, a nested state, or None."""
    for key in keys:
        if isinstance(present, Mapping):
            present = present.get(key)
        elif isinstance(present, list | tuple) and type(key) is int and key < len(present):
            present = present[key]
        elif is_made_of(present):
            present = inner_tensors(present).get(key)
        else:
            return None
    return present


def fits(present: object, entry: Entry) -> TypeGuard[torch.Tensor]:
    """Return whether ``present`` is a tensor that can be filled with ``entry`` directly."""
    return (
        isinstance(present, torch.Tensor)
        and not is_made_of(present)
        and tuple(present.shape) == entry.shape
        and present.dtype == entry.dtype
        and not present.is_meta
        and (isinstance(present, DTensor) or not overlaps_itself(present))
    )


def fitting_parts(present: ShardedTensor | InParts, entry: Entry) -> ShardedTensor | InParts:
    """Return ``present``, a tensor in parts.

    Raises MismatchError if these are not parts of the stored tensor.
    """
    for part in parts_of(present, lambda: ".".join(map(str, entry.keys))):
        fitting(part, entry)
    return present


def fitting(present: Shard, entry: Entry) -> Shard:
    """Return ``present``, a part of the stored tensor.

    Raises MismatchError if it is not a part of that tensor.
    """
    if (present.shape, present.tensor.dtype) != (entry.shape, entry.dtype):
        raise MismatchError(
            f"{'.'.join(map(str, entry.keys))} of an object: shape {list(entry.shape)} and dtype "
            f"{dtype_name(entry.dtype)} in the checkpoint, a part of shape {list(present.shape)} "
            f"and dtype {dtype_name(present.tensor.dtype)} in its state"
        )
    return present


def empty_for(reference: torch.Tensor, entry: Entry) -> torch.Tensor:
    """Return an empty tensor for ``entry``, which belongs to ``reference``, such as a parameter.

    With the same shape, it is laid out like the reference. With another shape, next to a DTensor,
    it gets the layout in which it was saved. If that is unknown, it becomes a replicated DTensor,
    because torch refuses arithmetic between DTensors and plain tensors. Numbers and per-rank
    tensors stay plain.
    """
    if is_made_of(reference):
        return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")  # never fits
    if tuple(reference.shape) == entry.shape:
        return torch.empty_like(
            reference, dtype=entry.dtype, requires_grad=False, device=device_for(reference)
        )
    if isinstance(reference, DTensor):
        plain_shapes = ((), tuple(reference.to_local().shape))
        if entry.placements is not None or not (entry.own or entry.shape in plain_shapes):
            return empty_dtensor(reference.device_mesh, device_for(reference), entry)
    device = device_for(reference) if entry.shape else torch.device("cpu")
    return torch.empty(entry.shape, dtype=entry.dtype, device=device)


def device_for(reference: torch.Tensor) -> torch.device:
    """Return the device of ``reference``; for a meta tensor, the device on which a load creates
    it."""
    if not reference.is_meta:
        return reference.device
    if isinstance(reference, DTensor):
        return torch.device(reference.device_mesh.device_type)
    return torch.device("cpu")


def empty_dtensor(mesh: DeviceMesh, device: torch.device, entry: Entry) -> DTensor:
    """Return an empty DTensor for ``entry``.

    It has its saved placements if the saved mesh had as many dimensions as ``mesh``; else it is
    replicated.
    """
    recorded = entry.placements or ()
    placements: list[Placement] = [Replicate() for _ in range(mesh.ndim)]
    if len(recorded) == mesh.ndim:
        placements = [_placement(text, entry) for text in recorded]
    layout = mesh_layout(mesh, entry.shape, placements, lambda: ".".join(map(str, entry.keys)))
    return DTensor.from_local(
        torch.empty(layout.local_shape, dtype=entry.dtype, device=device),
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(entry.shape),
        stride=torch.empty(entry.shape, device="meta").stride(),
    )


def _placement(text: str, entry: Entry) -> Placement:
    """Parse a recorded placement. Unknown ones become Replicate, which is valid for any tensor."""
    dim = text[1:]
    if text[:1] == "S" and dim.isdecimal() and int(dim) < len(entry.shape):
        return ShardPlacement(int(dim))
    return Replicate()
