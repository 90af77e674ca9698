"""Many fragments, one manifest: the leader's work at commit. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..errors import CoverageError, SaveError
from ..planner.table import ShardTable, TensorTable, coverage_errors
from .manifest import ImageTable, Manifest
from .tree import merge_trees

__all__ = ["merge"]

Ints = npt.NDArray[np.int64]


def merge(fragments: Sequence[Manifest]) -> Manifest:
    """The job's manifest, from the fragments of its ranks, in order of rank.

    Raises SaveError where ranks disagree on a tensor, CoverageError where some element is stored never or twice.
    """
    tree, containers = merge_trees([f.tree for f in fragments])
    tensors, container, rows = _merge_tensors(fragments, containers)
    shards = _merge_shards(fragments, rows, tensors.shape.shape[1])
    stored = np.zeros(len(tensors), bool)
    stored[shards.tensor] = True
    tensors.alias[stored] = -1
    problems = coverage_errors(tensors, shards)
    if problems:
        raise CoverageError(
            f"{len(problems)} problems: " + "; ".join(problems),
            advice="Ranks disagree on how the state is laid out; every rank must pass the same state, sharded alike.",
        )
    first = fragments[0]
    images = ImageTable(
        np.concatenate([f.images.rank for f in fragments]),
        np.concatenate([f.images.hashed_nbytes for f in fragments]),
        np.concatenate([f.images.digests for f in fragments]),
    )
    return Manifest(
        first.attempt, first.step, len(fragments), first.created_s, tree, tensors, container, shards, images
    )


def _merge_tensors(
    fragments: Sequence[Manifest], containers: Sequence[Sequence[int]]
) -> tuple[TensorTable, Ints, list[Ints]]:
    """Tensors by (name, owner) in order of first appearance, their containers, and per fragment the new row of each."""
    row_of: dict[tuple[str, int], int] = {}
    kinds: dict[tuple[str, int], int] = {}
    rows: list[Ints] = []
    for f in fragments:
        keys = zip(f.tensors.names, f.tensors.owner.tolist(), strict=True)
        rows.append(np.array([row_of.setdefault(key, len(row_of)) for key in keys], np.int64))
    n, width = len(row_of), max(f.tensors.shape.shape[1] for f in fragments)
    dtype, ndim, alias, container = np.zeros(n, np.uint8), np.full(n, -1), np.full(n, -1), np.zeros(n, np.int64)
    shape = np.ones((n, width), np.int64)
    for rank, (f, row) in enumerate(zip(fragments, rows, strict=True)):
        t = f.tensors
        code = np.array([kinds.setdefault(kind, len(kinds)) for kind in t.dtypes], np.uint8)[t.dtype]
        wide = _widened(t.shape, width, 1)
        known = ndim[row] >= 0
        differs = known & ((dtype[row] != code) | (ndim[row] != t.ndim) | (shape[row] != wide).any(axis=1))
        if differs.any():
            name = t.names[int(np.flatnonzero(differs)[0])]
            raise SaveError(
                f"tensor {name!r} has another shape or dtype on rank {rank} than on the ranks before it", rank=rank
            )
        dtype[row], ndim[row], shape[row] = code, t.ndim, wide
        container[row] = np.array(containers[rank], np.int64)[f.container]
        tied = t.alias >= 0
        alias[row[tied]] = row[t.alias[tied]]
    names = tuple(name for name, _ in row_of)
    owner = np.fromiter((o for _, o in row_of), np.int64, n)
    return TensorTable(names, dtype, tuple(kinds), ndim, shape, alias, owner), container, rows


def _merge_shards(fragments: Sequence[Manifest], rows: Sequence[Ints], width: int) -> ShardTable:
    parts, images = [], 0
    for f, row in zip(fragments, rows, strict=True):
        s = f.shards
        parts.append(
            ShardTable(
                row[s.tensor], _widened(s.offsets, width, 0), _widened(s.lengths, width, 1), s.image + images, s.start
            )
        )
        images += len(f.images)
    return ShardTable.concat(parts).sorted_by_tensor()


def _widened(columns: Ints, width: int, fill: int) -> Ints:
    missing = width - columns.shape[1]
    return np.pad(columns, ((0, 0), (0, missing)), constant_values=fill) if missing else columns
