"""A tensor around another one, and tasks for rank processes that save and load it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._pytree import tree_map_only

import holdfast

__all__ = ["load_around", "save_around"]

WHOLE = torch.arange(35.0).reshape(7, 5)


class Around(torch.Tensor):
    """A tensor around another one; every operation drops the data that it derives from it."""

    held: torch.Tensor
    derived: torch.Tensor | None

    @staticmethod
    def __new__(cls: Any, held: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        made.held = held
        made.derived = None
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Return the names of the inner tensors."""
        return ["held"] + ["derived"] * (self.derived is not None), None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Apply the function to the inner tensors."""
        args_of, kwargs_of = tree_map_only(cls, lambda around: around.held, (args, kwargs or {}))
        found = func(*args_of, **kwargs_of)
        if func is torch.ops.aten.copy_.default:
            return args[0]
        return tree_map_only(torch.Tensor, cls, found)


def model_of(whole: torch.Tensor) -> Any:
    """Return a module with a sharded wrapper parameter that has derived data."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plain = distribute_tensor(whole, mesh, [Shard(0)])
    around = DTensor.from_local(
        Around(plain.to_local()),
        mesh,
        plain.placements,
        run_check=False,
        shape=plain.shape,
        stride=plain.stride(),
    )
    around._local_tensor.derived = torch.ones(())
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(around, requires_grad=False))
    return model


def save_around(uri: str, lazy: bool) -> None:
    """Save twice; the second save recognises the state."""
    model = model_of(WHOLE)
    for _ in range(2):
        holdfast.async_save(uri, {"model": model}, lazy=lazy).wait()


def load_around(uri: str) -> list[bool]:
    """Load into a wrapped and a plain parameter; return the results of the checks.

    The wrapped parameter must also forget the data that it derived before.
    """
    model = model_of(torch.zeros(7, 5))
    expected = model_of(WHOLE)
    holdfast.load(uri, into={"model": model})
    into = {"model": {"w": torch.zeros(7, 5)}}
    holdfast.load(uri, into=into)
    local = model.w._local_tensor
    return [
        torch.equal(local.held, expected.w._local_tensor.held),
        local.derived is None,
        torch.equal(into["model"]["w"], WHOLE),
    ]
