"""A flattened state: one row per tensor, and a tree of everything else.

Scope: data only. :mod:`.flattening.flatten` builds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ...planner.layout import Layout
from ..format.tree import Key, Tree, format_path
from .adapters.module_names import Walked
from .adapters.tensors import TensorLike

MAPPINGS = (dict, Mapping)
"""Plain dicts come first, because that check takes a tenth of the time: a state has thousands."""
CONTAINERS = (dict, list, tuple, Mapping)
DEPTH_MAX = 200
"""Maximum nesting of a state's containers. Deeper states are refused."""


@dataclass(frozen=True, slots=True)
class Subtree:
    """An object with a state, at ``key`` of container ``parent``.

    ``state`` is its expansion, flattened in the object's place. It is None for an object that a
    load will hand its stored state; then ``present`` is the object's current state.
    """

    parent: int
    key: Key
    owner: object
    state: object
    present: object = None


@dataclass(slots=True)
class FlatState:
    """The tensors as columns, and the tree. ``nodes`` are the container objects, by number.

    States with the same signature share columns: replace them instead of changing them.
    """

    names: list[str] = field(default_factory=list)
    containers: list[int] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    locals: list[torch.Tensor] = field(default_factory=list)
    """This rank's part of each tensor, as a plain tensor."""
    origins: list[TensorLike] = field(default_factory=list)
    """The tensors as found in the state, such as the DTensors that the local ones belong to."""
    layouts: list[Layout] = field(default_factory=list)
    alias: list[int] = field(default_factory=list)
    tree: Tree = field(default_factory=Tree)
    nodes: list[object] = field(default_factory=list)
    subtrees: list[Subtree] = field(default_factory=list)
    modules: list[Walked] = field(default_factory=list)
    placeholders: Mapping[str, str] = field(default_factory=dict)
    """Tensors without elements that stand in for others: the reason, by path. Empty for a load."""
    made_of: set[int] = field(default_factory=set)
    """Containers that represent composite tensors."""
    without_memory: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """For a load: the modules' tensors that have no memory yet, by name."""
    layout_id: object | None = None
    """An object shared by states with the same signature; None for a state without a signature."""

    def path(self, row: int) -> str:
        """Return the place of the tensor in ``row``, as user code writes it: ``state["a"][0]``."""
        container = self.containers[row]
        text = self.names[row].removeprefix(self.tree.prefixes()[container])
        key = self.tree.tensor_key(container, text)
        return format_path((*self.tree.paths()[container], key))

    def keys_to(self, subtree: Subtree) -> tuple[Key, ...]:
        """Return the keys that lead to an object; empty if the object is the state itself."""
        if subtree.parent < 0:
            return ()
        return (*self.tree.paths()[subtree.parent], subtree.key)
