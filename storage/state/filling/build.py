"""Builds a state, or a part of one, from a checkpoint alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

import numpy as np
import torch

from ....errors import DamagedError
from ...format.kinds import as_kind
from ...format.manifest import Manifest
from ...format.tree import Key, Tree, Value
from ..adapters.allocation import Allocate, Entry
from ..adapters.multipart import InParts
from ..adapters.per_rank import OF_RANKS, RANKS
from ..adapters.tensors import TensorLike
from ..dtypes import dtype_of, empty
from .targets import TypedPath, Wanted, typed, typed_paths


@dataclass(slots=True)
class Items:
    """The items of one container, each kind in the state's order, but containers in reverse.

    ``own``: at any depth, there is an item that this rank has saved, or may have. ``others``: there
    is an item that only other ranks have.
    """

    tensors: list[tuple[Key, object]] = field(default_factory=list)
    values: list[tuple[Key, object]] = field(default_factory=list)
    containers: list[tuple[Key, object]] = field(default_factory=list)
    own: bool = False
    others: bool = False
    foreign: set[Key] = field(default_factory=set)
    """Keys of containers whose items all belong to other ranks."""

    def add_value(self, value: Value, rank: int, world: int, kind: str) -> None:
        """Add a value as ``rank`` of ``world`` has it.

        Lists skip the items that only other ranks have, whose lists were longer. A dict is the
        union over all ranks.
        """
        own = rank >= world or any(rank in ranks for ranks, _ in value.by_rank)
        self.own |= own
        self.others |= not own
        if own or kind == "dict":
            self.values.append((value.key, value.of(rank)))

    def add_container(self, key: Key, made: object, items: Items) -> None:
        """Add a container that was ``made`` from its ``items``."""
        self.own |= items.own
        self.others |= items.others
        self.containers.append((key, made))
        if items.others and not items.own:
            self.foreign.add(key)

    def assembled(self, tree: Tree, number: int) -> object:
        """Return the container ``number`` of ``tree``.

        Items missing from the stored order belong to other ranks, and come last.
        """
        kind = tree.containers[number].kind
        if kind != "dict":
            held = dict(chain(self.tensors, self.values, self.containers))
            keys = sorted(held)  # type: ignore[type-var]
            while keys and keys[-1] in self.foreign:
                keys.pop()
            made = [held[key] for key in keys]
            if kind == "list":
                return made
            return tuple(made)
        if not self.values and not self.containers:  # most containers hold nothing but tensors
            return as_kind(tree.kinds.get(number, ""), dict(self.tensors))
        sources = {"t": iter(self.tensors), "v": iter(self.values), "c": reversed(self.containers)}
        in_turn = (islice(sources[of], count) for of, count in tree.orders.get(number, []))
        ordered = chain(chain.from_iterable(in_turn), *sources.values())
        return as_kind(tree.kinds.get(number, ""), dict(ordered))


class Built:
    """A built state whose tensors are still empty. ``tensors`` are the rows it uses."""

    def __init__(
        self, manifest: Manifest, rank: int, wanted: Wanted, make: Allocate | None
    ) -> None:
        self._m = manifest
        self._rank = rank
        self._wanted = wanted
        self._make = make
        self._paths = typed_paths(manifest.tree)
        self._seen_by = viewers(manifest.tree, self._paths, rank)
        self._made: dict[int, torch.Tensor] = {}
        self.tensors: set[int] = set()

    def run(self, path: TypedPath) -> object:
        """Return the state at ``path``: a container with all its items, a tensor or a value.

        Raises KeyError if nothing is stored there.
        """
        m = self._m
        depth = len(path)
        inside = [p[:depth] == path for p in self._paths]
        items: dict[int, Items] = {c: Items() for c, isin in enumerate(inside) if isin}
        leaves: list[object] = []
        self._add_tensors(path, inside, items, leaves)
        for v in m.tree.values:
            if inside[v.container]:
                kind = m.tree.containers[v.container].kind
                items[v.container].add_value(v, self._seen_by[v.container], m.world, kind)
            elif (*self._paths[v.container], typed(v.key)) == path:
                leaves.append(v.of(self._rank))
        if items:
            return self._assemble(items)
        if not leaves:
            raise KeyError(path)
        return leaves[0]

    def _add_tensors(
        self, path: TypedPath, inside: list[bool], items: dict[int, Items], leaves: list[object]
    ) -> None:
        t = self._m.tensors
        tree = self._m.tree
        prefixes = [len(p) for p in tree.prefixes()]
        near = [isin or self._paths[c] == path[:-1] for c, isin in enumerate(inside)]
        containers = self._m.container.tolist()
        rows = [row for row, c in enumerate(containers) if near[c]]
        seen_as = t.find_all([t.names[row] for row in rows], self._rank).tolist()
        for row, source in zip(rows, seen_as, strict=True):
            name = t.names[row]
            c = containers[row]
            key = tree.tensor_key(c, name[prefixes[c] :])
            if not inside[c] and (*self._paths[c], typed(key)) != path:
                continue
            if self._make is None or source != row:
                self.tensors.add(row)
            if source != row:
                continue  # another rank's own
            if self._make is None:
                made: object = self._new_tensor(row)
            else:
                made = self._tensor_for(self._make, row, c, (*self._keys(c, len(path)), key))
                if made is None:
                    continue
            if name in tree.arrays and isinstance(made, torch.Tensor):
                made = _array(name, made)
            if inside[c]:
                items[c].own = True
                items[c].tensors.append((key, made))
            else:
                leaves.append(made)

    def _keys(self, container: int, depth: int) -> tuple[Key, ...]:
        return tuple(key for _, key in self._paths[container][depth:])

    def _tensor_for(
        self, make: Allocate, row: int, container: int, keys: tuple[Key, ...]
    ) -> TensorLike | InParts | None:
        """Return the tensor to fill from a stored one; None if the object has no place for it."""
        root = self._m.tensors.stored_row(row)
        placements = self._m.tree.placements.get(container, {}).get(str(keys[-1]))
        own = bool(self._m.tensors.owner[row] >= 0)
        made = make(Entry(keys, self._m.tensors.shape_of(root), self._dtype(root), placements, own))
        if made is not None:
            self.tensors.add(row)
            self._wanted.add_tensor(root, made, self._m.tensors.names[row])
        return made

    def _dtype(self, row: int) -> torch.dtype:
        return dtype_of(*self._m.tensors.dtypes[self._m.tensors.dtype[row]])

    def _new_tensor(self, row: int) -> torch.Tensor:
        root = self._m.tensors.stored_row(row)
        made = self._made.get(root)
        if made is None:
            made = self._made[root] = empty(
                self._m.tensors.shape_of(root), self._dtype(root), self._m.tensors.names[root]
            )
            self._wanted.add_whole(root, made)
        return made

    def _assemble(self, items: dict[int, Items]) -> object:
        """Build the containers from their items, children first: parents have smaller numbers."""
        tree = self._m.tree
        top = min(items)
        for c in sorted(items, reverse=True):
            made = items[c].assembled(tree, c)
            if c == top:
                return made
            items[tree.containers[c].parent].add_container(tree.containers[c].key, made, items[c])
        return None


def viewers(tree: Tree, paths: Sequence[TypedPath], rank: int) -> list[int]:
    """Return the rank whose values each container shows.

    That is ``rank``, except within a PerRank's storage for another rank.
    """
    sized = {
        (*paths[value.container], typed(OF_RANKS))
        for value in tree.values
        if value.key == RANKS and type(value.of(rank)) is int
    }
    viewers = [rank]
    for container in tree.containers[1:]:
        viewer = viewers[container.parent]
        if paths[container.parent] in sized and str(container.key).isdecimal():
            viewer = int(str(container.key))
        viewers.append(viewer)
    return viewers


def build(
    manifest: Manifest,
    rank: int,
    wanted: Wanted,
    path: TypedPath = (),
    make: Allocate | None = None,
) -> tuple[object, set[int]]:
    """Build the state at ``path`` as ``rank`` saved it, and return it with the rows it uses.

    Its tensors are empty and are added to ``wanted``. ``make`` allocates them, returning None for
    those to leave out; without it, they are new tensors on the CPU. Raises KeyError if nothing is
    stored at ``path``.
    """
    built = Built(manifest, rank, wanted, make)
    return built.run(path), built.tensors


def _array(name: str, tensor: torch.Tensor) -> np.ndarray:
    try:
        return tensor.numpy()
    except TypeError as error:
        raise DamagedError(
            f"{name!r} is stored as an array of {tensor.dtype}, which numpy does not have"
        ) from error
