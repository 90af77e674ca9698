"""DTensors: from a device mesh and placements to boxes. The planner knows the arithmetic, this file
knows torch."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ....errors import StateError
from ....planner.placement import (
    Piece,
    Placement,
    Replicated,
    Split,
    holders,
    local_pieces,
    local_shape,
)

__all__ = [
    "LocalPart",
    "Parts",
    "check_layout",
    "hooked",
    "local_part",
    "local_tensor",
    "parts_of",
    "placement_texts",
]


@dataclass(frozen=True, slots=True)
class LocalPart:
    """What this rank holds of one DTensor, and the sorted global ranks of its mesh that hold the
    very same."""

    pieces: tuple[Piece, ...]
    local_shape: tuple[int, ...]
    holders: tuple[int, ...]
    mesh_size: int
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(
        self,
    ) -> None:  # not of all ranks that hold it, of which there may be thousands; once, not per use
        object.__setattr__(self, "_hash", hash((self.pieces, self.mesh_size)))

    def __hash__(self) -> int:
        return self._hash


@dataclass(slots=True)
class Parts:
    """What is known of tensors on one mesh: layers repeat, a model has few of these. To look up
    placements takes torch longer than all else about a tensor; so what was found is also kept by
    which tuple they were. A tensor keeps its own, also when it is detached, and a tuple that is
    kept is no other."""

    by_value: dict[Hashable, LocalPart] = field(default_factory=dict)
    by_tuple: dict[Hashable, tuple[Hashable, LocalPart]] = field(default_factory=dict)

    def of(self, tensor: DTensor, path: Callable[[], str]) -> LocalPart:
        """What this rank holds of ``tensor``. Raises StateError, see :func:`local_part`."""
        placements, shape = tensor.placements, tensor.shape
        known = self.by_tuple.get((id(placements), shape))
        if known is not None:
            return known[1]
        part = self.by_value.get((placements, shape))
        if part is None:
            _make_room(self.by_value)
            part = self.by_value[placements, shape] = _part(tensor, path)
        _make_room(self.by_tuple)
        self.by_tuple[id(placements), shape] = (placements, part)
        return part


def placement_texts(tensor: DTensor) -> tuple[str, ...]:
    """How ``tensor`` is laid out, a text for each dimension of its mesh: ``R`` for Replicate,
    ``S0`` for Shard(0)."""
    return tuple(
        ["R" if isinstance(p, Replicate) else f"S{getattr(p, 'dim', 0)}" for p in tensor.placements]
    )


def _make_room(known: dict[Hashable, Any]) -> None:
    if len(known) >= _PARTS_MAX:
        known.clear()


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """This rank's local tensor, without a node in the autograd graph."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            return local_tensor(tensor)
    local = tensor.to_local()
    return local.wait() if hasattr(local, "wait") else local


def local_part(
    tensor: DTensor, local: torch.Tensor, path: Callable[[], str], known: Parts | None = None
) -> LocalPart:
    """What ``local``, this rank's part of ``tensor``, is of the whole. ``known``: the ``parts_of``
    its mesh, if at hand.

    Raises StateError for a placement that is not a layout (Partial), or one this release does not
    know.
    """
    if known is None:
        known = parts_of(tensor.device_mesh)
    part = known.of(tensor, path)
    if local.shape != part.local_shape and (part.pieces or local.numel()):
        raise StateError(
            f"{path()} holds a local tensor of shape {tuple(local.shape)}, "
            f"but {tensor.placements} of shape {tuple(tensor.shape)} imply {part.local_shape}",
            advice=(
                "This release does not know how this tensor is laid out. Redistribute it evenly."
            ),
        )
    if hooked(tensor, local):
        _check_hooks(tensor, local, part, path)
    return part


def hooked(tensor: torch.Tensor, local: torch.Tensor | None = None) -> bool:
    """Whether ``tensor``, or its part ``local``, tells by hooks of its own how it is laid out (the
    protocol of ``torch.distributed._checkpointable``, which overrules the placements of a DTensor).
    """
    # Every DTensor has these methods, which ask the local tensor. What counts are others than
    # those.
    if type(tensor) is DTensor:
        own = _CHUNKS in tensor.__dict__ or _WRITES in tensor.__dict__
    elif isinstance(tensor, DTensor):
        own = any(
            getattr(type(tensor), name) is not getattr(DTensor, name) for name in (_CHUNKS, _WRITES)
        )
    else:
        own = hasattr(tensor, _CHUNKS) or hasattr(tensor, _WRITES)
    return own or (local is not None and (hasattr(local, _CHUNKS) or hasattr(local, _WRITES)))


_CHUNKS, _WRITES = "__create_chunk_list__", "__create_write_items__"


def check_layout(tensor: DTensor, local: torch.Tensor, path: Callable[[], str]) -> None:
    """Raise StateError where hooks of ``tensor``, or of its part ``local``, tell another layout
    than its placements."""
    if hooked(tensor, local):
        _check_hooks(tensor, local, parts_of(tensor.device_mesh).of(tensor, path), path)


def _check_hooks(
    tensor: DTensor, local: torch.Tensor, part: LocalPart, path: Callable[[], str]
) -> None:
    implied = sorted((tuple(p.box.offsets), tuple(p.box.lengths)) for p in part.pieces)
    told = _told_boxes(tensor, local)
    if told != implied:
        tells = "do not say where it lies" if told is None else f"say that it holds {_text(told)}"
        raise StateError(
            f"{path()} is a DTensor whose hooks {tells}, but {tensor.placements} of shape "
            f"{tuple(tensor.shape)} imply "
            f"{_text(implied)}: it has a layout that this release does not know, such as that of "
            f"Megatron-FSDP",
            advice="Redistribute it to Shard or Replicate, or shard with fully_shard (FSDP2).",
        )


def _told_boxes(tensor: DTensor, local: torch.Tensor) -> list[Box] | None:
    """The boxes (offsets, lengths) with elements that hooks tell of; None where there is no hook
    for that."""
    source: Any = local if hasattr(local, _CHUNKS) else tensor
    if source is tensor and hasattr(local, _WRITES):
        return None
    chunks = getattr(source, _CHUNKS)()
    boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]
    return sorted(box for box in boxes if 0 not in box[1])


def _text(boxes: list[Box]) -> str:
    return (
        ", ".join(f"{list(lengths)} at {list(offsets)}" for offsets, lengths in boxes[:4])
        or "nothing"
    )


Box = tuple[tuple[int, ...], tuple[int, ...]]
_PARTS_MAX = 4096
_parts: WeakKeyDictionary[DeviceMesh, dict[Hashable, Parts]] = WeakKeyDictionary()


def parts_of(mesh: DeviceMesh) -> Parts:
    """What is known of tensors on ``mesh``. Kept, since to list the ranks of a mesh takes longer
    the more there are."""
    return _parts.setdefault(mesh, {}).setdefault(_coordinate(mesh), Parts())


def _coordinate(mesh: DeviceMesh) -> tuple[int, ...] | None:
    """Where on ``mesh`` this rank is; None where it is not on it. Some releases of torch have a
    list of it."""
    at = mesh.get_coordinate()
    return None if at is None else tuple(at)


def _part(tensor: DTensor, path: Callable[[], str]) -> LocalPart:
    mesh = tensor.device_mesh
    coordinate = _coordinate(mesh)
    if coordinate is None:
        return LocalPart((), (0,) * tensor.ndim, (), mesh.size())
    placements = tuple(_placement(p, path) for p in tensor.placements)
    ranks, shape = mesh.mesh.numpy(), tuple(tensor.shape)
    return LocalPart(
        tuple(local_pieces(shape, ranks.shape, coordinate, placements)),
        local_shape(shape, ranks.shape, coordinate, placements),
        holders(ranks, coordinate, placements),
        ranks.size,
    )


def _placement(placement: object, path: Callable[[], str]) -> Placement:
    if isinstance(placement, Replicate):
        return Replicated()
    stride = getattr(
        placement, "split_factor", None
    )  # _StridedShard: what FSDP2 makes of a tensor that TP has split
    if stride is not None:
        return Split(int(placement.dim), int(stride))  # type: ignore[attr-defined]
    if isinstance(placement, Shard):
        return Split(int(placement.dim))
    raise StateError(
        f"{path()} has the placement {placement}, which is no layout",
        advice="Redistribute it to Shard or Replicate before saving.",
    )
