"""Adapters: map each type of tensor to this rank's memory of it and its layout.

To support another way of sharding tensors, add a file with an adapter and a row in ``ADAPTERS``. No
code outside this package asks for a tensor's type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Never, Protocol, TypeVar, cast

import torch
from torch.distributed.tensor import DTensor

from ....planner.layout import Layout, local_layout
from .dtensor import DTensorAdapter
from .shards import Shard, ShardAdapter

TensorLike = torch.Tensor | Shard
"""Anything an adapter can read."""

T_contra = TypeVar("T_contra", bound=TensorLike, contravariant=True)

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
"""Tensors that are nothing but their own memory."""


class TensorAdapter(Protocol[T_contra]):
    """Reads tensors of one type.

    An adapter serves one walk over a state. The walk keeps all tensors alive, so the adapter may
    cache by their ids.
    """

    def local(self, tensor: T_contra) -> torch.Tensor:
        """Return this rank's part as a plain tensor without a node in the autograd graph."""

    def layout(self, tensor: T_contra, local: torch.Tensor, path: Callable[[], str]) -> Layout:
        """Return the layout of ``local`` in the whole tensor.

        Raises StateError, naming ``path()``, for a layout that cannot be saved.
        """


class _PlainAdapter:
    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def layout(self, tensor: torch.Tensor, local: torch.Tensor, path: Callable[[], str]) -> Layout:
        return local_layout(tensor.shape)


ADAPTERS: dict[type[TensorLike], Callable[[], TensorAdapter[Never]]] = {
    DTensor: DTensorAdapter,
    Shard: ShardAdapter,
}
"""By type; also valid for derived types. All other tensors are plain."""

TENSOR_TYPES: tuple[type, ...] = (*PLAIN_TYPES, *ADAPTERS)
"""All types that are recognized by the type alone."""


class Adapters(dict[type, TensorAdapter[TensorLike]]):
    """The adapters of one walk, by type of tensor."""

    def __missing__(self, kind: type) -> TensorAdapter[TensorLike]:
        known = (ADAPTERS[base] for base in kind.__mro__ if base in ADAPTERS)
        # This adapter instance only ever sees tensors of this type.
        adapter = cast(TensorAdapter[TensorLike], next(known, _PlainAdapter)())
        self[kind] = adapter
        return adapter


def local_of(tensor: TensorLike) -> torch.Tensor:
    """Return this rank's part of a tensor of any type."""
    return Adapters()[type(tensor)].local(tensor)


def layout_of(tensor: TensorLike, path: Callable[[], str]) -> tuple[torch.Tensor, Layout]:
    """Return this rank's part of a tensor, and its layout. Raises StateError, naming ``path()``."""
    adapter = Adapters()[type(tensor)]
    local = adapter.local(tensor)
    return local, adapter.layout(tensor, local, path)
