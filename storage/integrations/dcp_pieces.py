"""What a rank writes for torch's distributed checkpoint (DCP): from the items of its plan to a flat
state.

An item is a box of a tensor, or a value. A rank has some of the items of a state, of which DCP has
dealt out those that several ranks hold. The containers come back from the paths that the planner
notes; where it notes none, the name of an item is its key.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from ...errors import SaveError, StateError
from ..format.tree import Tree, format_path
from ..state.adapters.shards import Shard
from ..state.flat_state import FlatState
from ..state.flatten import flatten
from .dcp_contents import OPAQUE_KEY

__all__ = ["flat_state_of"]

Path = tuple[str | int, ...]

_SIMPLE = (bool, bytes, float, int, str, type(None))


def flat_state_of(
    plan: SavePlan, planner: SavePlanner, world: int, *, allow_opaque: bool
) -> FlatState:
    """The state of the items in ``plan``, for one of ``world`` ranks.

    Raises StateError, which names the path, for a value that needs pickle, unless ``allow_opaque``:
    then what the planner has made of it is kept as bytes.
    """
    paths = _paths_of(plan)
    state: dict[str | int, object] = {}
    parts: defaultdict[str, list[Shard]] = defaultdict(list)
    for item in plan.items:
        name = item.index.fqn
        if item.type == WriteItemType.BYTE_IO:
            value = _value_of(item, planner, paths[name], allow_opaque)
            _put(state, paths[name], value)
            continue
        part = _part_of(item, planner)
        if not parts[name]:
            _put(state, paths[name], part)
        parts[name].append(part)
    flat = flatten(state)
    _make_lists(flat.tree, {path for each in paths.values() for path in _lists_in(each)})
    _add_further_parts(flat, parts)
    if world > 1:  # each rank may have been dealt parts of another one of the tied tensors
        flat.alias = [-1] * len(flat.alias)
    flat.layout_id = None  # it stands for the state as it was flattened
    return flat


def _paths_of(plan: SavePlan) -> Mapping[str, Path]:
    """By name of an item, the keys that lead to it in the state."""
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
    """The value as it is stored."""
    refused: StateError | None = None
    if isinstance(planner, DefaultSavePlanner):
        value = planner.lookup_object(item.index)
        if _serializes_as_it_is(planner) or _serialized(planner, item) == _saved(value):
            refused = _refusal(value, path)
            if refused is None:
                return value
    if refused is None:
        refused = StateError(f"{_text(path)} is known as the planner has serialized it alone")
    if not allow_opaque:
        refused.advice = (
            "Save tensors, numbers, strings, bytes, and containers of them; or keep it as the "
            "planner serializes it: HoldfastWriter(uri, allow_opaque=True)."
        )
        raise refused
    content = bytearray(_serialized(planner, item))
    return {OPAQUE_KEY: torch.frombuffer(content, dtype=torch.uint8)}


def _serializes_as_it_is(planner: DefaultSavePlanner) -> bool:
    """Whether a planner hands out values as they are in the state. One with methods of its own may
    have changed them."""
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
    """What DCP's own planner makes of a value."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _refusal(value: object, path: Path) -> StateError | None:
    """Why a value cannot be stored as it is; None where it can."""
    if type(value) in _SIMPLE:
        return None
    state: dict[str | int, object] = {}
    _put(state, path, value)
    try:
        flat = flatten(state)
    except StateError as error:
        return error
    for subtree in flat.subtrees:
        keys = (*flat.tree.paths()[subtree.parent], subtree.key)
        kind = f"{type(subtree.owner).__module__}.{type(subtree.owner).__qualname__}"
        return StateError(f"{format_path(keys)} is a {kind}, which is no value but has a state")
    if any(layout.holders for layout in flat.layouts):
        return StateError(f"{_text(path)} holds DTensors, and DCP takes it as one value")
    return None


def _text(path: Path) -> str:
    return format_path(path)


def _put(state: dict[str | int, object], path: Path, item: object) -> None:
    """Put ``item`` where ``path`` leads to. Lists are dicts, for now: this rank may have some of
    their items only."""
    *above, key = path
    for step in above:
        within = state.setdefault(step, {})
        assert isinstance(within, dict)
        state = within
    state[key] = item


def _lists_in(path: Path) -> Sequence[Path]:
    """The lists that a path leads through, each by its own path."""
    return [path[:depth] for depth in range(1, len(path)) if isinstance(path[depth], int)]


def _make_lists(tree: Tree, lists: set[Path]) -> None:
    """Make the containers at ``lists`` lists. The order of the items of dicts is dropped: it is
    that of a part of them."""
    tree.orders.clear()
    for number, path in enumerate(tree.paths()):
        if path in lists:
            tree.containers[number] = replace(tree.containers[number], kind="list")
            tree.tensor_keys.pop(number, None)


def _add_further_parts(flat: FlatState, parts: Mapping[str, Sequence[Shard]]) -> None:
    """Give each part but the first of a tensor a row of its own, of the same name."""
    row_of = {name: row for row, name in enumerate(flat.names)}
    for name, held in parts.items():
        for part in held[1:]:
            flat.names.append(name)
            flat.containers.append(flat.containers[row_of[name]])
            flat.shapes.append(part.shape)
            flat.dtypes.append(part.tensor.dtype)
            flat.locals.append(part.tensor)
            flat.origins.append(part.tensor)
            flat.layouts.append(part.layout)
            flat.alias.append(-1)
