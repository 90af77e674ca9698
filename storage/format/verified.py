"""A manifest in shared memory that another rank of the host has read and checked.

Tensors and values are decoded completely, because they decide which shards a load reads. A job has
millions of shards, so only those of the wanted tensors are decoded.

The bytes must have passed :meth:`Manifest.decode` and ``check_complete`` in some process. Nothing
is checked again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...planner.columns import Ints, ranges
from ...planner.table import ShardTable
from .columns import Columns, parse_columns
from .manifest import Manifest
from .tables import ints_of

__all__ = ["VerifiedManifest"]

_SHARD_COLUMNS = ("offsets", "lengths", "image", "start")


@dataclass(frozen=True, eq=False)
class VerifiedManifest:
    """A manifest without shards; :meth:`with_shards_of` adds the wanted ones."""

    manifest: Manifest
    columns: Columns

    @classmethod
    def decode(cls, data: bytes | memoryview) -> VerifiedManifest:
        """Decode the manifest in ``data``, which is not copied and must not change."""
        columns, metadata = parse_columns(data, "the manifest")
        empty = {name: column[:0] for name, column in columns.items() if name.startswith("shard.")}
        empty["tensor.shards"] = np.zeros_like(columns["tensor.shards"])
        return cls(Manifest.of_columns(columns | empty, metadata, "the manifest"), columns)

    def with_shards_of(self, tensors: Ints) -> Manifest:
        """Return the manifest with the shards of these tensors only; ``tensors`` are rows, in
        any order."""
        rows = np.unique(tensors)
        counts = ints_of(self.columns, "tensor.shards")
        first = np.cumsum(counts) - counts
        row, at = ranges(first[rows], counts[rows])
        found = {
            name: self.columns[f"shard.{name}"][at].astype(np.int64) for name in _SHARD_COLUMNS
        }
        return replace(self.manifest, shards=ShardTable(rows[row], **found))
