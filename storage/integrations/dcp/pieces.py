"""Conversion of the items in a DCP save plan to a flat state.

An item is a box of a tensor, or a value. A rank has some of the items of a state: DCP has already
distributed items that several ranks hold. Containers are restored from the paths that the planner
records; without a path, the name of an item is its key.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from ....errors import SaveError, StateError
from ...format.tree import format_path
from ...operations.conversion.dcp_contents import OPAQUE_KEY
from ...state.adapters.shards import Shard
from ...state.flat_state import FlatState
from ...state.flattening.by_path import Path, flat_state_of_items, put
from ...state.flattening.flatten import flatten

__all__ = ["flat_state_of"]

_SIMPLE = (bool, bytes, float, int, str, type(None))


def flat_state_of(
    plan: SavePlan, planner: SavePlanner, world: int, *, allow_opaque: bool
) -> FlatState:
    """Return the state of the items in ``plan``, for one of ``world`` ranks.

    A value that needs pickle raises StateError with its path; with ``allow_opaque`` the planner's
    serialized form is stored as bytes instead.
    """
    paths = _paths_of(plan)
    values: dict[str, object] = {}
    parts: defaultdict[str, list[Shard]] = defaultdict(list)
    for item in plan.items:
        name = item.index.fqn
        if item.type == WriteItemType.BYTE_IO:
            values[name] = _value_of(item, planner, paths[name], allow_opaque)
        else:
            parts[name].append(_part_of(item, planner))
    flat = flat_state_of_items(paths, values, parts)
    if world > 1:  # each rank may hold parts of a different one of the tied tensors
        flat.alias = [-1] * len(flat.alias)
    return flat


def _paths_of(plan: SavePlan) -> Mapping[str, Path]:
    """Return the keys that lead to each item in the state, by name of the item."""
    noted = plan.planner_data
    if not isinstance(noted, Mapping):
        noted = {}
    paths: dict[str, Path] = {}
    for item in plan.items:
        name = item.index.fqn
        path = noted.get(name)
        if not isinstance(path, tuple) or ".".join(map(str, path)) != name:
            path = (name,)
        paths[name] = path
    return paths


def _part_of(item: WriteItem, planner: SavePlanner) -> Shard:
    data = item.tensor_data
    tensor = planner.resolve_data(item)
    if data is None or not isinstance(tensor, torch.Tensor):
        raise SaveError(f"the planner has no tensor for {item.index.fqn!r}")
    if tensor.shape != data.chunk.sizes:
        raise SaveError(
            f"{item.index.fqn!r}: the planner gives a tensor of shape {list(tensor.shape)} for a "
            f"box of {list(data.chunk.sizes)}"
        )
    return Shard(tensor.detach(), shape=data.size, offset=data.chunk.offsets)


def _value_of(item: WriteItem, planner: SavePlanner, path: Path, allow_opaque: bool) -> object:
    refused: StateError | None = None
    if isinstance(planner, DefaultSavePlanner):
        value = planner.lookup_object(item.index)
        if _serializes_as_it_is(planner) or _serialized(planner, item) == _saved(value):
            refused = _refusal(value, path)
            if refused is None:
                return value
    if refused is None:
        refused = StateError(f"{format_path(path)} is available only as serialized by the planner")
    if not allow_opaque:
        refused.advice = (
            "Save tensors, numbers, strings, bytes, and containers of them; or keep it as the "
            "planner serializes it: HoldfastWriter(uri, allow_opaque=True)."
        )
        raise refused
    content = bytearray(_serialized(planner, item))
    return {OPAQUE_KEY: torch.frombuffer(content, dtype=torch.uint8)}


def _serializes_as_it_is(planner: DefaultSavePlanner) -> bool:
    """Return whether a planner returns values unchanged; its own methods may have changed them."""
    kind = type(planner)
    return (
        kind.resolve_data is DefaultSavePlanner.resolve_data
        and kind.transform_object is DefaultSavePlanner.transform_object
    )


def _serialized(planner: SavePlanner, item: WriteItem) -> bytes:
    stream = planner.resolve_data(item)
    if not isinstance(stream, io.BytesIO):
        raise SaveError(f"the planner has no bytes for {item.index.fqn!r}")
    return stream.getvalue()


def _saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _refusal(value: object, path: Path) -> StateError | None:
    """Return why a value cannot be stored as it is; None if it can."""
    if type(value) in _SIMPLE:
        return None
    state: dict[str | int, object] = {}
    put(state, path, value)
    try:
        flat = flatten(state)
    except StateError as error:
        return error
    for subtree in flat.subtrees:
        where = format_path(flat.keys_to(subtree))
        kind = f"{type(subtree.owner).__module__}.{type(subtree.owner).__qualname__}"
        return StateError(f"{where} is a {kind}, which is not a plain value but has a state")
    if any(layout.holders for layout in flat.layouts):
        return StateError(f"{format_path(path)} holds DTensors, and DCP treats it as one value")
    return None
