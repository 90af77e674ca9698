"""Merges fragments into one manifest: the leader's work at commit. Pure.

Tensors and containers are merged once per layout (a job has few), shards as columns (a job has
millions).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ...errors import CoverageError, DamagedError, SaveError
from ...planner.columns import Ints, ranges, widen
from ...planner.table import ShardTable, TensorTable, coverage_errors
from .fragment import Fragment, Group, join, joined_extents
from .manifest import Manifest, check
from .packed import Compression
from .patches import PatchBases
from .tables import ImageTable
from .tree import Tree, Value, merge_trees


def merge(
    fragments: Sequence[Fragment],
    compression: Compression | None = None,
    bases: PatchBases | None = None,
) -> Manifest:
    """Merge the fragments of a job's ranks or hosts, in order of their first ranks, into a
    manifest.

    ``compression`` is the compression of all images; ``bases`` are given if they are patches.
    Raises SaveError if ranks disagree on a tensor, CoverageError if an element is stored twice or
    not at all.
    """
    whole = join(fragments)
    tree, containers = merge_trees([_tree(group) for group in whole.groups])
    tensors, container, rows = _merge_tensors(whole.groups, containers)
    shards = _merge_shards(whole.groups, rows, tensors.shape.shape[1])
    images = ImageTable.joined([group.images for group in whole.groups])
    extents = joined_extents(whole.groups)
    world = sum(len(group.ranks) for group in whole.groups)
    attempt, step, created_s = whole.head
    # The checks below take the most memory, so free the second copy of the shards first.
    del whole, rows
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
    manifest = Manifest(
        attempt=attempt,
        step=step,
        world=world,
        created_s=created_s,
        tree=tree,
        tensors=tensors,
        container=container,
        shards=shards,
        images=images,
        compression=compression,
        extents=None if extents is None or extents.is_plain else extents,
        bases=bases,
    )
    try:
        check(manifest, "the manifest")
    except DamagedError as error:
        raise SaveError("this state makes a manifest that no reader would accept") from error
    return manifest


def _tree(group: Group) -> Tree:
    """Return the tree of a group's ranks, with their values."""
    places = group.layout.tree.values
    values = [Value(v.container, v.key, by) for v, by in zip(places, group.values, strict=True)]
    return replace(group.layout.tree, values=values)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a group's tensors in the manifest.

    Tensor t of the layout is in row ``base[t]``. If each rank has its own tensor, that row is the
    first rank's; the other ranks' rows follow, in the group's order of ranks.
    """

    base: Ints
    group: Group

    def of(self, tensor: Ints, image: Ints) -> Ints:
        """Return the rows of tensors, as seen by the ranks of these images."""
        ranks = self.group.ranks
        order = np.argsort(ranks)  # the ranks of a host come in any order
        position = order[np.searchsorted(ranks, self.group.images.rank, sorter=order)]
        rows: Ints = self.base[tensor] + np.where(self.group.layout.own[tensor], position[image], 0)
        return rows


class _Merged:
    """The columns of ``n`` tensors, filled group by group."""

    def __init__(self, names: Sequence[str], width: int) -> None:
        n = len(names)
        self.container = np.zeros(n, np.int64)
        self._names = tuple(names)
        self._kinds: dict[tuple[str, int], int] = {}
        self._dtype = np.zeros(n, np.uint8)
        self._ndim = np.full(n, -1)  # -1: no group has filled the row yet
        self._shape = np.ones((n, width), np.int64)
        self._alias = np.full(n, -1)
        self._owner = np.full(n, -1)

    def add(self, placed: _Rows, numbers: Sequence[int]) -> None:
        """Fill the rows of a group. ``numbers`` are its containers' numbers in the merged tree.

        Raises SaveError if the group disagrees with an earlier one.
        """
        layout = placed.group.layout
        ranks = placed.group.ranks
        t = layout.tensors
        codes = [self._kinds.setdefault(kind, len(self._kinds)) for kind in t.dtypes]
        dtype = np.array(codes, np.uint8)[t.dtype]
        shape = widen(t.shape, self._shape.shape[1], 1)
        self._check_equal(placed, dtype, shape)
        # One row per tensor, or one per rank: ``of`` is the tensor, ``to`` the row.
        of, to = ranges(placed.base, np.where(layout.own, len(ranks), 1))
        at = to - placed.base[of]
        self._dtype[to] = dtype[of]
        self._ndim[to] = t.ndim[of]
        self._shape[to] = shape[of]
        self.container[to] = np.array(numbers, np.int64)[layout.container][of]
        self._owner[to] = np.where(layout.own[of], ranks[at], -1)
        tied = t.alias[of] >= 0
        self._alias[to[tied]] = placed.base[t.alias[of[tied]]] + at[tied]

    def _check_equal(self, placed: _Rows, dtype: npt.NDArray[np.uint8], shape: Ints) -> None:
        t = placed.group.layout.tensors
        row = placed.base
        differs = (self._dtype[row] != dtype) | (self._ndim[row] != t.ndim)
        differs |= (self._shape[row] != shape).any(axis=1)
        differs &= self._ndim[row] >= 0
        if differs.any():
            name = t.names[int(np.flatnonzero(differs)[0])]
            rank = int(placed.group.ranks[0])
            raise SaveError(
                f"tensor {name!r} has another shape or dtype on rank {rank} than on earlier ranks",
                rank=rank,
            )

    def table(self) -> TensorTable:
        return TensorTable(
            self._names,
            self._dtype,
            tuple(self._kinds),
            self._ndim,
            self._shape,
            self._alias,
            self._owner,
        )


def _merge_tensors(
    groups: Sequence[Group], containers: Sequence[Sequence[int]]
) -> tuple[TensorTable, Ints, list[_Rows]]:
    """Return tensors by name and owner in order of first appearance, their containers, and the
    rows of each group."""
    row_of: dict[str, int] = {}
    names: list[str] = []
    rows: list[_Rows] = []
    for group in groups:
        base, new_names = _place(group, row_of, len(names))
        names += new_names
        rows.append(_Rows(base, group))
    width = max(group.layout.tensors.shape.shape[1] for group in groups)
    merged = _Merged(names, width)
    for placed, numbers in zip(rows, containers, strict=True):
        merged.add(placed, numbers)
    return merged.table(), merged.container, rows


def _place(group: Group, row_of: dict[str, int], first: int) -> tuple[Ints, list[str]]:
    """Return the first row of each tensor of a group, and the names of the rows it adds from
    ``first``.

    It adds one row per new name, or one per rank if ranks have their own tensors. ``row_of`` maps
    names to rows shared by groups, and is updated.
    """
    base: list[int] = []
    names: list[str] = []
    for name, own in zip(group.layout.tensors.names, group.layout.own.tolist(), strict=True):
        end = first + len(names)
        if own:
            row = end
        else:
            row = row_of.setdefault(name, end)
        base.append(row)
        if row == end:
            names += [name] * (len(group.ranks) if own else 1)
    return np.array(base, np.int64), names


def _merge_shards(groups: Sequence[Group], rows: Sequence[_Rows], width: int) -> ShardTable:
    parts: list[ShardTable] = []
    images = 0
    for group, placed in zip(groups, rows, strict=True):
        s = group.shards
        parts.append(
            ShardTable(
                tensor=placed.of(s.tensor, s.image),
                offsets=widen(s.offsets, width, 0),
                lengths=widen(s.lengths, width, 1),
                image=s.image + images,
                start=s.start,
            )
        )
        images += len(group.images)
    return ShardTable.concat(parts)
