"""A flattened state: one row per tensor, and a tree of everything else.

Scope: data only. :mod:`.flatten` makes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ...planner.layout import Layout
from ..format.tree import Key, Tree, format_path
from .adapters.module_names import Walked
from .adapters.tensors import TensorLike

__all__ = ["CONTAINERS", "DEPTH_MAX", "MAPPINGS", "FlatState", "Subtree"]

MAPPINGS = (dict, Mapping)
"""To ask for a plain dict first takes a tenth of the time: a state has thousands."""
CONTAINERS = (dict, list, tuple, Mapping)
DEPTH_MAX = 200
"""A state whose containers are nested deeper is refused."""


@dataclass(frozen=True, slots=True)
class Subtree:
    """An object with a state, at ``key`` of container ``parent``.

    ``state`` is its expansion, which was flattened in its place. It is None for an object that was
    not expanded and is to be given what is stored; then ``present`` is the state that it has.
    """

    parent: int
    key: Key
    owner: object
    state: object
    present: object = None


@dataclass(slots=True)
class FlatState:
    """Columns of tensors, one row each, and the tree. ``nodes`` are the container objects, by
    number."""

    names: list[str] = field(default_factory=list)
    containers: list[int] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    locals: list[torch.Tensor] = field(default_factory=list)
    """What this rank holds of each, plain."""
    origins: list[TensorLike] = field(default_factory=list)
    """The tensors as they were found, such as the DTensors that the local ones are parts of."""
    layouts: list[Layout] = field(default_factory=list)
    alias: list[int] = field(default_factory=list)
    tree: Tree = field(default_factory=Tree)
    nodes: list[object] = field(default_factory=list)
    subtrees: list[Subtree] = field(default_factory=list)
    modules: list[Walked] = field(default_factory=list)
    placeholders: Mapping[str, str] = field(default_factory=dict)
    """Tensors without elements that stand for some elsewhere: why, by path. Empty where a state is
    loaded."""
    made_of: set[int] = field(default_factory=set)
    """Containers that stand for tensors made of tensors."""
    without_memory: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Where a state is loaded: by name, the tensors of modules that have no memory yet."""
    layout_id: object | None = None
    """The same object for states with the same signature; None for a state without one."""

    def path(self, row: int) -> str:
        """Where the tensor in ``row`` is, as a user would write it."""
        container = self.containers[row]
        text = self.names[row].removeprefix(self.tree.prefixes()[container])
        key = self.tree.tensor_key(container, text)
        return format_path((*self.tree.paths()[container], key))
