"""Tables of tensors and shards as columns, so that ten million shards are a handful of arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..core.forks.cached import cached_property
from .box import Box
from .columns import Ints, volumes, widen
from .coverage import Flaw, flawed, flaws, true_rows


@dataclass(frozen=True, eq=False)
class TensorTable:
    """T global tensors. Dimensions beyond a tensor's own are padded: shape 1.

    ``names``    (T,) fully qualified names; a name may occur several times, with different owners
    ``dtype``    (T,) uint8, index into ``dtypes``
    ``dtypes``   per code: torch's name of the dtype, such as "bfloat16", and its itemsize in bytes
    ``ndim``     (T,)
    ``shape``    (T, D) int64
    ``alias``    (T,) int64 row of the tensor that stores the bytes, or -1
    ``owner``    (T,) int64 rank that has the tensor to itself, or -1 if the whole job shares it
    """

    names: tuple[str, ...]
    dtype: npt.NDArray[np.uint8]
    dtypes: tuple[tuple[str, int], ...]
    ndim: Ints
    shape: Ints
    alias: Ints
    owner: Ints

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def itemsize(self) -> Ints:
        """Bytes per element, (T,)."""
        return np.array([itemsize for _, itemsize in self.dtypes], dtype=np.int64)[self.dtype]

    @cached_property
    def nbytes(self) -> Ints:
        """Bytes of each whole tensor, (T,). An alias counts like its target."""
        return volumes(self.shape) * self.itemsize

    def shape_of(self, row: int) -> tuple[int, ...]:
        """Return the shape of one tensor, without padding."""
        return tuple(self.shape[row, : self.ndim[row]].tolist())

    def stored_row(self, row: int) -> int:
        """Return the row that stores the tensor's bytes; another tensor's for an alias."""
        if self.alias[row] < 0:
            return row
        return int(self.alias[row])

    @cached_property
    def rows(self) -> dict[str, tuple[int, ...]]:
        """Return the rows of each name, ascending."""
        rows: dict[str, tuple[int, ...]] = dict(zip(self.names, zip(range(len(self))), strict=True))
        if len(rows) < len(self):
            found: dict[str, list[int]] = {}
            for row, name in enumerate(self.names):
                found.setdefault(name, []).append(row)
            rows = {name: tuple(of) for name, of in found.items()}
        return rows

    def find(self, name: str, rank: int = 0) -> int | None:
        """Return the row of ``name`` as seen by ``rank``, or None if there is no such name.

        That is the row shared by the whole job; otherwise the one owned by ``rank``; otherwise,
        since the job may have another size now, the row of owner number ``rank`` modulo the number
        of owners.
        """
        candidates = sorted(self.rows.get(name, ()), key=lambda row: int(self.owner[row]))
        if not candidates:
            return None
        owners = [int(self.owner[row]) for row in candidates]
        if owners[0] == -1:
            return candidates[0]
        if rank in owners:
            return candidates[owners.index(rank)]
        return candidates[rank % len(owners)]

    def find_all(self, names: Sequence[str], rank: int = 0) -> Ints:
        """Return the rows of ``names`` like ``find``, (n,); -1 for an unknown name."""
        if (self.owner < 0).all():
            row_of = dict(zip(self.names, range(len(self)), strict=True))
            return np.fromiter((row_of.get(name, -1) for name in names), np.int64, len(names))
        found: dict[str, int] = {}
        for name in dict.fromkeys(names):  # each once: a name may have many owners
            row = self.find(name, rank)
            if row is not None:
                found[name] = row
        return np.fromiter((found.get(name, -1) for name in names), np.int64, len(names))


@dataclass(frozen=True, eq=False)
class ShardTable:
    """S stored shards, ascending by tensor. Dimensions beyond a tensor's own are padded: offset 0,
    length 1.

    ``tensor``    (S,) row in the TensorTable
    ``offsets``   (S, D) int64 first element of the box, in elements of the global tensor
    ``lengths``   (S, D) int64
    ``image``     (S,) index of the image that stores it
    ``start``     (S,) offset in bytes of the shard's first byte in that image's file
    """

    tensor: Ints
    offsets: Ints
    lengths: Ints
    image: Ints
    start: Ints

    def __len__(self) -> int:
        return len(self.tensor)

    @classmethod
    def empty(cls, ndim: int) -> ShardTable:
        """Return a table without shards, for tensors of up to ``ndim`` dimensions."""
        column = np.empty(0, dtype=np.int64)
        boxes = np.empty((0, ndim), dtype=np.int64)
        return cls(column, boxes, boxes, column, column)

    @classmethod
    def concat(cls, tables: Sequence[ShardTable]) -> ShardTable:
        """Return all rows of ``tables`` in one table, ascending by tensor.

        Dimensions are padded to the largest number.
        """
        if not tables:
            return cls.empty(0)
        ndim = max(table.offsets.shape[1] for table in tables)
        tensor = np.concatenate([table.tensor for table in tables])
        order: Ints | slice = slice(None)  # copies nothing
        if (tensor[1:] < tensor[:-1]).any():
            order = np.argsort(tensor, kind="stable")
        tensor = tensor[order]
        # Column by column, to keep only one of them in both orders in memory during a merge.
        return cls(
            tensor,
            np.concatenate([widen(table.offsets, ndim, 0) for table in tables])[order],
            np.concatenate([widen(table.lengths, ndim, 1) for table in tables])[order],
            np.concatenate([table.image for table in tables])[order],
            np.concatenate([table.start for table in tables])[order],
        )

    def nbytes(self, tensors: TensorTable) -> Ints:
        """Return the bytes of each shard, (S,)."""
        return volumes(self.lengths) * tensors.itemsize[self.tensor]

    def pointers(self, n_tensors: int) -> Ints:
        """Return the first shard of each tensor, (n_tensors + 1,).

        The shards of tensor t are the rows from ``pointers[t]`` to ``pointers[t + 1]``.
        """
        return np.searchsorted(self.tensor, np.arange(n_tensors + 1)).astype(np.int64, copy=False)


def coverage_errors(tensors: TensorTable, shards: ShardTable, limit: int = 20) -> list[str]:
    """Return at most ``limit`` sentences on errors in the shards; [] if there are none.

    Every element of every tensor that is no alias must be covered by exactly one shard, every shard
    must lie within its tensor and have elements, and aliases must have no shards. A sentence names
    the tensor, an example box, and says "missing", "stored twice" or "out of bounds".
    """
    known = (shards.tensor >= 0) & (shards.tensor < len(tensors))
    sentences = [
        f"a shard names tensor {row}, which is out of bounds: there are {len(tensors)} tensors"
        for row in shards.tensor[~known][:limit].tolist()
    ]
    ndim = max(tensors.shape.shape[1], shards.offsets.shape[1])
    shape = widen(tensors.shape, ndim, 1)
    rows = true_rows(known)
    tensor = shards.tensor[rows]
    offsets = widen(shards.offsets[rows], ndim, 0)
    lengths = widen(shards.lengths[rows], ndim, 1)
    flags = flawed(shape, tensor, offsets, lengths)
    aliases = tensors.alias >= 0
    flags[aliases] = np.bincount(tensor, minlength=len(tensors))[aliases] > 0
    for row in np.flatnonzero(flags)[:limit].tolist():
        mine = tensor == row
        sentences += _sentences(tensors, row, offsets[mine], lengths[mine])
    return sentences[:limit]


def _sentences(tensors: TensorTable, row: int, offsets: Ints, lengths: Ints) -> list[str]:
    """Return sentences on the errors in the shards of one flawed tensor."""
    name = tensors.names[row]
    ndim = int(tensors.ndim[row])
    if tensors.owner[row] >= 0:
        name += f" of rank {tensors.owner[row]}"
    if tensors.alias[row] >= 0:
        original = tensors.names[tensors.alias[row]]
        return [f"{name}: stored twice, since it is an alias of {original} and has shards too"]
    padded = tuple(tensors.shape[row].tolist()) + (1,) * (offsets.shape[1] - tensors.shape.shape[1])
    return [
        f"{name}: {_text(flaw, tensors.shape_of(row), ndim)}"
        for flaw in flaws(padded, offsets, lengths)
    ]


def _text(flaw: Flaw, shape: tuple[int, ...], ndim: int) -> str:
    # A box that exceeds a padded dimension is shown with that dimension.
    plain = math.prod(flaw.box.lengths[ndim:]) == 1 and not any(flaw.box.offsets[ndim:])
    shown = flaw.box
    if plain:
        shown = Box(flaw.box.offsets[:ndim], flaw.box.lengths[:ndim])
    where = str(shown)
    if not shown.ndim:
        where = "its only element"
    if flaw.kind == "out of bounds":
        return f"a shard {where} is out of bounds of shape {list(shape)}, or empty"
    return f"{where} is {flaw.kind}"
