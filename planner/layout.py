"""Layouts: which part of a tensor one rank holds, and where that lies in the rank's own memory.

Whatever cuts tensors up, a device mesh, a flat buffer or a framework's own scheme, is described to
the planner by this protocol alone: as boxes, or as a flat range. Scope: one rank and one tensor.
What follows from a mesh and its placements is worked out in :mod:`.placement`; many layouts at once
become columns in :mod:`.regions`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .box import Box, flat_to_boxes, row_strides

__all__ = [
    "BoxLayout",
    "FlatLayout",
    "Layout",
    "LocalLayout",
    "MeshLayout",
    "Piece",
    "local_layout",
]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the global tensor, and where it lies in the rank's local tensor.

    It begins at element ``local_start`` of the local tensor in row-major order, and its rows are as
    far apart as those of an array of ``local_shape``. That is the shape of the local tensor, or,
    where this is 1-d and holds a flat range, the shape of the box.
    """

    box: Box
    local_start: int
    local_shape: tuple[int, ...]

    @classmethod
    def at(cls, box: Box, local_offsets: Sequence[int], local_shape: Sequence[int]) -> Piece:
        """A box that lies at ``local_offsets`` in a local tensor with as many dimensions."""
        steps = zip(local_offsets, row_strides(local_shape), strict=True)
        return cls(box, sum(offset * stride for offset, stride in steps), tuple(local_shape))


class Layout(Protocol):
    """What one rank holds of one tensor. Hashable; equal for tensors that are laid out alike."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of this rank's local tensor, in which the pieces lie."""

    @property
    def flat_range(self) -> tuple[int, int] | None:
        """(start, stop), where the local tensor is 1-d and holds these elements of the row-major
        order of the whole tensor; None where it holds boxes."""

    @property
    def pieces(self) -> Sequence[Piece]:
        """The boxes with elements that this rank holds, disjoint, in the row-major order of its
        local tensor. Of flat ranges, :mod:`.regions` makes all boxes at once, which is faster."""

    @property
    def is_empty(self) -> bool:
        """Whether this rank holds no element."""

    @property
    def region(self) -> str:
        """Names the elements that this rank holds, such as ``[0:4,0:8]``. Layouts of one kind that
        hold the same elements have the same text."""

    @property
    def holders(self) -> tuple[int, ...] | None:
        """The ranks, ascending, that hold the very same: () where a rank knows of none but itself.
        None where a tensor is held whole, and the layout says nothing of other ranks: they may hold
        another one under its name."""

    @property
    def ranks(self) -> int:
        """Over how many ranks the tensor is laid out. Ranks beyond these may hold it, too."""


class _Boxes:
    """What layouts that consist of boxes have in common."""

    __slots__ = ()
    pieces: Sequence[Piece]

    @property
    def flat_range(self) -> None:
        """None: boxes."""
        return

    @property
    def is_empty(self) -> bool:
        """Whether there is no box."""
        return not self.pieces

    @property
    def region(self) -> str:
        """The boxes."""
        return "".join(str(piece.box) for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class LocalLayout(_Boxes):
    """All of a plain tensor, which says nothing of other ranks."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        pieces = () if 0 in self.shape else (_whole(self.shape),)
        object.__setattr__(self, "pieces", pieces)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """That of the tensor."""
        return self.shape

    @property
    def holders(self) -> None:
        """Not known."""

    @property
    def ranks(self) -> int:
        """This one."""
        return 1


def _whole(shape: tuple[int, ...]) -> Piece:
    return Piece(Box((0,) * len(shape), shape), 0, shape)


local_layout = functools.lru_cache(maxsize=4096)(LocalLayout)
"""The layout of a plain tensor, made once per shape: layers repeat."""


@dataclass(frozen=True, slots=True)
class MeshLayout(_Boxes):
    """What a rank holds of a tensor that lies on a device mesh of so many ranks."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    local_shape: tuple[int, ...]
    holders: tuple[int, ...]
    ranks: int
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Computed once, and not of the holders, of which there may be thousands.
        object.__setattr__(self, "_hash", hash((self.shape, self.pieces, self.ranks)))

    def __hash__(self) -> int:
        return self._hash


class _Alone:
    """What layouts have in common that know of no other rank."""

    __slots__ = ()

    @property
    def holders(self) -> tuple[int, ...]:
        """None known but the rank itself."""
        return ()

    @property
    def ranks(self) -> int:
        """This one."""
        return 1


@dataclass(frozen=True, slots=True)
class BoxLayout(_Alone, _Boxes):
    """One box of a tensor, which is all of the local tensor."""

    shape: tuple[int, ...]
    box: Box

    @property
    def local_shape(self) -> tuple[int, ...]:
        """That of the box."""
        return self.box.lengths

    @property
    def pieces(self) -> tuple[Piece, ...]:  # type: ignore[override]
        """The box, if it has elements."""
        return (Piece(self.box, 0, self.box.lengths),) if self.box.volume else ()


@dataclass(frozen=True, slots=True)
class FlatLayout(_Alone):
    """Elements [start, stop) of the row-major order of a tensor, in a local tensor of one
    dimension."""

    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def local_shape(self) -> tuple[int]:
        """As many elements as the range has."""
        return (self.stop - self.start,)

    @property
    def flat_range(self) -> tuple[int, int]:
        """The range."""
        return self.start, self.stop

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The boxes that the range consists of, one behind the other."""
        boxes = flat_to_boxes(self.shape, self.start, self.stop)
        starts = itertools.accumulate((box.volume for box in boxes), initial=0)
        return tuple(
            Piece(box, start, box.lengths) for box, start in zip(boxes, starts, strict=False)
        )

    @property
    def is_empty(self) -> bool:
        """Whether the range has no element."""
        return self.start == self.stop

    @property
    def region(self) -> str:
        """Such as ``[flat 10:25]``."""
        return f"[flat {self.start}:{self.stop}]"
