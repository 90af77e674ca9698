"""Layouts of tensors in a few words, such as ``4 shards [1024×4096] on ranks 0–3``.

Works on whole columns, so that describing a hundred thousand tensors takes no longer than printing
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..storage.format.manifest import Manifest
from .text import one_of, ranks_text, runs_text, shape_text


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """The manifest rows that share a name, dtype, shape and container: a single row, or one per
    owner."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    """Bytes of a single row."""
    rows: tuple[int, ...]
    owners: tuple[int, ...]


class Placed:
    """Describes the tensors of a manifest."""

    def __init__(self, manifest: Manifest) -> None:
        m = manifest
        t = manifest.tensors
        s = manifest.shards
        self._m = m
        self._pointers = s.pointers(len(t)).tolist()
        self._image_ranks = m.images.rank[s.image]
        counts = np.diff(self._pointers)
        stored = np.flatnonzero(counts > 0)
        self._largest = np.ones_like(t.shape)
        self._alike = np.ones(len(t), np.bool_)
        if len(stored):
            starts = np.asarray(self._pointers)[stored]
            self._largest[stored] = np.maximum.reduceat(s.lengths, starts, axis=0)
            smallest = np.minimum.reduceat(s.lengths, starts, axis=0)
            self._alike[stored] = (self._largest[stored] == smallest).all(axis=1)
        self._ranks_known: dict[bytes, tuple[int, ...]] = {}

    def tensors(self) -> Iterator[tuple[int, PlacedTensor]]:
        """Yield every tensor with the number of its container, in state order. Per-rank tensors
        count as one."""
        m = self._m
        t = self._m.tensors
        columns = zip(
            t.names,
            m.container.tolist(),
            t.dtype.tolist(),
            t.ndim.tolist(),
            t.shape.tolist(),
            t.owner.tolist(),
            strict=True,
        )
        groups: dict[tuple[Any, ...], list[int]] = {}
        for row, (name, container, dtype, ndim, shape, owner) in enumerate(columns):
            kind = (container, name, dtype, tuple(shape[:ndim]), owner < 0)
            groups.setdefault(kind, []).append(row)
        nbytes = t.nbytes.tolist()
        owners = t.owner.tolist()
        for (container, name, dtype, shape, shared), rows in groups.items():
            owned: tuple[int, ...] = ()
            if not shared:
                owned = tuple(sorted(owners[row] for row in rows))
            text = t.dtypes[dtype][0]
            yield (
                container,
                PlacedTensor(name, text, shape, nbytes[rows[0]], tuple(rows), owned),
            )

    def alias_of(self, tensor: PlacedTensor) -> str | None:
        """Return the name of the tensor that this one is tied to; None if it is not tied."""
        alias = int(self._m.tensors.alias[tensor.rows[0]])
        if alias < 0:
            return None
        return self._m.tensors.names[alias]

    def shards(self, tensor: PlacedTensor) -> int:
        """Return the number of stored boxes, over all owners."""
        return sum(self._pointers[row + 1] - self._pointers[row] for row in tensor.rows)

    def ranks(self, tensor: PlacedTensor) -> tuple[int, ...]:
        """Return the ranks whose images store the tensor, in ascending order."""
        found: set[int] = set()
        for row in tensor.rows:
            ranks = self._image_ranks[self._pointers[row] : self._pointers[row + 1]]
            key = ranks.tobytes()
            if key not in self._ranks_known:  # layers repeat
                self._ranks_known[key] = tuple(np.unique(ranks).tolist())
            found.update(self._ranks_known[key])
        return tuple(sorted(found))

    def words(self, tensor: PlacedTensor) -> str:
        """Return the layout in words."""
        tied = self.alias_of(tensor)
        if tied is not None:
            return f"tied to {tied}"
        if tensor.owners:
            return f"per rank {runs_text(tensor.owners)}"
        row = tensor.rows[0]
        count = self.shards(tensor)
        if not count:
            return "empty"
        where = ranks_text(self.ranks(tensor))
        if count == 1:
            return f"whole, {where}"
        size = shape_text(self._largest[row, : len(tensor.shape)].tolist())
        if not self._alike[row]:
            size = f"up to {size}"
        return f"{one_of(count, 'shard')} {size} on {where}"
