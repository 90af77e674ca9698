"""The same state in another layout, for loads that reshard."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Shard

from ..states import State

__all__ = ["in_another_layout", "local_nbytes"]


def in_another_layout(state: State) -> State:
    """Return the state with row-sharded tensors sharded by columns, where the ranks divide them
    evenly. The result shares the memory of ``state``, so only one of the two holds meaningful
    values."""
    return {key: _other(value) for key, value in state.items()}


def _other(value: object) -> object:
    if isinstance(value, dict):
        return in_another_layout(value)
    if isinstance(value, DTensor) and _divides(value):
        rows, columns = value.shape
        world = value.device_mesh.size()
        return DTensor.from_local(
            value.to_local().view(rows, columns // world),
            value.device_mesh,
            [Shard(1)],
            run_check=False,
        )
    return value


def _divides(tensor: DTensor) -> bool:
    if tensor.ndim != 2 or tuple(tensor.placements) != (Shard(0),):
        return False
    world = tensor.device_mesh.size()
    return tensor.shape[0] % world == 0 and tensor.shape[1] % world == 0


def local_nbytes(state: State) -> int:
    """Return the bytes that this rank holds."""
    return sum(map(_nbytes, state.values()))


def _nbytes(value: object) -> int:
    if isinstance(value, dict):
        return local_nbytes(value)
    if isinstance(value, DTensor):
        return value.to_local().nbytes
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return 0
