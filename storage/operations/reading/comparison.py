"""Compares two manifests: names, shapes, dtypes, small values, and tensors with equal digests.

Pure: takes manifests, reads nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ....core.forks.cached import cached_property
from ....planner.columns import Ints
from ....planner.table import TensorTable
from ...format.manifest import Manifest
from ...format.tree import ByRank, format_path

What = Literal["only in a", "only in b", "shape", "dtype", "values"]


@dataclass(frozen=True, slots=True)
class TensorKind:
    """The dtype and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that differs. ``rank`` is set if the tensor belongs to that rank only.

    ``what`` is "only in a", "only in b", "shape" (the dtype may differ too), "dtype" or "values".
    For values, ``differing`` counts elements with different bits, and ``max_abs`` is their largest
    absolute difference: NaN if only one of two elements is NaN, None if the dtype has no such
    difference.
    """

    name: str
    rank: int | None
    what: What
    a: TensorKind | None
    b: TensorKind | None
    differing: int | None = None
    max_abs: float | None = None


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """A small value or container type that differs; each side encoded, None if absent."""

    path: str
    a: ByRank | None
    b: ByRank | None


@dataclass(frozen=True, slots=True)
class Pair:
    """Tensors of equal name, shape and dtype, by their rows in both manifests; no aliases."""

    name: str
    rank: int | None
    a: int
    b: int


@dataclass(slots=True)
class Comparison:
    """Result of comparing manifests. ``equal`` counts tensors with equal digests; the values of
    those in ``unknown`` must be read."""

    differences: list[TensorDifference] = field(default_factory=list)
    values: list[ValueDifference] = field(default_factory=list)
    unknown: list[Pair] = field(default_factory=list)
    equal: int = 0


def compare_manifests(a: Manifest, b: Manifest) -> Comparison:
    """Compare two checkpoints by their manifests alone."""
    found = Comparison(values=list(_value_differences(a, b)))
    ours = _Side(a)
    theirs = _Side(b)
    for name in dict.fromkeys([*a.tensors.rows, *b.tensors.rows]):
        for rank, row_a, row_b in _pairs(ours.rows_by_owner(name), theirs.rows_by_owner(name)):
            kind_a = ours.kind(row_a)
            kind_b = theirs.kind(row_b)
            what = _difference_of(kind_a, kind_b)
            if what is not None:
                found.differences.append(TensorDifference(name, rank, what, kind_a, kind_b))
                continue
            assert row_a is not None
            assert row_b is not None
            pair = Pair(name, rank, ours.stored(row_a), theirs.stored(row_b))
            if _have_equal_digests(ours, pair.a, theirs, pair.b):
                found.equal += 1
            else:
                found.unknown.append(pair)
    return found


def kind_of(tensors: TensorTable, row: int) -> TensorKind:
    """Return the dtype and shape of a row."""
    return TensorKind(tensors.dtypes[tensors.dtype[row]][0], tensors.shape_of(row))


def _difference_of(a: TensorKind | None, b: TensorKind | None) -> What | None:
    if a is None:
        return "only in b"
    if b is None:
        return "only in a"
    if a.shape != b.shape:
        return "shape"
    if a.dtype != b.dtype:
        return "dtype"
    return None


def _pairs(
    a: dict[int, int], b: dict[int, int]
) -> Iterator[tuple[int | None, int | None, int | None]]:
    """Yield (rank, row in a, row in b) of one name; the whole job (-1) matches each rank."""
    owners = sorted(a.keys() | b.keys())
    if owners[-1] >= 0 and a and b:
        owners = [owner for owner in owners if owner >= 0]
    for owner in owners:
        rank = None if owner < 0 else owner
        yield rank, a.get(owner, a.get(-1)), b.get(owner, b.get(-1))


class _Side:
    """One manifest with per-tensor lookups."""

    def __init__(self, manifest: Manifest) -> None:
        self.m = manifest
        self._owner: list[int] = manifest.tensors.owner.tolist()
        self._alias: list[int] = manifest.tensors.alias.tolist()

    def rows_by_owner(self, name: str) -> dict[int, int]:
        """Return the rows of a name by owning rank; -1 for the whole job."""
        return {self._owner[row]: row for row in self.m.tensors.rows.get(name, ())}

    def kind(self, row: int | None) -> TensorKind | None:
        return None if row is None else kind_of(self.m.tensors, row)

    def stored(self, row: int) -> int:
        return row if self._alias[row] < 0 else self._alias[row]

    @cached_property
    def _pointers(self) -> Ints:
        return self.m.shards.pointers(len(self.m.tensors))

    @cached_property
    def _nbytes(self) -> Ints:
        return self.m.shards.nbytes(self.m.tensors)

    def shards(self, row: int) -> Ints:
        first, last = self._pointers[row : row + 2].tolist()
        rows = np.arange(first, last)
        if len(rows) > 1:
            rows = rows[np.lexsort(self.m.shards.offsets[rows].T[::-1])]
        return rows

    def place(self, shard: int) -> tuple[int, bytes]:
        """Return a shard's offset in its first chunk, and the digests of its chunks."""
        m = self.m
        start = int(m.shards.start[shard])
        stop = start + int(self._nbytes[shard])
        image = int(m.shards.image[shard])
        base = int(m.first_chunk[image])
        first, within = divmod(start, m.chunk_nbytes)
        last = (stop - 1) // m.chunk_nbytes + 1
        return within, m.images.digests[base + first : base + last].tobytes()


def _have_equal_digests(a: _Side, row_a: int, b: _Side, row_b: int) -> bool:
    """Return whether digests of equal boxes at equal offsets prove two tensors equal."""
    if (a.m.chunk_nbytes, a.m.block_nbytes) != (b.m.chunk_nbytes, b.m.block_nbytes):
        return False
    ours = a.shards(row_a)
    theirs = b.shards(row_b)
    if len(ours) != len(theirs):
        return False
    n = int(a.m.tensors.ndim[row_a])
    for columns_a, columns_b in (
        (a.m.shards.offsets, b.m.shards.offsets),
        (a.m.shards.lengths, b.m.shards.lengths),
    ):
        if not np.array_equal(columns_a[ours, :n], columns_b[theirs, :n]):
            return False
    pairs = zip(ours.tolist(), theirs.tolist(), strict=True)
    return all(a.place(x) == b.place(y) for x, y in pairs)


def _value_differences(a: Manifest, b: Manifest) -> Iterator[ValueDifference]:
    ours = _values(a)
    theirs = _values(b)
    for path in dict.fromkeys([*ours, *theirs]):
        value_a = ours.get(path)
        value_b = theirs.get(path)
        if value_a is None or value_b is None or _by_rank(value_a) != _by_rank(value_b):
            yield ValueDifference(path, value_a, value_b)


def _by_rank(value: ByRank) -> object:
    """Return a key that is equal for equal values, and for one shared in a job of another size."""
    # The text distinguishes 1, 1.0 and True.
    texts = [(ranks, json.dumps(encoded, sort_keys=True)) for ranks, encoded in value]
    return texts[0][1] if len(texts) == 1 else texts


def _values(m: Manifest) -> dict[str, ByRank]:
    """Return small values by path, and types of containers that are empty or not plain dicts."""
    tree = m.tree
    paths = tree.paths()
    found: dict[str, ByRank] = {}
    used = {c.parent for c in tree.containers} | set(m.container.tolist())
    used |= {value.container for value in tree.values}
    for number, c in enumerate(tree.containers):
        kind = tree.kinds.get(number, c.kind)
        if kind != "dict" or number not in used:
            found[f"type({format_path(paths[number])})"] = [([], kind)]
    for value in tree.values:
        found[format_path((*paths[value.container], value.key))] = value.by_rank
    return found
