"""Tensors of veScale: its own ``DTensor``, with its own device meshes and placements.

Its last package needs torch 2.2, so it cannot be installed next to the torch that Holdfast needs.
Classes are recognized by name, and the tests use lookalikes; sources:
``vescale/dtensor/{dtensor,placement_types,device_mesh}.py`` of volcengine/veScale. Its later
``DTensor`` inherits from torch's and is read as such.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ....errors import StateError
from ....planner.layout import MeshLayout
from ....planner.placement import Placement, Replicated, Split
from .dtensor import layout_on_mesh, local_part

__all__ = ["VescaleAdapter", "is_vescale"]


def is_vescale(kind: type) -> bool:
    """Return whether tensors of this type are veScale's."""
    return any(
        base.__name__ == "DTensor" and base.__module__.partition(".")[0] == "vescale"
        for base in kind.__mro__
    )


class VescaleAdapter:
    """Reads veScale's tensors, see :class:`.tensors.TensorAdapter`."""

    def local(self, tensor: Any) -> torch.Tensor:
        """Return this rank's local tensor, without a node in the autograd graph."""
        return local_part(tensor)

    def layout(self, tensor: Any, local: torch.Tensor, path: Callable[[], str]) -> MeshLayout:
        """Return the layout of ``local`` in the whole tensor.

        Raises StateError for a placement that is not a layout (Partial) or is unknown, and for a
        local tensor that does not match its placements.
        """
        shape = tuple(tensor.shape)
        mesh_shape = tuple(tensor.device_mesh.mesh.shape)
        placements = tuple(
            _placement(placement, shape, parts, path)
            for placement, parts in zip(tensor.placements, mesh_shape, strict=True)
        )
        _check_sections(placements, tensor, path)
        layout = layout_on_mesh(tensor.device_mesh, shape, placements)
        if local.shape != layout.local_shape and (layout.pieces or local.numel()):
            raise StateError(
                f"{path()} holds a local tensor of shape {tuple(local.shape)}, but "
                f"{tensor.placements} of shape {shape} imply {layout.local_shape}",
                advice="Redistribute it to Shard or Replicate before saving.",
            )
        return layout

    def recorded(self, tensor: Any) -> None:
        """Record nothing: a load that is not given a tensor creates a whole one."""
        return


def _placement(
    placement: Any, shape: tuple[int, ...], parts: int, path: Callable[[], str]
) -> Placement:
    name = type(placement).__name__
    if name == "Replicate":
        return Replicated()
    if name == "Shard":
        return Split(int(placement.dim) % len(shape))
    if name == "InterleavedShard":
        # The dimension is seen as interleaved_size rows, and each row is split.
        dim = int(placement.dim) % len(shape)
        sections = int(placement.interleaved_size)
        if shape[dim] % (sections * parts) == 0:
            return Split(dim, sections)
    raise StateError(
        f"{path()} of shape {shape} has veScale's placement {placement!r} over {parts} ranks, "
        f"a layout that this release does not support",
        advice="Redistribute it to Shard or Replicate before saving.",
    )


def _check_sections(placements: Sequence[Placement], tensor: Any, path: Callable[[], str]) -> None:
    """Raise StateError if a dimension split in sections is split more than once.

    The meaning of several such splits is not known.
    """
    splits = [placement for placement in placements if isinstance(placement, Split)]
    for split in splits:
        if split.stride > 1 and sum(other.dim == split.dim for other in splits) > 1:
            raise StateError(
                f"{path()} has veScale's placements {tensor.placements}, which split dimension "
                f"{split.dim} twice, once in sections: a layout that this release does not support",
                advice="Redistribute it to Shard or Replicate before saving.",
            )
