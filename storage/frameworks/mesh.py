"""DTensors: from a device mesh and placements to boxes. The planner knows the arithmetic, this file knows torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...errors import StateError
from ...planner.placement import Piece, Placement, Replicated, Split, holders, local_pieces, local_shape

__all__ = ["LocalPart", "local_part", "local_tensor"]


@dataclass(frozen=True, slots=True)
class LocalPart:
    """What this rank holds of one DTensor, and the sorted global ranks of its mesh that hold the very same."""

    pieces: tuple[Piece, ...]
    local_shape: tuple[int, ...]
    holders: tuple[int, ...]
    mesh_size: int


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """This rank's local tensor, without a node in the autograd graph."""
    with torch.no_grad():
        local = tensor.to_local()
    return local.wait() if hasattr(local, "wait") else local


def local_part(tensor: DTensor, path: str) -> LocalPart:
    """Raises StateError for a placement that is not a layout (Partial), or one this release does not know."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return LocalPart((), (0,) * tensor.ndim, (), mesh.size())
    placements = tuple(_placement(p, path) for p in tensor.placements)
    ranks = mesh.mesh
    part = _part(
        tuple(tensor.shape), tuple(ranks.shape), tuple(ranks.flatten().tolist()), tuple(coordinate), placements
    )
    actual = tuple(local_tensor(tensor).shape)
    if part.pieces and actual != part.local_shape:
        raise StateError(
            f"{path} holds a local tensor of shape {actual}, but {tensor.placements} imply {part.local_shape}",
            advice="This release does not know how this tensor is laid out.",
        )
    return part


@lru_cache(maxsize=4096)  # layers repeat: a model has few distinct (shape, placements)
def _part(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    mesh_ranks: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
) -> LocalPart:
    ranks = np.array(mesh_ranks).reshape(mesh_shape)
    return LocalPart(
        tuple(local_pieces(shape, mesh_shape, coordinate, placements)),
        local_shape(shape, mesh_shape, coordinate, placements),
        holders(ranks, coordinate, placements),
        len(mesh_ranks),
    )


def _placement(placement: object, path: str) -> Placement:
    if isinstance(placement, Replicate):
        return Replicated()
    stride = getattr(placement, "split_factor", None)  # _StridedShard: what FSDP2 makes of a tensor that TP has split
    if stride is not None:
        return Split(int(placement.dim), int(stride))  # type: ignore[attr-defined]
    if isinstance(placement, Shard):
        return Split(int(placement.dim))
    raise StateError(
        f"{path} has the placement {placement}, which is no layout",
        advice="Redistribute it to Shard or Replicate before saving.",
    )
