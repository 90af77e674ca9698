"""Makes tensors from specs: plain ones, or DTensors if a job of several ranks shards them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ...storage.state.dtypes import dtype_of
from .content import NORMAL, Content
from .filling import Filling, fill
from .spec import Spec, itemsize_of

__all__ = ["State", "materialise"]

State = dict[str, Any]
"""Tensors by name."""


def materialise(
    specs: Sequence[Spec],
    rank: int,
    world: int,
    *,
    seed: int = 0,
    content: Content = NORMAL,
    mesh: DeviceMesh | None = None,
) -> State:
    """Make the state of ``rank`` described by ``specs``, filled with ``content``.

    The same seed gives the same state, and sharded tensors have the same elements for any
    ``world``. If ``world`` is above 1, sharded tensors are DTensors on ``mesh``. Without one, all
    ranks together make a CPU mesh here, which needs a process group. Raises UnsupportedFormatError
    for a dtype that this torch lacks, and torch's RuntimeError if memory is too small.
    """
    if world > 1 and mesh is None and any(spec.sharded for spec in specs):
        mesh = init_device_mesh("cpu", (world,))
    local = [_empty(spec, rank, world) for spec in specs]
    fill(_fillings(specs, local, rank, world), content, seed)
    return {
        spec.name: _placed(spec, tensor, mesh) for spec, tensor in zip(specs, local, strict=True)
    }


def _empty(spec: Spec, rank: int, world: int) -> torch.Tensor:
    dtype = dtype_of(spec.dtype, itemsize_of(spec.dtype))
    return torch.empty(spec.local_shape(rank, world), dtype=dtype, device="cpu")


def _fillings(
    specs: Sequence[Spec], local: Sequence[torch.Tensor], rank: int, world: int
) -> Iterator[Filling]:
    for spec, tensor in zip(specs, local, strict=True):
        first_row, _ = spec.rows(rank, world)
        first = first_row * math.prod(spec.shape[1:])
        yield Filling(spec.name, math.prod(spec.shape), first, tensor)


def _placed(spec: Spec, local: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
    if mesh is None or not spec.sharded:
        return local
    return DTensor.from_local(
        local,
        mesh,
        [Shard(0)],
        run_check=False,
        shape=torch.Size(spec.shape),
        stride=_strides(spec.shape),
    )


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return row-major strides."""
    return tuple(accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1))[::-1]
