"""A state, or a part of one, built from a checkpoint alone."""

from __future__ import annotations

from typing import Any

import torch

from ..manifest import Manifest
from ..tree import Key
from .dtypes import dtype_of
from .targets import TypedPath, Wanted, typed_paths

__all__ = ["Built", "build"]


class Built:
    """A built state, whose tensors are yet to be filled. ``tensors`` and ``values`` are the rows that it uses."""

    def __init__(self, manifest: Manifest, rank: int, wanted: Wanted) -> None:
        self._m = manifest
        self._rank = rank
        self._wanted = wanted
        self._paths = typed_paths(manifest.tree)
        self._made: dict[int, torch.Tensor] = {}
        self.tensors: set[int] = set()
        t = manifest.tensors  # as lists: they are asked row by row
        self._roots = [root if root >= 0 else row for row, root in enumerate(t.alias.tolist())]
        self._shapes, self._ndim, self._codes = t.shape.tolist(), t.ndim.tolist(), t.dtype.tolist()
        self._dtypes = [dtype_of(*kind) for kind in t.dtypes]

    def run(self, path: TypedPath) -> Any:
        """The state at ``path``: a container with all in it, a tensor or a value. Raises KeyError where nothing is."""
        m, depth = self._m, len(path)
        inside = [p[:depth] == path for p in self._paths]
        items: dict[int, dict[Key, Any]] = {c: {} for c, isin in enumerate(inside) if isin}
        leaves: list[Any] = []
        self._add_tensors(path, inside, items, leaves)
        for v in m.tree.values:
            if inside[v.container]:
                items[v.container][v.key] = v.of(self._rank)
            elif (*self._paths[v.container], (type(v.key).__name__, v.key)) == path:
                leaves.append(v.of(self._rank))
        if items:
            return self._assemble(items)
        if not leaves:
            raise KeyError(path)
        return leaves[0]

    def _add_tensors(
        self, path: TypedPath, inside: list[bool], items: dict[int, dict[Key, Any]], leaves: list[Any]
    ) -> None:
        t, tree = self._m.tensors, self._m.tree
        prefixes = [len(p) for p in tree.prefixes()]
        near = [isin or self._paths[c] == path[:-1] for c, isin in enumerate(inside)]
        containers = self._m.container.tolist()
        rows = [row for row, c in enumerate(containers) if near[c]]
        seen_as = t.find_all([t.names[row] for row in rows], self._rank).tolist()
        for row, source in zip(rows, seen_as, strict=True):
            name, c = t.names[row], containers[row]
            key = tree.tensor_key(c, name[prefixes[c] :])
            if not inside[c] and (*self._paths[c], (type(key).__name__, key)) != path:
                continue
            self.tensors.add(row)
            if source != row:
                continue  # another rank's own
            made: Any = self._tensor(row)
            made = made.numpy() if name in tree.arrays else made
            if inside[c]:
                items[c][key] = made
            else:
                leaves.append(made)

    def _tensor(self, row: int) -> torch.Tensor:
        """The tensor of a row, made once: tied tensors come back as one."""
        root = self._roots[row]
        made = self._made.get(root)
        if made is None:
            made = self._made[root] = torch.empty(
                self._shapes[root][: self._ndim[root]], dtype=self._dtypes[self._codes[root]]
            )
            self._wanted.add_whole(root, made)
        return made

    def _assemble(self, items: dict[int, dict[Key, Any]]) -> Any:
        """Containers from their items, children first: parents have smaller numbers."""
        tree = self._m.tree
        top = min(items)
        for c in sorted(items, reverse=True):
            kind, held = tree.containers[c].kind, items[c]
            made: Any = held if kind == "dict" else [held[k] for k in sorted(held)]  # type: ignore[type-var]
            made = tuple(made) if kind == "tuple" else made
            if c == top:
                return made
            items[tree.containers[c].parent][tree.containers[c].key] = made
        return None


def build(manifest: Manifest, rank: int, wanted: Wanted, path: TypedPath = ()) -> tuple[Any, set[int]]:
    """The state at ``path`` as ``rank`` saved it, its tensors empty and added to ``wanted``; and the rows it has."""
    built = Built(manifest, rank, wanted)
    return built.run(path), built.tensors
