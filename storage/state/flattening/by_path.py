"""Builds a flat state from items that others have flattened, each known by its path.

Items are values and parts of tensors. An integer in a path is the index of a list item.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...format.tree import Tree
from ..adapters.shards import Shard
from ..flat_state import FlatState
from .flatten import KnownStates, flatten
from .walk import TensorRows

Path = tuple[str | int, ...]


def flat_state_of_items(
    paths: Mapping[str, Path], values: Mapping[str, object], parts: Mapping[str, Sequence[Shard]]
) -> FlatState:
    """Return the state that has ``values``, and tensors with these ``parts``, each at its path.

    Raises StateError, naming the path, for a value that cannot be stored.
    """
    flat = flat_state_at(paths, {**values, **{name: held[0] for name, held in parts.items()}})
    _add_further_parts(flat, parts)
    return flat


def flat_state_at(paths: Mapping[str, Path], items: Mapping[str, object]) -> FlatState:
    """Return the state that has these values and tensors, each at its path.

    Raises StateError, naming the path, for a value that cannot be stored.
    """
    state: dict[str | int, object] = {}
    for name, item in items.items():
        put(state, paths[name], item)
    flat = flatten(state, known_states=KnownStates(0))  # shared with no other, since it is changed
    lists = {
        path[:depth]
        for path in paths.values()
        for depth in range(1, len(path))
        if isinstance(path[depth], int)
    }
    _make_lists(flat.tree, lists)
    flat.layout_id = None  # identifies the state before its lists were made
    return flat


def sound_paths(paths: Mapping[str, Path]) -> dict[str, Path]:
    """Return the paths, each replaced by its name as a single key if it cannot belong to a state.

    A sound path leads through dicts, and through lists without missing items.
    """
    keys_in: defaultdict[Path, set[str | int]] = defaultdict(set)
    for path in paths.values():
        for depth, key in enumerate(path):
            keys_in[path[:depth]].add(key)
    unsound = set()
    for path, keys in keys_in.items():
        is_list = any(isinstance(key, int) for key in keys)
        if path and is_list and keys != set(range(len(keys))):
            unsound.add(path)
    unsound |= keys_in.keys() & set(paths.values())
    return {
        name: (name,) if any(path[:depth] in unsound for depth in range(len(path))) else path
        for name, path in paths.items()
    }


def put(state: dict[str | int, object], path: Path, item: object) -> None:
    """Put ``item`` at ``path``. Lists are dicts for now, since some of their items may be
    missing."""
    *above, key = path
    for step in above:
        within = state.setdefault(step, {})
        assert isinstance(within, dict)
        state = within
    state[key] = item


def _make_lists(tree: Tree, lists: set[Path]) -> None:
    """Turn the containers at ``lists`` into lists.

    Drops the recorded order of dict items, which covers only some of them.
    """
    tree.orders.clear()
    for number, path in enumerate(tree.paths()):
        if path in lists:
            tree.containers[number] = replace(tree.containers[number], kind="list")
            tree.tensor_keys.pop(number, None)


def _add_further_parts(flat: FlatState, parts: Mapping[str, Sequence[Shard]]) -> None:
    """Give every further part of a tensor its own row under the same name."""
    row_of = {name: row for row, name in enumerate(flat.names)}
    rows = TensorRows(flat)
    for name, held in parts.items():
        container = flat.containers[row_of[name]]
        for part in held[1:]:
            rows.add(part.tensor, part.layout, part, container, name, may_be_tied=False)
