"""Many fragments, one manifest: the leader's work at commit. Pure.

Tensors and containers are merged once per layout, of which a job has few; shards, of which it has
millions, as columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ...errors import CoverageError, DamagedError, SaveError
from ...planner.columns import ranges, widen
from ...planner.table import ShardTable, TensorTable, coverage_errors
from .fragment import Fragment, Group, join
from .manifest import ImageTable, Manifest, check
from .packed import Compression
from .tree import Tree, Value, merge_trees

__all__ = ["merge"]

Ints = npt.NDArray[np.int64]


def merge(fragments: Sequence[Fragment], compression: Compression | None = None) -> Manifest:
    """The job's manifest, from the fragments of its ranks, or of its hosts, in order of their first
    ranks; ``compression`` is that of all images.

    Raises SaveError where ranks disagree on a tensor, CoverageError where some element is stored
    never or twice.
    """
    whole = join(fragments)
    tree, containers = merge_trees([_tree(group) for group in whole.groups])
    tensors, container, rows = _merge_tensors(whole.groups, containers)
    shards = _merge_shards(whole.groups, rows, tensors.shape.shape[1])
    stored = np.zeros(len(tensors), bool)
    stored[shards.tensor] = True
    tensors.alias[stored] = -1
    problems = coverage_errors(tensors, shards)
    if problems:
        raise CoverageError(
            f"{len(problems)} problems: " + "; ".join(problems),
            advice=(
                "Ranks disagree on how the state is laid out; every rank must pass the same "
                "state, sharded alike."
            ),
        )
    images = ImageTable.joined([group.images for group in whole.groups])
    world = sum(len(group.ranks) for group in whole.groups)
    attempt, step, created_s = whole.head
    manifest = Manifest(
        attempt,
        step,
        world,
        created_s,
        tree,
        tensors,
        container,
        shards,
        images,
        compression=compression,
    )
    try:
        check(manifest, "the manifest")
    except DamagedError as error:
        raise SaveError("this state makes a manifest that no reader would accept") from error
    return manifest


def _tree(group: Group) -> Tree:
    """The tree of a group's ranks, with their values."""
    places = group.layout.tree.values
    values = [Value(v.container, v.key, by) for v, by in zip(places, group.values, strict=True)]
    return replace(group.layout.tree, values=values)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Where a group's tensors are in the manifest: row t of the layout at ``base[t]``, or, one that
    ranks have for themselves, there and below, in the group's order of ranks."""

    base: Ints
    group: Group

    def of(self, tensor: Ints, image: Ints) -> Ints:
        """The rows of tensors, as seen by the ranks of these images."""
        order = np.argsort(self.group.ranks)  # hosts may have any ranks
        position = order[np.searchsorted(self.group.ranks, self.group.images.rank, sorter=order)]
        rows: Ints = self.base[tensor] + np.where(self.group.layout.own[tensor], position[image], 0)
        return rows


def _merge_tensors(
    groups: Sequence[Group], containers: Sequence[Sequence[int]]
) -> tuple[TensorTable, Ints, list[_Rows]]:
    """Tensors by name and owner in order of first appearance, their containers, and where those of
    each group are."""
    row_of: dict[str, int] = {}
    names: list[str] = []
    rows = [_Rows(_place(group, row_of, names), group) for group in groups]
    n, width = len(names), max(group.layout.tensors.shape.shape[1] for group in groups)
    kinds: dict[tuple[str, int], int] = {}
    dtype, ndim, alias, container = (
        np.zeros(n, np.uint8),
        np.full(n, -1),
        np.full(n, -1),
        np.zeros(n, np.int64),
    )
    shape, owner = np.ones((n, width), np.int64), np.full(n, -1)
    for placed, numbers in zip(rows, containers, strict=True):
        t, own, ranks = placed.group.layout.tensors, placed.group.layout.own, placed.group.ranks
        code = np.array([kinds.setdefault(kind, len(kinds)) for kind in t.dtypes], np.uint8)[
            t.dtype
        ]
        wide, row = widen(t.shape, width, 1), placed.base
        differs = (ndim[row] >= 0) & (
            (dtype[row] != code) | (ndim[row] != t.ndim) | (shape[row] != wide).any(axis=1)
        )
        if differs.any():
            name, rank = t.names[int(np.flatnonzero(differs)[0])], int(ranks[0])
            raise SaveError(
                f"tensor {name!r} has another shape or dtype on rank {rank} than on the ranks "
                f"before it",
                rank=rank,
            )
        inside = np.array(numbers, np.int64)[placed.group.layout.container]
        of, to = ranges(row, np.where(own, len(ranks), 1))
        at = to - row[of]
        dtype[to], ndim[to], shape[to], container[to] = code[of], t.ndim[of], wide[of], inside[of]
        owner[to] = np.where(own[of], ranks[at], -1)
        tied = t.alias[of] >= 0
        alias[to[tied]] = row[t.alias[of[tied]]] + at[tied]
    return (
        TensorTable(tuple(names), dtype, tuple(kinds), ndim, shape, alias, owner),
        container,
        rows,
    )


def _place(group: Group, row_of: dict[str, int], names: list[str]) -> Ints:
    """The first row of each tensor of a group; what is new is added to ``names``, once per rank
    where ranks have their own."""
    base = []
    for name, own in zip(group.layout.tensors.names, group.layout.own.tolist(), strict=True):
        row = len(names) if own else row_of.setdefault(name, len(names))
        base.append(row)
        if row == len(names):
            names += [name] * (len(group.ranks) if own else 1)
    return np.array(base, np.int64)


def _merge_shards(groups: Sequence[Group], rows: Sequence[_Rows], width: int) -> ShardTable:
    parts, images = [], 0
    for group, placed in zip(groups, rows, strict=True):
        s = group.shards
        tensor, image = placed.of(s.tensor, s.image), s.image + images
        parts.append(
            ShardTable(
                tensor, widen(s.offsets, width, 0), widen(s.lengths, width, 1), image, s.start
            )
        )
        images += len(group.images)
    return ShardTable.concat(parts)
