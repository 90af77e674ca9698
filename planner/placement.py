"""Computes each rank's part of a tensor on a device mesh. Mirrors DTensor placements, without
torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..core.units import ceil_div
from .box import Box
from .columns import Ints
from .layout import Piece


@dataclass(frozen=True, slots=True)
class Split:
    """Splits dimension ``dim`` over one mesh dimension like torch.chunk: equal parts, the last ones
    short or empty.

    With ``stride`` k > 1, the dimension is first cut into k parts, every part is split, and a rank
    holds its share of each, end to end: torch's ``_StridedShard(dim, split_factor=k)``.
    """

    dim: int
    stride: int = 1

    def __post_init__(self) -> None:
        if self.dim < 0 or self.stride < 1:
            raise ValueError(f"no such split: {self}")


@dataclass(frozen=True, slots=True)
class Replicated:
    """All ranks along one mesh dimension hold the same."""


Placement = Split | Replicated

# Index intervals [start, stop) along one dimension, ascending and disjoint; a dimension of a local
# tensor is their concatenation.
Intervals = list[tuple[int, int]]


def local_pieces(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> list[Piece]:
    """Return the pieces of a tensor of ``shape`` that the rank at ``coordinate`` of the mesh holds.

    Pieces come in the row-major order of the local tensor; an empty local tensor has none.
    ``placements`` apply from left to right, one per mesh dimension. Raises ValueError if one does
    not fit the tensor or the mesh.
    """
    dims = _intervals(shape, mesh_shape, coordinate, placements)
    local = tuple(map(_size, dims))
    located = [list(zip(intervals, _local_starts(intervals), strict=True)) for intervals in dims]
    return [_piece(combination, local) for combination in itertools.product(*located)]


def local_shape(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> tuple[int, ...]:
    """Return the shape of the local tensor at ``coordinate``. Raises like ``local_pieces``."""
    return tuple(map(_size, _intervals(shape, mesh_shape, coordinate, placements)))


def holders(
    mesh_ranks: Ints, coordinate: Sequence[int], placements: Sequence[Placement]
) -> tuple[int, ...]:
    """Return the global ranks, ascending, that hold the same pieces as the one at ``coordinate``.

    ``mesh_ranks`` holds the global rank at each mesh coordinate.
    """
    _check_mesh(mesh_ranks.shape, coordinate, placements)
    index = tuple(
        slice(None) if isinstance(placement, Replicated) else at
        for placement, at in zip(placements, coordinate, strict=True)
    )
    return tuple(np.sort(mesh_ranks[index], axis=None).tolist())


def _check_mesh(
    mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> None:
    if not len(mesh_shape) == len(coordinate) == len(placements):
        raise ValueError(
            f"{len(placements)} placements at coordinate {tuple(coordinate)} of mesh "
            f"{tuple(mesh_shape)}"
        )
    if any(not 0 <= at < size for at, size in zip(coordinate, mesh_shape, strict=True)):
        raise ValueError(
            f"coordinate {tuple(coordinate)} lies outside the mesh {tuple(mesh_shape)}"
        )


def _intervals(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> list[Intervals]:
    """Return the indices held at ``coordinate``, per tensor dimension."""
    _check_mesh(mesh_shape, coordinate, placements)
    dims: list[Intervals] = [[(0, length)] if length else [] for length in shape]
    for placement, parts, at in zip(placements, mesh_shape, coordinate, strict=True):
        if isinstance(placement, Replicated):
            continue
        if placement.dim >= len(dims):
            raise ValueError(f"{placement} does not fit a tensor of shape {tuple(shape)}")
        held = dims[placement.dim]
        dims[placement.dim] = _joined(
            interval
            for start, stop in _shares(_size(held), placement.stride, parts, at)
            for interval in _slice(held, start, stop)
        )
    return dims


def _size(intervals: Intervals) -> int:
    return sum(stop - start for start, stop in intervals)


def _local_starts(intervals: Intervals) -> list[int]:
    """Return the start of each interval in their concatenation."""
    return list(itertools.accumulate((stop - start for start, stop in intervals), initial=0))[:-1]


def _chunk(start: int, stop: int, parts: int, index: int) -> tuple[int, int]:
    """Return one chunk of [start, stop), cut like torch.chunk: empty chunks come last."""
    step = ceil_div(stop - start, parts)
    return min(start + step * index, stop), min(start + step * (index + 1), stop)


def _shares(length: int, stride: int, parts: int, index: int) -> Intervals:
    """Return the positions in [0, length) that rank ``index`` of ``parts`` holds."""
    return [_chunk(*_chunk(0, length, stride, part), parts, index) for part in range(stride)]


def _slice(intervals: Intervals, start: int, stop: int) -> Intervals:
    """Return the intervals at positions [start, stop) of the concatenation of ``intervals``."""
    result = []
    for (first, last), position in zip(intervals, _local_starts(intervals), strict=True):
        low = max(first, first + start - position)
        high = min(last, first + stop - position)
        if low < high:
            result.append((low, high))
    return result


def _joined(intervals: Iterable[tuple[int, int]]) -> Intervals:
    """Return ascending intervals with touching ones joined, to get as few pieces as possible."""
    result: Intervals = []
    for start, stop in intervals:
        if result and result[-1][1] == start:
            first, _ = result.pop()
            result.append((first, stop))
        else:
            result.append((start, stop))
    return result


def _piece(combination: Sequence[tuple[tuple[int, int], int]], local: Sequence[int]) -> Piece:
    offsets = tuple(start for (start, _), _ in combination)
    lengths = tuple(stop - start for (start, stop), _ in combination)
    return Piece.at(Box(offsets, lengths), [position for _, position in combination], local)
