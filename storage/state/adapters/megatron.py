"""Parts of tensors as returned by Megatron-core's ``sharded_state_dict()``.

A ``ShardedTensor`` is a box of a global tensor. Its ``key`` names that tensor, not its path in the
state: all layers of a transformer may form one tensor with a dimension for the layers, and the
first layers of all pipeline stages have the same path. So a part is stored under its key, and one
rank may hold several parts of one tensor.

Scope: recognizes the classes by name, without importing Megatron, and translates them.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from ....errors import StateError
from ...format.tree import Key
from .foreign import refuse_master, refuse_tensor
from .shards import Shard

_MAPPING = "megatron.core.dist_checkpointing.mapping"
_SIMPLE = frozenset({bool, dict, float, int, list, str, tuple, type(None)})
"""Most items of a state have one of these types, and are not Megatron's."""


class KeyedShard(Shard):
    """A part of the tensor called ``key``, independent of its path in the state."""

    key: str
    master: torch.Tensor | None = None
    """The master copy: Megatron's optimizer overwrites the part with it in the next step."""
    may_be_padded: bool = False
    """True if the tensor's length may differ in a checkpoint, like a vocabulary padded to a
    multiple of the number of ranks."""

    def fits_in(self, shape: Sequence[int]) -> bool:
        """Return whether the part can be filled from a tensor of ``shape``, possibly
        incompletely."""
        same_ndim = len(shape) == len(self.shape)
        return same_ndim and self.may_be_padded and not self.layout.is_empty

    def clipped(self, shape: Sequence[int]) -> Shard:
        """Return the portion of the part that lies within a tensor of ``shape``."""
        box = self.layout.pieces[0].box
        sides = zip(box.offsets, box.stops, shape, strict=True)
        lengths = [max(min(stop, size) - start, 0) for start, stop, size in sides]
        local = self.tensor[tuple(map(slice, lengths))]
        return Shard(local, shape=shape, offset=list(map(min, box.offsets, shape)))


class KeyedParts:
    """The keyed parts of one state."""

    def __init__(self) -> None:
        self._first: dict[str, KeyedShard] = {}
        self._places: set[tuple[str, str]] = set()
        self._masters: dict[str, torch.Tensor] = {}

    def add(self, part: KeyedShard, path: Callable[[], str]) -> None:
        """Add a part.

        Raises StateError, naming ``path()``, if it duplicates another part, or belongs to another
        tensor with the same key.
        """
        first = self._first.setdefault(part.key, part)
        place = (part.key, part.layout.region)
        if place in self._places:
            raise StateError(f"{path()} and another item are the same part of {part.key!r}: {part}")
        if first.shape != part.shape or first.tensor.dtype != part.tensor.dtype:
            raise StateError(f"{path()} is {part}, of {part.key!r}, and another item is {first}")
        self._places.add(place)
        if part.master is not None:
            self._masters[path()] = part.master

    def check(
        self, others: Collection[str], locals_: Iterable[torch.Tensor], *, loading: bool
    ) -> None:
        """Raise StateError if one of ``others`` has the name of a part.

        For a load, also if a part's master copy is not among ``locals_``.
        """
        for name in self._first:
            if name in others:
                raise StateError(f"two items of the state have the same name, {name!r}")
        if loading:
            refuse_master(self._masters, locals_)


class ObjectData(MutableMapping[Key, object]):
    """The value of a ``ShardedObject``, as a dict of one item that a load can assign to."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __getitem__(self, key: Key) -> object:
        if key != "data":
            raise KeyError(key)
        return self._owner.data

    def __setitem__(self, key: Key, value: object) -> None:
        self._owner.data = value

    def __delitem__(self, key: Key) -> None:
        raise TypeError("the value of a ShardedObject cannot be deleted")

    def __iter__(self) -> Iterator[Key]:
        return iter(("data",))

    def __len__(self) -> int:
        return 1


def megatron_kind(item: object) -> str:
    """Return the name of the Megatron class that ``item`` is an instance of; "" if none."""
    kind = type(item)
    if kind in _SIMPLE:
        return ""
    return next((base.__name__ for base in kind.__mro__ if base.__module__ == _MAPPING), "")


def misplaced(item: object, path: str) -> StateError:
    """Return the error for an item at a place without a dict for its key."""
    return StateError(
        f"{path} is a {megatron_kind(item)} of Megatron, which is stored under its own name",
        advice="Pass a dict that has the result of sharded_state_dict() in dicts and lists only.",
    )


def keyed_parts_of(item: Any, path: Callable[[], str], *, loading: bool) -> list[KeyedShard]:
    """Return the parts of tensors that ``item`` represents.

    These are the part of a ``ShardedTensor``, or all parts that a ``ShardedTensorFactory`` makes of
    its tensor; none for a ``LocalNonpersistentObject``. Raises StateError, naming ``path()``, for
    unknown items, and for a factory that would have to merge loaded data.
    """
    kind = megatron_kind(item)
    if kind == "ShardedTensor":
        return [_part_of(item, path)]
    if kind == "ShardedTensorFactory":
        return _built_by(item, path, loading)
    if kind == "LocalNonpersistentObject":
        return []
    raise StateError(
        f"{path()} is a {kind} of Megatron, which this release does not support",
        advice="Use Megatron's dist_checkpointing with HoldfastSaveStrategy.",
    )


def _part_of(item: Any, path: Callable[[], str]) -> KeyedShard:
    data = item.data
    if not isinstance(data, torch.Tensor) or isinstance(data, DTensor):
        raise StateError(
            f"{path()} is a ShardedTensor of Megatron around a {type(data).__name__}",
            advice="Pass sharded_state_dict() of the module, whose parts are plain tensors.",
        )
    refuse_tensor(data, path, loading=False)
    local = data.detach()[(None,) * item.prepend_axis_num]
    if getattr(item, "flattened_range", None) is not None:
        raise StateError(
            f"{path()} is a ShardedTensor of Megatron with a flattened_range",
            advice="Pass optimizer_state(optimizer, model_state), from "
            "holdfast.storage.integrations.megatron.",
        )
    part = KeyedShard(local, shape=item.global_shape, offset=item.global_offset)
    part.key = item.key
    part.may_be_padded = item.allow_shape_mismatch
    part.master = data.__dict__.get("main_param")
    return part


def built_in_place(factory: Any) -> list[Any]:
    """Return the ``ShardedTensor`` items that a ``ShardedTensorFactory`` makes of its tensor.

    They are views of the tensor if the factory does nothing but view it and make copies contiguous.
    """
    try:
        with _WithoutCopies():
            built = factory.build()
    except RuntimeError:  # the factory needs contiguous copies
        built = factory.build()
    return [item for item in _leaves(built) if megatron_kind(item) != "LocalNonpersistentObject"]


class _WithoutCopies(TorchFunctionMode):
    """Mode that makes ``contiguous()`` return the tensor itself."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.contiguous:
            return args[0]
        return func(*args, **(kwargs or {}))


def _built_by(factory: Any, path: Callable[[], str], loading: bool) -> list[KeyedShard]:
    parts = [_part_of(item, path) for item in built_in_place(factory)]
    memory = factory.data.untyped_storage().data_ptr()
    for part in parts:
        if loading and part.tensor.untyped_storage().data_ptr() != memory:
            raise StateError(
                f"{path()} is a ShardedTensorFactory of Megatron that makes copies, and merges "
                f"them again when they are loaded",
                advice="Load with Megatron's dist_checkpointing and HoldfastLoadStrategy.",
            )
        part.master = factory.data.__dict__.get("main_param")
    return parts


def _leaves(built: object) -> Iterator[object]:
    if isinstance(built, Mapping):
        built = list(built.values())
    if not isinstance(built, list):
        yield built
        return
    for item in built:
        yield from _leaves(item)
