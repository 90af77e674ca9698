"""States laid out over the ranks of a job as DTensors, without communication.

A layout says how a mesh of ranks splits each tensor. Every rank builds the whole state from the
same seed and keeps its part. So a rank knows what it should hold under another layout without
access to the saved one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from .states import State

__all__ = ["LAYOUTS", "Layout", "lay_out", "split_evenly"]

ROW_PARALLEL = ("o_proj.weight", "down_proj.weight")


@dataclass(frozen=True)
class Layout:
    """A layout. ``placements(name, tensor)`` says how a mesh of shape ``mesh`` splits a tensor."""

    name: str
    mesh: tuple[int, ...]
    placements: Callable[[str, torch.Tensor], Sequence[Placement]]

    @property
    def world(self) -> int:
        return torch.Size(self.mesh).numel()


def _by_rows(name: str, tensor: torch.Tensor) -> Sequence[Placement]:
    return [Shard(0)]


def _fsdp_and_tp(name: str, tensor: torch.Tensor) -> Sequence[Placement]:
    """Split matrices over the second mesh axis like Megatron, and rows over the first like
    FSDP2."""
    if tensor.ndim == 1:
        return [Shard(0), Replicate()]
    if name.endswith(ROW_PARALLEL):
        return [Shard(0), Shard(1)]
    return [_StridedShard(0, split_factor=2), Shard(0)]


LAYOUTS = {
    **{f"{n} ranks": Layout(f"{n} ranks, rows", (n,), _by_rows) for n in (2, 3, 4)},
    "2×2": Layout("FSDP 2 × TP 2", (2, 2), _fsdp_and_tp),
}


def lay_out(state: State, layout: Layout) -> State:
    """Return this rank's part of a whole ``state``, in its own memory."""
    mesh = init_device_mesh("cpu", layout.mesh)

    def part(node: State, path: str) -> State:
        parts: State = {}
        for key, value in node.items():
            if isinstance(value, dict):
                parts[key] = part(value, f"{path}.{key}")
            elif isinstance(value, torch.Tensor):
                placements = layout.placements(_parameter(path, key), value)
                parts[key] = _placed(value, mesh, placements)
            else:
                parts[key] = value
        return parts

    return part(state, "")


def _parameter(path: str, key: str) -> str:
    # an optimizer's tensors are named after their parameter
    if key.endswith("weight"):
        return key
    return path


def _placed(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    axes = list(zip(placements, mesh.shape, coordinate, strict=True))
    local = full
    # A strided shard is split last, wherever it stands: the other axis has cut the rows before.
    for placement, size, at in sorted(axes, key=lambda axis: isinstance(axis[0], _StridedShard)):
        if not isinstance(placement, Replicate):
            local = _chunk(local, placement.dim, size, at)  # type: ignore[attr-defined]
    return DTensor.from_local(
        local.clone(memory_format=torch.contiguous_format), mesh, placements, run_check=False,
        shape=full.shape, stride=full.stride(),
    )  # fmt: skip


def _chunk(tensor: torch.Tensor, dim: int, size: int, at: int) -> torch.Tensor:
    chunks = tensor.chunk(size, dim)
    if at < len(chunks):
        return chunks[at]
    return tensor.narrow(dim, 0, 0)


def split_evenly(share: State, mesh: DeviceMesh) -> State:
    """Return a state in which each rank's ``share`` is its rows of a larger one."""
    parts: State = {}
    for key, value in share.items():
        if isinstance(value, dict):
            parts[key] = split_evenly(value, mesh)
        elif isinstance(value, torch.Tensor):
            parts[key] = DTensor.from_local(value, mesh, [Shard(0)], run_check=False)
        else:
            parts[key] = value
    return parts
