"""The boxes of many layouts as columns: their positions in the tensors and in local memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .columns import Ints, flat_boxes, padded
from .layout import Layout

__all__ = ["Regions", "regions_of"]


@dataclass(frozen=True, eq=False)
class Regions:
    """Boxes. Dimensions beyond a tensor's own are padded: offset 0, length 1.

    ``row``            (n,) index of the layout; ascending
    ``offsets``        (n, D) first element of the box in the global tensor
    ``lengths``        (n, D)
    ``local_start``    (n,) element of the local tensor at which it begins, in row-major order
    ``local_shape``    (n, D) shape of the array whose row-major strides it has there, see
                       :class:`.layout.Piece`
    """

    row: Ints
    offsets: Ints
    lengths: Ints
    local_start: Ints
    local_shape: Ints


def regions_of(layouts: Sequence[Layout], ndim: int) -> Regions:
    """Return the boxes of ``layouts``, for tensors of at most ``ndim`` dimensions.

    They are ordered by row, and within a row by position in the local tensor.
    """
    flat = [row for row, layout in enumerate(layouts) if layout.flat_range is not None]
    if not flat:
        return _of_pieces(layouts, ndim)
    ranges = _of_ranges(layouts, flat, ndim)
    pieces = _of_pieces(layouts, ndim)
    both = Regions(
        *(np.concatenate(pair) for pair in zip(_columns(pieces), _columns(ranges), strict=True))
    )
    order = np.argsort(both.row, kind="stable")
    return Regions(*(column[order] for column in _columns(both)))


def _columns(regions: Regions) -> tuple[Ints, ...]:
    return (
        regions.row,
        regions.offsets,
        regions.lengths,
        regions.local_start,
        regions.local_shape,
    )


def _of_pieces(layouts: Sequence[Layout], ndim: int) -> Regions:
    """Return the boxes of the layouts that consist of boxes."""
    held = [
        (row, piece)
        for row, layout in enumerate(layouts)
        if layout.flat_range is None
        for piece in layout.pieces
    ]
    return Regions(
        row=np.array([row for row, _ in held], np.int64),
        offsets=padded([piece.box.offsets for _, piece in held], ndim, 0),
        lengths=padded([piece.box.lengths for _, piece in held], ndim, 1),
        local_start=np.array([piece.local_start for _, piece in held], np.int64),
        local_shape=padded([piece.local_shape for _, piece in held], ndim, 1),
    )


def _of_ranges(layouts: Sequence[Layout], rows: Sequence[int], ndim: int) -> Regions:
    """Return the boxes of the flat ranges in ``rows``."""
    shape = padded([layouts[row].shape for row in rows], ndim, 1)
    found = [layouts[row].flat_range for row in rows]
    start, stop = np.array(found, np.int64).T
    at, offsets, lengths, begin = flat_boxes(shape, start, stop)
    return Regions(
        row=np.array(rows, np.int64)[at],
        offsets=offsets,
        lengths=lengths,
        local_start=begin - start[at],
        local_shape=lengths,
    )
