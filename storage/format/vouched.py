"""A manifest that another rank of the host has read and checked, in memory that both see.

What it says of tensors and values is decoded whole: that tells what is wanted. Of its shards, of
which a job has millions, only those of wanted tensors are; the rest stays where it lies.

Scope: for bytes that somebody has decoded with :meth:`Manifest.decode` and ``check_complete``.
Nothing is checked again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ...planner.columns import Ints, ranges
from ...planner.table import ShardTable
from .columns import parse_columns
from .manifest import Manifest, ints_of

__all__ = ["Vouched"]


@dataclass(frozen=True, eq=False)
class Vouched:
    """``manifest`` has no shards yet: :meth:`of` gives them."""

    manifest: Manifest
    columns: Mapping[str, npt.NDArray[Any]]

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Vouched:
        """The manifest in ``data``, which is not copied, and must not change."""
        columns, metadata = parse_columns(data, "the manifest")
        none = {name: column[:0] for name, column in columns.items() if name.startswith("shard.")}
        none["tensor.shards"] = np.zeros_like(columns["tensor.shards"])
        return cls(Manifest.of_columns(columns | none, metadata, "the manifest"), columns)

    def of(self, tensors: Ints) -> Manifest:
        """It, with the shards of these tensors alone; ``tensors`` are rows, in any order."""
        rows = np.unique(tensors)
        counts = ints_of(self.columns, "tensor.shards")
        row, at = ranges((np.cumsum(counts) - counts)[rows], counts[rows])
        found = {name: self.columns[f"shard.{name}"][at].astype(np.int64) for name in _SHARDS}
        return replace(self.manifest, shards=ShardTable(rows[row], **found))


_SHARDS = ("offsets", "lengths", "image", "start")
