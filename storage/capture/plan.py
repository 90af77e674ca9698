"""What this rank writes, and where it lies: from a flat state to an image layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...planner.balance import Group
from ...planner.columns import padded
from ...planner.image import ImageLayout, lay_out, shard_names
from ...planner.saving import Holdings, divide
from ...planner.table import ShardTable, TensorTable
from .dtypes import dtype_name
from .kept import Kept
from .source import ImageSource
from .state import FlatState

__all__ = ["SavePlan", "plan_save"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SavePlan:
    """One rank's image: its tensors (all that the rank knows of), its shards, its layout, and its bytes."""

    tensors: TensorTable
    container: Ints
    shards: ShardTable
    layout: ImageLayout
    source: ImageSource


def _tensor_table(flat: FlatState, alias: Ints, owner: Ints) -> TensorTable:
    """The tensors of a flat state as columns."""
    kinds = list(dict.fromkeys(flat.dtypes))
    code = {dtype: i for i, dtype in enumerate(kinds)}
    ndim = np.fromiter(map(len, flat.shapes), np.int64, len(flat.shapes))
    return TensorTable(
        names=tuple(flat.names),
        dtype=np.array([code[d] for d in flat.dtypes], np.uint8),
        dtypes=tuple((dtype_name(d), d.itemsize) for d in kinds),
        ndim=ndim,
        shape=padded(flat.shapes, int(ndim.max(initial=1)), 1),
        alias=alias,
        owner=owner,
    )


def plan_save(
    flat: FlatState,
    rank: int,
    agreed: Mapping[int, tuple[int, ...]] | None,
    shares: Mapping[Group, tuple[int, ...]] | None = None,
) -> SavePlan:
    """Lay out what ``rank`` writes. What was laid out lately is looked up.

    ``agreed`` tells for each row whose replicas the rank alone does not know which ranks hold the same bytes: an empty
    tuple where ranks differ and each keeps its own. None: this process is alone. ``shares``: of groups of ranks that do not
    divide evenly what they hold, see :func:`..planner.saving.divide`.
    """
    columns: tuple[Sequence[Any], ...] = (flat.names, flat.containers, flat.shapes, flat.dtypes, flat.parts, flat.alias)
    # All that a plan follows from, and no digest of it: what is equal is the same.
    told = (None if each is None else tuple(each.items()) for each in (agreed, shares))
    key = (rank, *told, *(tuple(column) for column in columns))
    plan = _known.get(key)
    if plan is None:
        plan = _planned(flat, rank, agreed, shares)
        _known.put(key, plan)
    tensors, container, shards, layout, held = plan
    check = None if flat.lazy is None else flat.lazy.check
    source = ImageSource(layout, held, flat.locals, tensors.ndim[held.tensor], check)
    return SavePlan(tensors, container, shards, layout, source)


_Plan = tuple[TensorTable, Ints, ShardTable, ImageLayout, Holdings]
_known: Kept[_Plan] = Kept(8)


def _planned(
    flat: FlatState,
    rank: int,
    agreed: Mapping[int, tuple[int, ...]] | None,
    shares: Mapping[Group, tuple[int, ...]] | None,
) -> _Plan:
    alias = np.array(flat.alias, np.int64)
    if agreed is not None:
        for row in np.flatnonzero(alias >= 0).tolist():
            if agreed.get(row) != agreed.get(int(alias[row])):
                alias[row] = -1  # tied here, but not everywhere
    owner = np.full(len(flat.names), -1, np.int64)
    owner[[row for row, ranks in (agreed or {}).items() if not ranks]] = rank
    owner = np.where(alias < 0, owner, owner[alias])
    tensors = _tensor_table(flat, alias, owner)
    held = divide(_holdings(flat, tensors, rank, agreed), rank, shares)
    ndim = tensors.ndim[held.tensor]
    dtypes = [tensors.dtypes[code][0] for code in tensors.dtype[held.tensor].tolist()]
    fqns = [flat.names[row] for row in held.tensor.tolist()]
    names = shard_names(fqns, tensors.shape[held.tensor], ndim, held.offsets, held.lengths)
    layout = lay_out(names, dtypes, held.lengths, ndim, held.itemsize)
    image = np.zeros(len(held.tensor), np.int64)
    shards = ShardTable(held.tensor, held.offsets, held.lengths, image, layout.start).sorted_by_tensor()
    return tensors, np.array(flat.containers, np.int64), shards, layout, held


def _holdings(
    flat: FlatState, tensors: TensorTable, rank: int, agreed: Mapping[int, tuple[int, ...]] | None
) -> Holdings:
    """Everything this rank holds: plain tensors as they are, DTensors piece by piece; aliases and empty ones left out."""
    width = tensors.shape.shape[1]
    groups: dict[tuple[int, ...], int] = {(rank,): 0}
    whole = [row for row, part in enumerate(flat.parts) if part is None and tensors.alias[row] < 0]
    group = [groups.setdefault((agreed or {}).get(row) or (rank,), len(groups)) for row in whole]
    pieces = [
        (row, piece, groups.setdefault((agreed or {}).get(row) or part.holders, len(groups)))
        for row, part in enumerate(flat.parts)
        if part is not None and tensors.alias[row] < 0
        for piece in part.pieces
    ]
    row = np.array([*whole, *(r for r, _, _ in pieces)], np.int64)
    zeros = np.zeros((len(whole), width), np.int64)
    return Holdings(
        tensor=row,
        offsets=np.concatenate([zeros, padded([p.box.offsets for _, p, _ in pieces], width, 0)]),
        lengths=np.concatenate([tensors.shape[whole], padded([p.box.lengths for _, p, _ in pieces], width, 1)]),
        local_offsets=np.concatenate([zeros, padded([p.local_offsets for _, p, _ in pieces], width, 0)]),
        itemsize=tensors.itemsize[row],
        group=np.array([*group, *(g for _, _, g in pieces)], np.int64),
        groups=tuple(groups),
        order=_order(flat.names, row, len(groups)),
    )


def _order(names: Sequence[str], row: Ints, groups: int) -> Ints:
    """A sort key that all holders of a group agree on: by name, then by piece."""
    if groups == 1:
        return np.arange(len(row))
    by_name = np.empty(len(names), np.int64)
    by_name[sorted(range(len(names)), key=names.__getitem__)] = np.arange(len(names))
    return by_name[row] * (len(row) + 1) + np.arange(len(row))
