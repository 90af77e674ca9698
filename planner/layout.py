"""Layouts: the part of a tensor that one rank holds, and its position in the rank's own memory.

Whatever shards a tensor (a device mesh, a flat buffer, a framework's own scheme) is described to
the planner by this protocol alone: as boxes, or as a flat range.

:mod:`.placement` derives layouts from meshes; :func:`regions_of` turns many into columns.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import numpy as np

from .box import Box, flat_to_boxes, row_strides
from .columns import Bools, Ints, flat_boxes, padded


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the global tensor, and its position in the rank's local tensor.

    It begins at element ``local_start`` of the local tensor in row-major order, with the row-major
    strides of an array of ``local_shape``. That is the shape of the local tensor; or, for a 1-d one
    that holds a flat range, the shape of the box.
    """

    box: Box
    local_start: int
    local_shape: tuple[int, ...]

    @classmethod
    def at(cls, box: Box, local_offsets: Sequence[int], local_shape: Sequence[int]) -> Piece:
        """Return a piece at ``local_offsets`` in a local tensor with as many dimensions."""
        steps = zip(local_offsets, row_strides(local_shape), strict=True)
        return cls(box, sum(offset * stride for offset, stride in steps), tuple(local_shape))


class Layout(Protocol):
    """One rank's part of one tensor. Hashable; equal for tensors that are laid out alike."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's local tensor, which contains the pieces."""

    @property
    def flat_range(self) -> tuple[int, int] | None:
        """(start, stop) if the local tensor is 1-d and holds these elements of the whole tensor in
        row-major order; None if it holds boxes."""

    @property
    def pieces(self) -> Sequence[Piece]:
        """The non-empty boxes that this rank holds, disjoint, in the row-major order of its local
        tensor.

        For flat ranges, :func:`regions_of` computes all boxes at once, which is faster.
        """

    @property
    def is_empty(self) -> bool:
        """True if this rank holds no element."""

    @property
    def region(self) -> str:
        """A text that identifies this rank's elements, such as ``[0:4,0:8]``.

        Layouts of one kind that hold the same elements have the same text.
        """

    @property
    def holders(self) -> tuple[int, ...] | None:
        """The ranks, ascending, that hold the same elements; () if this rank knows no other.

        None if the tensor is held whole, and the layout says nothing about other ranks: they may
        hold another tensor under its name.
        """

    @property
    def ranks(self) -> int:
        """Number of ranks over which the tensor is laid out. Other ranks may hold it, too."""


@dataclass(frozen=True, slots=True)
class MeshLayout:
    """A rank's boxes of a tensor that is laid out over ``ranks`` ranks, such as a device mesh."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    local_shape: tuple[int, ...]
    holders: tuple[int, ...] | None
    ranks: int
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Computed once, without the holders: there may be thousands.
        object.__setattr__(self, "_hash", hash((self.shape, self.pieces, self.ranks)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def flat_range(self) -> None:
        return

    @property
    def is_empty(self) -> bool:
        return not self.pieces

    @property
    def region(self) -> str:
        return "".join(str(piece.box) for piece in self.pieces)


@functools.lru_cache(maxsize=4096)
def local_layout(shape: tuple[int, ...]) -> MeshLayout:
    """Return the layout of a plain tensor, which is held whole and says nothing about other ranks.

    Built once per shape: layers repeat.
    """
    shape = tuple(shape)
    box = Box((0,) * len(shape), shape)
    return replace(box_layout(shape, box), holders=None)


def box_layout(shape: tuple[int, ...], box: Box) -> MeshLayout:
    """Return the layout of one box of a tensor, which fills the local tensor of its only rank."""
    pieces = (Piece(box, 0, box.lengths),) if box.volume else ()
    return MeshLayout(shape, pieces, box.lengths, holders=(), ranks=1)


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Elements [start, stop) of a tensor in row-major order, in a 1-d local tensor."""

    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def local_shape(self) -> tuple[int]:
        return (self.stop - self.start,)

    @property
    def flat_range(self) -> tuple[int, int]:
        return self.start, self.stop

    @property
    def pieces(self) -> tuple[Piece, ...]:
        boxes = flat_to_boxes(self.shape, self.start, self.stop)
        starts = itertools.accumulate((box.volume for box in boxes), initial=0)
        return tuple(
            Piece(box, start, box.lengths) for box, start in zip(boxes, starts, strict=False)
        )

    @property
    def is_empty(self) -> bool:
        return self.start == self.stop

    @property
    def region(self) -> str:
        """A text such as ``[flat 10:25]``."""
        return f"[flat {self.start}:{self.stop}]"

    @property
    def holders(self) -> tuple[int, ...]:
        return ()

    @property
    def ranks(self) -> int:
        return 1


@dataclass(frozen=True, eq=False)
class Regions:
    """Boxes. Dimensions beyond a tensor's own are padded: offset 0, length 1.

    ``tensor``         (n,) number of the tensor; of its layout, where :func:`regions_of` made them
    ``offsets``        (n, D) first element of the box in the global tensor
    ``lengths``        (n, D)
    ``local_start``    (n,) element of the local tensor at which it begins, in row-major order
    ``local_shape``    (n, D) shape of the array whose row-major strides it has there, see
                       :class:`Piece`
    """

    tensor: Ints
    offsets: Ints
    lengths: Ints
    local_start: Ints
    local_shape: Ints

    def __len__(self) -> int:
        return len(self.tensor)

    def take(self, rows: Ints | Bools) -> Self:
        """Return the boxes in these rows."""
        columns = {name: column[rows] for name, column in self._columns().items()}
        return replace(self, **columns)

    def extended(self, other: Self) -> Self:
        """Return these boxes followed by those of ``other``, which must agree in all else."""
        theirs = other._columns()
        pairs = {name: (column, theirs[name]) for name, column in self._columns().items()}
        columns = {name: np.concatenate(pair) for name, pair in pairs.items()}
        return replace(self, **columns)

    def _columns(self) -> dict[str, Ints]:
        return {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}


def regions_of(layouts: Sequence[Layout], ndim: int) -> Regions:
    """Return the boxes of ``layouts``, for tensors of at most ``ndim`` dimensions.

    They are ordered by layout, and within it by position in the local tensor.
    """
    flat = [row for row, layout in enumerate(layouts) if layout.flat_range is not None]
    if not flat:
        return _of_pieces(layouts, ndim)
    both = _of_pieces(layouts, ndim).extended(_of_ranges(layouts, flat, ndim))
    return both.take(np.argsort(both.tensor, kind="stable"))


def _of_pieces(layouts: Sequence[Layout], ndim: int) -> Regions:
    held = [
        (row, piece)
        for row, layout in enumerate(layouts)
        if layout.flat_range is None
        for piece in layout.pieces
    ]
    return Regions(
        tensor=np.array([row for row, _ in held], np.int64),
        offsets=padded([piece.box.offsets for _, piece in held], ndim, 0),
        lengths=padded([piece.box.lengths for _, piece in held], ndim, 1),
        local_start=np.array([piece.local_start for _, piece in held], np.int64),
        local_shape=padded([piece.local_shape for _, piece in held], ndim, 1),
    )


def _of_ranges(layouts: Sequence[Layout], rows: Sequence[int], ndim: int) -> Regions:
    shape = padded([layouts[row].shape for row in rows], ndim, 1)
    found = [layouts[row].flat_range for row in rows]
    start, stop = np.array(found, np.int64).T
    at, offsets, lengths, begin = flat_boxes(shape, start, stop)
    return Regions(
        tensor=np.array(rows, np.int64)[at],
        offsets=offsets,
        lengths=lengths,
        local_start=begin - start[at],
        local_shape=lengths,
    )
