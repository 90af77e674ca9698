"""Reuses a flattened state: strips its contents, and refills it from a scan with equal
signature."""

from __future__ import annotations

from collections.abc import Sequence

from ...format.tree import ROOT, Tree, Value
from ..adapters.module_names import Walked
from ..flat_state import FlatState, Subtree
from .signature import SignatureScan

__all__ = ["emptied", "filled"]


def emptied(flat: FlatState) -> FlatState:
    """Return the parts of ``flat`` that its signature determines: no tensors, values or objects."""
    return FlatState(
        names=list(flat.names),
        containers=list(flat.containers),
        shapes=list(flat.shapes),
        dtypes=list(flat.dtypes),
        layouts=list(flat.layouts),
        alias=list(flat.alias),
        tree=_with_values(flat.tree, [None] * len(flat.tree.values)),
        subtrees=[Subtree(s.parent, s.key, None, None) for s in flat.subtrees],
        placeholders=flat.placeholders,
        layout_id=flat.layout_id,
    )


def filled(known: FlatState, scan: SignatureScan, modules: list[Walked]) -> FlatState:
    """Return a state with the signature of ``known`` and the contents found by ``scan``."""
    opened = zip(known.subtrees, scan.opened, strict=True)
    return FlatState(
        names=list(known.names),
        containers=list(known.containers),
        shapes=list(known.shapes),
        dtypes=list(known.dtypes),
        locals=scan.locals,
        origins=scan.origins,
        layouts=list(known.layouts),
        alias=list(known.alias),
        tree=_with_values(known.tree, scan.values),
        nodes=scan.nodes,
        subtrees=[Subtree(s.parent, s.key, owner, state) for s, (owner, state) in opened],
        modules=modules,
        placeholders=known.placeholders,
        layout_id=known.layout_id,
    )


def _with_values(tree: Tree, values: Sequence[object]) -> Tree:
    """Return a copy of ``tree`` with other values, encoded, in the same places."""
    copied = Tree()
    copied.containers = list(tree.containers)
    copied.tensor_keys = {c: dict(keys) for c, keys in tree.tensor_keys.items()}
    copied.arrays = set(tree.arrays)
    copied.orders = {c: list(runs) for c, runs in tree.orders.items()}
    copied.kinds = dict(tree.kinds)
    copied.placements = dict(tree.placements)
    copied.values = [
        Value(value.container, value.key, [([ROOT], encoded)])
        for value, encoded in zip(tree.values, values, strict=True)
    ]
    return copied
