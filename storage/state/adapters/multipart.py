"""Tensors with possibly several parts on one rank.

These are torch's ShardedTensor, and objects with the hooks of
``torch.distributed._checkpointable``, which torch's distributed checkpoints call. Each part becomes
one :class:`.shards.Shard`.

Scope: not DTensors, which have these hooks too, but also their own adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeGuard

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from ....errors import StateError, UsageError
from ..compat import LocalShardsWrapper, ShardedTensor
from .shards import Shard


class _Chunk(Protocol):
    offsets: Sequence[int]
    sizes: Sequence[int]


class InParts(Protocol):
    """An object with the hooks."""

    def __create_chunk_list__(self) -> list[Any]:
        """Return the box of each part, with ``offsets`` and ``sizes``."""

    def __create_write_items__(self, fqn: str, object: object) -> list[Any]:
        """Return DCP's write items, which include the shape of the whole."""

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the part that begins at the offset of ``index``."""


_CONTAINERS = (dict, list, tuple)
_HOOKS = ("__create_chunk_list__", "__create_write_items__", "__get_tensor_shard__")


def is_in_parts(value: object) -> TypeGuard[ShardedTensor | InParts]:
    """Return whether ``value`` knows which parts of a larger tensor it holds."""
    if type(value) in _CONTAINERS:
        return False
    if isinstance(value, DTensor | LocalShardsWrapper):
        return False  # the latter is within a DTensor, which knows the shape of the whole
    return isinstance(value, ShardedTensor) or all(hasattr(value, hook) for hook in _HOOKS)


def parts_of(value: ShardedTensor | InParts, path: Callable[[], str]) -> list[Shard]:
    """Return the parts that this rank holds: at least one, possibly empty.

    Raises StateError if they do not belong to one tensor.
    """
    try:
        if isinstance(value, ShardedTensor):
            return _of_sharded(value)
        return _of_hooks(value)
    except UsageError as error:
        raise StateError(f"{path()} is in parts that do not fit together: {error}") from error


def _of_sharded(tensor: ShardedTensor) -> list[Shard]:
    shape = tuple(tensor.size())
    parts = [
        Shard(shard.tensor.detach(), shape=shape, offset=shard.metadata.shard_offsets)
        for shard in tensor.local_shards()
    ]
    return parts or [_nothing(shape, tensor.dtype)]


def _of_hooks(value: InParts) -> list[Shard]:
    items = [item.tensor_data for item in value.__create_write_items__("", value)]
    shapes = {tuple(item.size) for item in items}
    if len(shapes) != 1:
        raise UsageError(f"its hooks name {len(shapes)} shapes of the whole, not one")
    (shape,) = shapes
    chunks: list[_Chunk] = value.__create_chunk_list__()
    parts = [
        Shard(_shard(value, number, chunk), shape=shape, offset=chunk.offsets)
        for number, chunk in enumerate(chunks)
    ]
    return parts or [_nothing(shape, items[0].properties.dtype)]


def _shard(value: InParts, number: int, chunk: _Chunk) -> torch.Tensor:
    tensor = value.__get_tensor_shard__(MetadataIndex("", chunk.offsets, number))
    if tuple(tensor.shape) != tuple(chunk.sizes):
        raise UsageError(
            f"its hooks say that part {number} has shape {list(chunk.sizes)}, and it has "
            f"{list(tensor.shape)}"
        )
    return tensor.detach()


def _nothing(shape: tuple[int, ...], dtype: torch.dtype) -> Shard:
    return Shard(torch.empty(0, dtype=dtype, device="cpu"), shape=shape, flat=(0, 0))
