"""Flattens a state: one row per tensor, and a tree of everything else.

Flattening reads no tensor data and does no I/O. It refuses anything that cannot be saved, by path.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ....core.lru import LruCache
from ....planner.layout import Layout
from ...format.tree import ROOT, Tree, Value, format_path
from ..adapters.foreign import refuse_stale
from ..adapters.module_names import Walked
from ..adapters.tensors import TENSOR_TYPES
from ..filling.memoryless import find_without_memory
from ..flat_state import CONTAINERS, DEPTH_MAX, MAPPINGS, FlatState, Subtree
from .placeholders import find_placeholders
from .signature import NoSignatureError, SignatureScan
from .walk import Default, Walker

_LEAVES = (*TENSOR_TYPES, int, float, str, bool, type(None))
"""Types that contain no modules."""

KnownStates = LruCache[FlatState]
"""Recently flattened states without their contents, by signature."""

_KNOWN = KnownStates(8)


def flatten(
    state: object,
    *,
    loading: bool = False,
    default: Default | None = None,
    known_states: KnownStates = _KNOWN,
) -> FlatState:
    """Flatten ``state``: a dict, list or tuple, or an object with a state.

    With ``loading``, only modules are expanded; other objects with a state become subtrees
    unchanged. ``default`` converts values that cannot be stored as they are. A state laid out like
    one of ``known_states`` (by default, those of this process) is not walked again. Raises
    StateError, naming the path, for anything that cannot be saved.
    """
    modules = functools.cache(lambda: [Walked(module) for module in modules_in(state)])
    scan = SignatureScan(modules)
    signature = None if loading else _signature(scan, state)
    if signature is not None:
        known = known_states.get(signature)
        if known is not None:
            return filled(known, scan, modules() if scan.opened else [])
    flat = FlatState(modules=modules())
    walker = Walker(flat, loading, scan.opened, default)
    walker.walk(state)
    if loading:
        _refuse_stale(flat)
        flat.without_memory = find_without_memory(flat, walker.on_meta)
    else:
        flat.placeholders = find_placeholders(flat)
    if signature is not None:
        flat.layout_id = _LayoutId(scan.layouts)
        known_states.put(signature, emptied(flat))
    return flat


def _signature(scan: SignatureScan, state: object) -> Hashable | None:
    try:
        return scan.signature_of(state)
    except NoSignatureError:
        return None


@dataclass(frozen=True, eq=False, slots=True)
class _LayoutId:
    """Identifies a signature. Keeps the layouts alive that the signature refers to by id."""

    layouts: list[Layout]


def _refuse_stale(flat: FlatState) -> None:
    owners = [subtree.owner for subtree in flat.subtrees]
    for subtree in flat.subtrees:
        if isinstance(subtree.owner, torch.nn.Module):
            keys = flat.keys_to(subtree)
            refuse_stale(subtree.owner, owners, format_path(keys) if keys else "the state")


def modules_in(state: object) -> Iterator[torch.nn.Module]:
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


def emptied(flat: FlatState) -> FlatState:
    """Return the parts of ``flat`` that its signature determines: no tensors, values or objects.

    Columns are shared, here and in :func:`filled`: copying those of a large state takes long.
    """
    return replace(
        flat,
        locals=[],
        origins=[],
        tree=_with_values(flat.tree, [None] * len(flat.tree.values)),
        nodes=[],
        subtrees=[Subtree(s.parent, s.key, None, None) for s in flat.subtrees],
        modules=[],
    )


def filled(known: FlatState, scan: SignatureScan, modules: list[Walked]) -> FlatState:
    """Return a state with the signature of ``known`` and the contents found by ``scan``."""
    opened = zip(known.subtrees, scan.opened, strict=True)
    return replace(
        known,
        locals=scan.locals,
        origins=scan.origins,
        tree=_with_values(known.tree, scan.values),
        nodes=scan.nodes,
        subtrees=[Subtree(s.parent, s.key, owner, state) for s, (owner, state) in opened],
        modules=modules,
    )


def _with_values(tree: Tree, values: Sequence[object]) -> Tree:
    encoded = zip(tree.values, values, strict=True)
    return replace(
        tree, values=[Value(v.container, v.key, [([ROOT], value)]) for v, value in encoded]
    )
