"""Classes of the shape of veScale's, whose package cannot be imported beside a torch of today: what
an adapter sees of them, and no operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

__all__ = [
    "DTensor",
    "DeviceMesh",
    "InterleavedShard",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "distributed",
    "share_of",
]


class Placement:
    """What placements have in common."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(str, vars(self).values()))})"


class Shard(Placement):
    """Split like ``torch.chunk``."""

    def __init__(self, dim: int) -> None:
        self.dim = dim


class InterleavedShard(Shard):
    """Seen as ``interleaved_size`` sections, each of which is split."""

    def __init__(self, dim: int, interleaved_size: int) -> None:
        super().__init__(dim)
        self.interleaved_size = interleaved_size


class Replicate(Placement):
    """The same on all ranks."""


class Partial(Placement):
    """A summand."""


class DeviceMesh:
    """Ranks in an array; ``rank`` is the one that asks."""

    def __init__(self, mesh: Any, rank: int) -> None:
        self.mesh = torch.as_tensor(mesh, dtype=torch.int)
        self._rank = rank

    def get_coordinate(self) -> list[int] | None:
        """Where the rank is; None where it is not on the mesh."""
        found = (self.mesh == self._rank).nonzero()
        return found[0].tolist() if len(found) else None


class DTensor(torch.Tensor):
    """A wrapper around this rank's tensor, with the shape of the whole."""

    _local_tensor: torch.Tensor
    device_mesh: DeviceMesh
    placements: tuple[Placement, ...]

    @staticmethod
    def __new__(
        cls: type[DTensor],
        local: torch.Tensor,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        shape: torch.Size,
    ) -> DTensor:
        made: DTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device
        )
        made._local_tensor = local
        made.device_mesh = mesh
        made.placements = tuple(placements)
        return made

    def to_local(self) -> torch.Tensor:
        """A view of this rank's tensor."""
        return self._local_tensor.view_as(self._local_tensor)

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["_local_tensor"], None

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise NotImplementedError(f"{func}: the stand-in computes nothing")


for _class in (Placement, Shard, InterleavedShard, Replicate, Partial):
    _class.__module__ = "vescale.dtensor.placement_types"
DTensor.__module__ = "vescale.dtensor.dtensor"


def share_of(
    whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> torch.Tensor:
    """What the rank of ``mesh`` holds of ``whole``, a copy, worked out by splitting it."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return whole.new_empty(0)
    for index, placement, parts in zip(coordinate, placements, mesh.mesh.shape, strict=True):
        if not isinstance(placement, Shard):
            continue
        dim = placement.dim % whole.ndim
        sections = getattr(placement, "interleaved_size", 1)
        rows = whole.unflatten(dim, (sections, -1))
        chunks = rows.chunk(parts, dim + 1)
        empty = rows.narrow(dim + 1, 0, 0)
        chunk = chunks[index] if index < len(chunks) else empty
        whole = chunk.flatten(dim, dim + 1)
    return whole.clone()


def distributed(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """``whole`` as the rank of ``mesh`` has it."""
    return DTensor(share_of(whole, mesh, placements), mesh, placements, whole.shape)
