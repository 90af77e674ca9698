"""Decides which rank writes what: divides bytes held by several ranks among them.

This takes no message. Shares are even, or those that ``balance.py`` computed for the whole job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from .balance import SHARE_UNIT, Group
from .box import flat_to_boxes
from .columns import Ints, flat_starts, volumes
from .layout import Regions

# Cuts fall on whole rows of a tensor if a row is at most this fraction of a holder's even share.
GRANULES_PER_SHARE = 100


@dataclass(frozen=True, eq=False)
class Holdings(Regions):
    """Boxes that one rank holds.

    ``tensor``          (n,) index of the rank's local tensor
    ``itemsize``        (n,) bytes per element
    ``group``           (n,) index into ``groups``
    ``groups``          ranks, ascending, that hold the same bytes
    ``order``           (n,) sort key, equal on all holders of a box; boxes of a group with the same
                        key have different offsets
    """

    itemsize: Ints
    group: Ints
    groups: tuple[tuple[int, ...], ...]
    order: Ints

    @property
    def nbytes(self) -> Ints:
        """Bytes of each box, (n,)."""
        return volumes(self.lengths) * self.itemsize


def divide(
    holdings: Holdings, rank: int, shares: Mapping[Group, tuple[int, ...]] | None = None
) -> Holdings:
    """Return the part of its holdings that ``rank`` writes.

    The boxes of a group are laid end to end in ``order``. The i-th of its n ranks takes the bytes
    from i/n to (i+1)/n of them; or, if ``shares`` contains the group, from its i-th cut to the
    next, see :func:`.balance.balance`. A cut inside a box falls on a whole number of its rows (the
    largest suffix of its dimensions that is at most 1% of an even share, or one element). So a cut
    piece is a single box, except in tensors with a few huge rows. Every holder computes the same
    cuts: together they write everything exactly once. Empty boxes are dropped; the rest keeps its
    order. Raises ValueError if ``rank`` is not in one of the groups.
    """
    members = np.array([len(group) for group in holdings.groups], dtype=np.int64)
    position = np.array([_position(group, rank) for group in holdings.groups], dtype=np.int64)
    nelems = volumes(holdings.lengths)
    begin = np.zeros_like(nelems)
    end = nelems.copy()
    shared = np.flatnonzero(members[holdings.group] > 1)
    if len(shared):
        begin[shared], end[shared] = _parts(holdings.take(shared), members, position, shares or {})
    whole = (begin == 0) & (end == nelems) & (nelems > 0)
    if whole.all():
        return holdings
    cut = np.flatnonzero(~whole & (begin < end))
    pieces, source = _pieces(holdings, cut, begin, end)
    kept = np.flatnonzero(whole)
    order = np.argsort(np.concatenate((kept, source)), kind="stable")
    return holdings.take(kept).extended(pieces).take(order)


def _position(group: tuple[int, ...], rank: int) -> int:
    if rank not in group:
        raise ValueError(f"rank {rank} is not one of the ranks {group} that hold the same bytes")
    return group.index(rank)


def _parts(
    shared: Holdings, members: Ints, position: Ints, shares: Mapping[Group, tuple[int, ...]]
) -> tuple[Ints, Ints]:
    """Return the elements [begin, end), row-major, that this rank writes of each shared box."""
    begin = np.empty(len(shared), dtype=np.int64)
    end = np.empty(len(shared), dtype=np.int64)
    order = _line_up(shared)
    boxes = shared.take(order)
    nbytes = boxes.nbytes
    group = boxes.group
    line = np.append(0, np.cumsum(nbytes))
    edges = np.searchsorted(group, np.arange(len(members) + 1))
    total = np.diff(line[edges])
    share, rest = np.divmod(total, members)
    granule = _granules(boxes, share[group] // GRANULES_PER_SHARE)
    uneven = {row: shares[ranks] for row, ranks in enumerate(shared.groups) if ranks in shares}
    for target, index in ((begin, position), (end, position + 1)):
        cut = share * index + rest * index // members  # total * index // members without overflow
        for row, cuts in uneven.items():
            cut[row] = int(total[row]) * cuts[int(index[row])] // SHARE_UNIT
        cut += line[edges[:-1]]
        nelems = np.clip(cut[group] - line[:-1], 0, nbytes) // boxes.itemsize
        target[order] = nelems // granule * granule
    return begin, end


def _line_up(shared: Holdings) -> Ints:
    """Return the order in which boxes are laid end to end: by group, ``order``, and offsets."""
    group = shared.group
    order = shared.order
    ties = (group[1:] == group[:-1]) & (order[1:] <= order[:-1])
    if not ties.any() and np.all(group[1:] >= group[:-1]):
        return np.arange(len(group), dtype=np.int64)
    return np.lexsort((*shared.offsets.T[::-1], order, group)).astype(np.int64, copy=False)


def _granules(boxes: Holdings, nbytes_max: Ints) -> Ints:
    """Return the largest suffix of each box's dimensions of at most ``nbytes_max``, or 1: (n,)."""
    granule = np.ones(len(boxes), dtype=np.int64)
    suffix = np.ones(len(boxes), dtype=np.int64)
    for dim in range(boxes.lengths.shape[1] - 1, -1, -1):
        suffix *= boxes.lengths[:, dim]
        np.copyto(granule, suffix, where=suffix * boxes.itemsize <= nbytes_max)
    return np.maximum(granule, 1)


def _pieces(holdings: Holdings, cut: Ints, begin: Ints, end: Ints) -> tuple[Holdings, Ints]:
    """Return the boxes of elements [begin, end) of each box in rows ``cut``, and their source rows.

    A rank has at most two cut boxes per group, so a loop over rows is fast enough.
    """
    found = [
        (row, box)
        for row in cut.tolist()
        for box in flat_to_boxes(holdings.lengths[row].tolist(), int(begin[row]), int(end[row]))
    ]
    source = np.array([row for row, _ in found], dtype=np.int64)
    ndim = holdings.lengths.shape[1]
    shift = np.array([box.offsets for _, box in found], dtype=np.int64).reshape(-1, ndim)
    lengths = np.array([box.lengths for _, box in found], dtype=np.int64).reshape(-1, ndim)
    parent = holdings.take(source)
    local_start = parent.local_start + flat_starts(shift, parent.local_shape)
    offsets = parent.offsets + shift
    return replace(parent, offsets=offsets, lengths=lengths, local_start=local_start), source
