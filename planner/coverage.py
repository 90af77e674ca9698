"""Checks that every element of every tensor is covered exactly once: exact, for whole tables.

There are three stages, each for the cases that the previous one could not decide. Flat intervals
are sorted and compared end to start. Other boxes are split along cut planes, all tensors together,
until each is alone (guillotine cuts). The few that no plane separates, such as pinwheels, are
counted cell by cell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from .box import Box
from .columns import Bools, Ints, contiguous, flat_starts, volumes

# After the first flaw of a tensor, examine up to this number of further cells for other kinds.
CELLS_AFTER_FIRST = 10_000
# One round of cuts decides any layout of meshes. Boxes that have to be peeled off one by one take a
# round per box: after this many rounds, the rest is counted.
ROUNDS_MAX = 64


@dataclass(frozen=True, slots=True)
class Flaw:
    """One flaw of a tensor: ``box`` is "missing", "stored twice" or "out of bounds"."""

    kind: str
    box: Box


def flawed(shape: Ints, tensor: Ints, offsets: Ints, lengths: Ints) -> Bools:
    """Return which tensors are *not* covered exactly once by boxes within bounds: (T,) bool.

    ``shape`` is (T, D); row i of ``tensor`` (S,), ``offsets`` and ``lengths`` (S, D) is a box of
    the tensor in row ``tensor[i]``. A tensor without elements needs no boxes.
    """
    flags = np.zeros(len(shape), dtype=np.bool_)
    within = shape[tensor]
    flags[tensor[~_in_bounds(within, offsets, lengths)]] = True
    flags |= (np.bincount(tensor, minlength=len(shape)) == 0) & (volumes(shape) != 0)
    flat = np.ones(len(shape), dtype=np.bool_)
    flat[tensor[~contiguous(lengths, within)]] = False
    del within  # as large as the table's offsets
    rows = true_rows(flat[tensor] & ~flags[tensor])
    _flag_flat(flags, shape, tensor[rows], offsets[rows], lengths[rows])
    rows = true_rows(~flat[tensor] & ~flags[tensor])
    _flag_cut(flags, shape, tensor[rows], offsets[rows], lengths[rows])
    return flags


def _in_bounds(within: Ints, offsets: Ints, lengths: Ints) -> Bools:
    """Return which boxes have elements, all inside arrays of lengths ``within``: -> (n,)."""
    # Subtract instead of adding: offset + length of a hostile table could wrap around.
    fits = np.ones(len(offsets), dtype=np.bool_)
    for dim in range(offsets.shape[1]):
        offset = offsets[:, dim]
        length = lengths[:, dim]
        limit = within[:, dim]
        fits &= (offset >= 0) & (length > 0) & (length <= limit - offset)
    return fits


def true_rows(mask: Bools) -> Ints | slice:
    """Return the true rows of a mask; as a slice, which copies nothing, if all are true."""
    if mask.all():
        return slice(None)
    return np.flatnonzero(mask)


def _flag_flat(flags: Bools, shape: Ints, tensor: Ints, offsets: Ints, lengths: Ints) -> None:
    """Flag the tensors whose flat intervals do not line up from 0 to the tensor's volume."""
    if not len(tensor):
        return
    start = flat_starts(offsets, shape[tensor])
    nelems = volumes(lengths)
    volume = volumes(shape)
    same = tensor[1:] == tensor[:-1]
    if not np.all((tensor[1:] > tensor[:-1]) | (same & (start[1:] > start[:-1]))):
        order = np.lexsort((start, tensor))
        tensor = tensor[order]
        start = start[order]
        nelems = nelems[order]
        same = tensor[1:] == tensor[:-1]
    stop = start + nelems
    first = np.append(True, ~same)
    last = np.append(~same, True)
    flags[tensor[first & (start != 0)]] = True
    flags[tensor[last & (stop != volume[tensor])]] = True
    flags[tensor[1:][same & (start[1:] != stop[:-1])]] = True


@dataclass(slots=True)
class _Groups:
    """Boxes and the regions they have to cover.

    Row i belongs to ``group[i]``, whose region is row ``group[i]`` of ``lows`` and ``highs``. Boxes
    lie within their region.
    """

    tensor: Ints
    low: Ints
    high: Ints
    group: Ints
    lows: Ints
    highs: Ints
    size_before: Ints  # per box: boxes in its group before this round of cuts

    def take(self, rows: Ints | Bools) -> _Groups:
        names = ("tensor", "low", "high", "group", "size_before")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    @property
    def sizes(self) -> Ints:
        return np.bincount(self.group, minlength=1)[self.group]


def _flag_cut(flags: Bools, shape: Ints, tensor: Ints, offsets: Ints, lengths: Ints) -> None:
    """Flag the tensors whose boxes do not tile them.

    Cuts until no plane separates the boxes, or the rounds are used up, and then counts cells.
    """
    groups = _Groups(
        tensor,
        offsets,
        offsets + lengths,
        tensor,
        np.zeros_like(shape),
        shape,
        np.zeros_like(tensor),
    )
    for left in reversed(range(ROUNDS_MAX)):
        if not len(groups.tensor):
            return
        groups.size_before = groups.sizes
        for dim in range(shape.shape[1]):
            groups = _cut(flags, groups, dim)
        single = groups.sizes == 1
        region_low = groups.lows[groups.group]
        region_high = groups.highs[groups.group]
        fills = np.all((groups.low == region_low) & (groups.high == region_high), axis=1)
        flags[groups.tensor[single & ~fills]] = True
        groups = groups.take(~single & ~flags[groups.tensor])
        stuck = (groups.sizes == groups.size_before) | (left == 0)
        _flag_stuck(flags, groups.take(stuck))
        groups = groups.take(~stuck & ~flags[groups.tensor])


def _cut(flags: Bools, groups: _Groups, dim: int) -> _Groups:
    """Split groups along ``dim`` at planes that no box crosses. Flags tensors with a gap there."""
    if not len(groups.tensor):
        return groups
    groups = groups.take(np.lexsort((groups.low[:, dim], groups.group)))
    low = groups.low[:, dim]
    group = groups.group
    reach = _running_maximum(groups.high[:, dim], group)
    first = np.append(True, group[1:] != group[:-1])
    before = np.where(first, groups.lows[group, dim], np.append(0, reach[:-1]))
    begins = first | (low >= before)
    ends = np.append(begins[1:], True)
    last = np.append(first[1:], True)
    flags[groups.tensor[begins & (low > before)]] = True
    flags[groups.tensor[last & (reach < groups.highs[group, dim])]] = True
    lows = groups.lows[group[begins]]
    highs = groups.highs[group[begins]]
    lows[:, dim] = low[begins]
    highs[:, dim] = reach[ends]
    groups.group = np.cumsum(begins) - 1
    groups.lows = lows
    groups.highs = highs
    return groups


def _running_maximum(values: Ints, group: Ints) -> Ints:
    """Return the running maximum of ``values`` per group; groups are consecutive rows.

    Works on ranks instead of values, so that adding a step per group cannot overflow.
    """
    unique, ranks = np.unique(values, return_inverse=True)
    step = np.append(0, np.cumsum(group[1:] != group[:-1])) * len(unique)
    reached: Ints = np.maximum.accumulate(ranks + step) - step
    return unique[reached]


def _flag_stuck(flags: Bools, groups: _Groups) -> None:
    """Flag the tensors of groups that no plane separates, unless they tile their region."""
    order = np.argsort(groups.group, kind="stable")
    firsts = np.flatnonzero(np.diff(groups.group[order], prepend=-1))
    for rows in np.split(order, firsts)[1:]:
        tensor = groups.tensor[rows[0]]
        if not flags[tensor]:
            region = groups.group[rows[0]]
            low, high = groups.low[rows], groups.high[rows]
            flags[tensor] = not _tiles(groups.lows[region], groups.highs[region], low, high)


def _tiles(region_low: Ints, region_high: Ints, low: Ints, high: Ints) -> bool:
    """Return whether boxes [low, high) within a region cover it exactly once."""
    # Sums of Python integers: volumes of a hostile table could wrap around.
    if sum(volumes(high - low).tolist()) != math.prod((region_high - region_low).tolist()):
        return False
    return all(count == 1 for _, _, count in cells(region_low, region_high, low, high))


def cells(
    region_low: Ints, region_high: Ints, low: Ints, high: Ints
) -> Iterator[tuple[Ints, Ints, int]]:
    """Yield a partition of the region into cells ``(low, high, number of boxes covering it)``.

    Each box covers a cell completely or not at all. Cells in parts whose volumes do not add up come
    first.
    """
    stack = [(region_low, region_high, low, high)]
    while stack:
        region_low, region_high, low, high = stack.pop()
        cut = _median_face(region_low, region_high, low, high)
        if cut is None:
            yield region_low, region_high, len(low)
            continue
        dim, at = cut
        middle_low = region_low.copy()
        middle_high = region_high.copy()
        middle_low[dim] = middle_high[dim] = at
        halves = [
            _clip(region_low, middle_high, low, high),
            _clip(middle_low, region_high, low, high),
        ]
        stack.extend(sorted(halves, key=_looks_flawed))


def _median_face(
    region_low: Ints, region_high: Ints, low: Ints, high: Ints
) -> tuple[int, int] | None:
    """Return the dimension with the most box faces inside the region, and the median face.

    None if no face is inside.
    """
    faces = np.concatenate((low, high))
    inside = (faces > region_low) & (faces < region_high)
    counts = inside.sum(axis=0)
    if not counts.any():
        return None
    dim = int(counts.argmax())
    chosen = np.sort(faces[inside[:, dim], dim])
    return dim, int(chosen[len(chosen) // 2])


def _clip(
    region_low: Ints, region_high: Ints, low: Ints, high: Ints
) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the region and the parts of the boxes inside it."""
    low = np.maximum(low, region_low)
    high = np.minimum(high, region_high)
    meets = np.all(low < high, axis=1)
    return region_low, region_high, low[meets], high[meets]


def _looks_flawed(part: tuple[Ints, Ints, Ints, Ints]) -> bool:
    region_low, region_high, low, high = part
    return bool(volumes(high - low).sum() != np.prod(region_high - region_low))


def flaws(shape: tuple[int, ...], offsets: Ints, lengths: Ints) -> list[Flaw]:
    """Return one example of each kind of flaw in the boxes (n, ndim) of one tensor.

    Empty if they cover it exactly once. If the tensor has one kind of flaw and very many boxes,
    rare flaws of another kind may go unmentioned.
    """
    inside = _in_bounds(
        np.broadcast_to(np.array(shape, dtype=np.int64), offsets.shape), offsets, lengths
    )
    found: list[Flaw] = []
    for row in np.flatnonzero(~inside)[:1]:
        # A box cannot have a negative length; report an empty one.
        box = Box(tuple(offsets[row].tolist()), tuple(np.maximum(lengths[row], 0).tolist()))
        found.append(Flaw("out of bounds", box))
    low = offsets[inside]
    high = (offsets + lengths)[inside]
    wanted = {0: "missing", 2: "stored twice"}
    left = CELLS_AFTER_FIRST
    region_low = np.zeros(len(shape), dtype=np.int64)
    region_high = np.array(shape, dtype=np.int64)
    for cell_low, cell_high, count in (
        cells(region_low, region_high, low, high) if 0 not in shape else ()
    ):
        kind = wanted.pop(min(count, 2), None)
        if kind is not None:
            found.append(
                Flaw(kind, Box(tuple(cell_low.tolist()), tuple((cell_high - cell_low).tolist())))
            )
        left -= bool(found)
        if not wanted or not left:
            break
    return found
