"""Adapters: from each type of tensor to the memory that this rank has of it, and its layout.

A new way to cut tensors up is one more file with an adapter, and one row in ``ADAPTERS``. Nothing
outside of this package asks what type a tensor is of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Never, Protocol, TypeVar, cast

import torch
from torch.distributed.tensor import DTensor

from ....planner.layout import Layout, local_layout
from .dtensor import DTensorAdapter
from .shards import Shard, ShardAdapter
from .vescale import VescaleAdapter, is_vescale

__all__ = [
    "ADAPTERS",
    "PLAIN_TYPES",
    "TENSOR_TYPES",
    "Adapters",
    "TensorAdapter",
    "TensorLike",
    "layout_of",
    "local_of",
]

TensorLike = torch.Tensor | Shard
"""What an adapter reads."""

T_contra = TypeVar("T_contra", bound=TensorLike, contravariant=True)

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
"""Tensors that are their own memory, and nothing else."""


class TensorAdapter(Protocol[T_contra]):
    """Reads tensors of one type. Serves one walk over a state, which keeps all tensors alive; so it
    may keep what it learns by their ids."""

    def local(self, tensor: T_contra) -> torch.Tensor:
        """The part in this rank's memory, as a plain tensor without a node in the autograd
        graph."""

    def layout(self, tensor: T_contra, local: torch.Tensor, path: Callable[[], str]) -> Layout:
        """What ``local`` is of the whole. Raises StateError, which names ``path()``, for a layout
        that cannot be saved."""

    def recorded(self, tensor: T_contra) -> tuple[str, ...] | None:
        """How a manifest records the layout, so that a load can make such a tensor; None where
        there is nothing to record."""


class _PlainAdapter:
    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def layout(self, tensor: torch.Tensor, local: torch.Tensor, path: Callable[[], str]) -> Layout:
        return local_layout(tensor.shape)

    def recorded(self, tensor: torch.Tensor) -> None:
        return None


_PLAIN = _PlainAdapter()
ADAPTERS: dict[type[TensorLike], Callable[[], TensorAdapter[Never]]] = {
    DTensor: DTensorAdapter,
    Shard: ShardAdapter,
}
"""By type. What is of none of these, nor of a type that inherits from one, is plain."""

TENSOR_TYPES: tuple[type, ...] = (*PLAIN_TYPES, *ADAPTERS)
"""All that are known by their type alone."""


class Adapters:
    """The adapters of one walk."""

    def __init__(self) -> None:
        plain = cast(TensorAdapter[TensorLike], _PLAIN)
        self._by_type: dict[type, TensorAdapter[TensorLike]] = dict.fromkeys(PLAIN_TYPES, plain)

    def of(self, tensor: TensorLike) -> TensorAdapter[TensorLike]:
        """The adapter for ``tensor``."""
        kind = type(tensor)
        adapter = self._by_type.get(kind)
        if adapter is None:
            # It is asked of tensors of this type alone.
            adapter = cast(TensorAdapter[TensorLike], _adapter_of(kind)())
            self._by_type[kind] = adapter
        return adapter


def _adapter_of(kind: type) -> Callable[[], TensorAdapter[Never]]:
    known = (ADAPTERS[base] for base in kind.__mro__ if base in ADAPTERS)
    if is_vescale(kind):  # not imported, so not in a table of types
        return next(known, VescaleAdapter)
    return next(known, _PlainAdapter)


def local_of(tensor: TensorLike) -> torch.Tensor:
    """What this rank holds of one tensor of any type."""
    return Adapters().of(tensor).local(tensor)


def layout_of(tensor: TensorLike, path: Callable[[], str]) -> tuple[torch.Tensor, Layout]:
    """The same, and its layout. Raises StateError, which names ``path()``."""
    adapter = Adapters().of(tensor)
    local = adapter.local(tensor)
    return local, adapter.layout(tensor, local, path)
