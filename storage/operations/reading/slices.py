"""Numpy-style indexing of a stored tensor: integers, slices with steps, omitted dimensions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....errors import UsageError
from ....planner.box import Box
from ....planner.layout import BoxLayout
from ....planner.table import TensorTable
from ...state.dtypes import dtype_of, empty
from ...state.filling.targets import Wanted

__all__ = ["Window", "window"]


@dataclass(frozen=True, slots=True)
class Window:
    """The box that an index needs (``offsets``, ``lengths``), and the selection from it
    (``within``, ``flips``)."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    within: tuple[slice | int, ...]
    flips: tuple[int, ...]

    def add_to(self, wanted: Wanted, row: int, tensors: TensorTable) -> torch.Tensor:
        """Add this window of the tensor in ``row`` to ``wanted``; return the tensor to be
        filled."""
        made = empty(
            self.lengths, dtype_of(*tensors.dtypes[tensors.dtype[row]]), tensors.names[row]
        )
        layout = BoxLayout(tensors.shape_of(row), Box(self.offsets, self.lengths))
        wanted.add_held(row, made, layout)
        return made

    def view(self, made: torch.Tensor) -> torch.Tensor:
        """Return the selected elements of the filled box."""
        if self.flips:
            made = made.flip(self.flips)
        return made[self.within]


def window(shape: tuple[int, ...], index: slice | int | tuple[slice | int, ...] | None) -> Window:
    """Return the window of ``index`` in a tensor of ``shape``. Raises UsageError if it does not
    fit."""
    if index is None:
        index = ()
    if isinstance(index, tuple):
        indices = index
    else:
        indices = (index,)
    if len(indices) > len(shape):
        raise UsageError(f"{len(indices)} indices for a tensor of {len(shape)} dimensions")
    whole = (slice(None),) * (len(shape) - len(indices))
    offsets = []
    lengths = []
    within = []
    flips = []
    for dim, (part, size) in enumerate(zip((*indices, *whole), shape, strict=True)):
        start, length, inner, flip = _one(part, size, dim)
        offsets.append(start)
        lengths.append(length)
        within.append(inner)
        if flip:
            flips.append(dim)
    return Window(tuple(offsets), tuple(lengths), tuple(within), tuple(flips))


def _one(index: slice | int, size: int, dim: int) -> tuple[int, int, slice | int, bool]:
    """Return start and length to read in one dimension, the selection from it, and whether it is
    reversed."""
    if isinstance(index, slice):
        picked = range(*index.indices(size))
        if not picked:
            return 0, 0, slice(None), False
        low = min(picked[0], picked[-1])
        high = max(picked[0], picked[-1])
        return low, high + 1 - low, slice(None, None, abs(picked.step)), picked.step < 0
    if isinstance(index, bool) or not isinstance(index, int):
        raise UsageError(f"index {index!r} of dimension {dim} is neither an integer nor a slice")
    if not -size <= index < size:
        raise UsageError(f"index {index} is out of bounds for dimension {dim} of size {size}")
    return index % size, 1, 0, False
