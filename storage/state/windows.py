"""Boxes in local tensors: turns the planner's place of a piece into a tensor view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...planner.box import row_strides

__all__ = ["Place"]


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a piece in a local tensor.

    ``start`` and ``within`` are the piece's ``local_start`` and ``local_shape``, see
    :class:`~holdfast.planner.layout.Piece`.
    """

    start: int
    within: tuple[int, ...]

    def window(
        self, local: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]
    ) -> torch.Tensor:
        """Return a view of the box at ``offsets`` in the piece."""
        if tuple(local.shape) == self.within:
            strides: Sequence[int] = local.stride()
            first = _dot(self._offsets(), strides)
        else:  # 1-d: elements in order, at any stride
            step = local.stride(0)
            strides = [stride * step for stride in row_strides(self.within)]
            first = self.start * step
        at = local.storage_offset() + first + _dot(offsets, strides)
        return local.as_strided(tuple(lengths), tuple(strides), at)

    def element(self, offsets: Sequence[int]) -> int:
        """Return an element's index in the row-major order of the local tensor."""
        return self.start + _dot(offsets, row_strides(self.within))

    def _offsets(self) -> list[int]:
        """Return the piece's first element as indices of the local tensor."""
        offsets = []
        rest = self.start
        for stride in row_strides(self.within):
            offset, rest = divmod(rest, stride)
            offsets.append(offset)
        return offsets


def _dot(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))
