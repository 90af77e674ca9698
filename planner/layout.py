"""Layouts: which boxes of a tensor one rank holds, and where these lie in the rank's own memory.

Whatever cuts tensors up, a device mesh, a flat buffer or a framework's own scheme, is described to
the planner by this protocol alone. Scope: one rank and one tensor. What follows from a mesh and its
placements is worked out in :mod:`.placement`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .box import Box

__all__ = ["Layout", "LocalLayout", "MeshLayout", "Piece", "local_layout"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the global tensor, and the offsets in the rank's local tensor at which it lies."""

    box: Box
    local_offsets: tuple[int, ...]


class Layout(Protocol):
    """What one rank holds of one tensor. Hashable; equal for tensors that are laid out alike."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of this rank's local tensor, in which the pieces lie."""

    @property
    def pieces(self) -> Sequence[Piece]:
        """The boxes with elements that this rank holds, disjoint, in the row-major order of its local tensor."""

    @property
    def holders(self) -> tuple[int, ...] | None:
        """The ranks, ascending, that hold the very same; None where the layout does not say. Then
        the ranks compare what they hold under one name."""

    @property
    def ranks(self) -> int:
        """Over how many ranks the tensor is laid out. Ranks beyond these may hold it, too."""


@dataclass(frozen=True, slots=True)
class LocalLayout:
    """All of a plain tensor, which says nothing of other ranks."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        origin = (0,) * len(self.shape)
        pieces = () if 0 in self.shape else (Piece(Box(origin, self.shape), origin),)
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


local_layout = functools.lru_cache(maxsize=4096)(LocalLayout)
"""The layout of a plain tensor, made once per shape: layers repeat."""


@dataclass(frozen=True, slots=True)
class MeshLayout:
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
