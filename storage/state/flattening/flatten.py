"""Flattens a state: one row per tensor, and a tree of everything else.

Flattening reads no tensor data and does no I/O. It refuses anything that cannot be saved, by path.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...format.tree import format_path
from ..adapters.foreign import refuse_stale
from ..adapters.module_names import Walked
from ..adapters.tensors import TENSOR_TYPES
from ..filling.memoryless import find_without_memory
from ..flat_state import CONTAINERS, DEPTH_MAX, MAPPINGS, FlatState
from .default import Default
from .placeholders import find_placeholders
from .walk import Walker

_LEAVES = (*TENSOR_TYPES, int, float, str, bool, type(None))
"""Types that contain no modules."""


def flatten(state: object, *, loading: bool = False, default: Default | None = None) -> FlatState:
    """Flatten ``state``: a dict, list or tuple, or an object with a state.

    With ``loading``, only modules are expanded; other objects with a state become subtrees
    unchanged. ``default`` converts values that cannot be stored as they are. Raises StateError,
    naming the path, for anything that cannot be saved.
    """
    flat = FlatState(modules=[Walked(module) for module in _modules(state)])
    walker = Walker(flat, loading, default)
    walker.walk(state)
    if loading:
        _refuse_stale(flat)
        flat.without_memory = find_without_memory(flat, walker.on_meta)
    else:
        flat.placeholders = find_placeholders(flat)
    return flat


def _refuse_stale(flat: FlatState) -> None:
    owners = [subtree.owner for subtree in flat.subtrees]
    for subtree in flat.subtrees:
        if isinstance(subtree.owner, torch.nn.Module):
            keys = flat.keys_to(subtree)
            refuse_stale(subtree.owner, owners, format_path(keys) if keys else "the state")


def _modules(state: object) -> Iterator[torch.nn.Module]:
    """Yield the outermost modules in ``state``, in the order of a walk."""
    seen = set[int]()
    left: list[tuple[object, int]] = [(state, 0)]
    while left:
        node, depth = left.pop()
        if isinstance(node, torch.nn.Module):
            yield node
        elif isinstance(node, CONTAINERS) and id(node) not in seen and depth <= DEPTH_MAX:
            seen.add(id(node))
            items = node.values() if isinstance(node, MAPPINGS) else node
            left += [(item, depth + 1) for item in items if type(item) not in _LEAVES][::-1]
