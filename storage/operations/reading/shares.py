"""Slices of stored tensors, indexed as in numpy; and iteration over all tensors of a checkpoint,
whole or one share of each, with bounded read-ahead. Shares are for programs with their own model
layout, such as inference servers."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from ....core.units import ceil_div, in_groups
from ....errors import UsageError
from ....planner.box import Box
from ....planner.layout import box_layout
from ....planner.table import TensorTable
from ...format.part import Selection
from ...runtime.engine import start
from ...state.dtypes import dtype_of, empty
from ...state.filling.targets import Wanted
from .selection import chosen, first_match, renamed

Split = Mapping[str, int] | Callable[[str, tuple[int, ...]], int | None]
"""The dimension along which tensors are divided: name patterns, the first match applies; or a
function of name and shape. Tensors without a match, or with None, are not divided."""

Skip = Callable[[str], bool]
"""Returns whether to leave out the tensor of that name."""

Fill = Callable[[Wanted], Coroutine[object, None, None]]
"""Reads everything wanted into its tensors."""


@dataclass(frozen=True, slots=True)
class Window:
    """The box that an index needs (``offsets``, ``lengths``), and the selection from it
    (``within``, ``flips``)."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    within: tuple[slice | int, ...]
    flips: tuple[int, ...]

    def add_to(self, wanted: Wanted, row: int, tensors: TensorTable) -> torch.Tensor:
        """Add this window of the tensor in ``row`` to ``wanted``; return the tensor to fill."""
        made = empty(
            self.lengths, dtype_of(*tensors.dtypes[tensors.dtype[row]]), tensors.names[row]
        )
        layout = box_layout(tensors.shape_of(row), Box(self.offsets, self.lengths))
        wanted.add_held(row, made, layout)
        return made

    def view(self, made: torch.Tensor) -> torch.Tensor:
        """Return the selected elements of the filled box."""
        if self.flips:
            made = made.flip(self.flips)
        return made[self.within]


def window(shape: tuple[int, ...], index: slice | int | tuple[slice | int, ...] | None) -> Window:
    """Return the window of ``index`` in a tensor of ``shape``. Raises UsageError."""
    if index is None:
        index = ()
    indices = index if isinstance(index, tuple) else (index,)
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
    """Return start and length to read in one dimension, the selection, and if it is reversed."""
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


@dataclass(frozen=True, slots=True)
class Share:
    """The part to read of the tensor in a row, for all of its ``names``: tied ones share it."""

    names: list[str]
    row: int
    window: Window
    nbytes: int


def shares_of(
    tensors: TensorTable, new_names: Mapping[str, str], rank: int, world: int, split: Split
) -> list[Share]:
    """Return the share of ``rank`` in each tensor, under its new name. Raises UsageError."""
    if not 0 <= rank < world:
        raise UsageError(f"rank {rank} is not one of {world}")
    found: dict[object, Share] = {}
    for name, new_name in new_names.items():
        rows = tensors.rows[name]
        if tensors.owner[rows[0]] >= 0:
            raise UsageError(
                f"tensor {name!r} differs between the ranks that saved it",
                advice="Leave it out (only), or read it with Checkpoint.read.",
            )
        row = tensors.stored_row(rows[0])
        shape = tensors.shape_of(row)
        seen = window(shape, _index(new_name, shape, rank, world, split))
        nbytes = math.prod(seen.lengths) * int(tensors.itemsize[row])
        place = (row, seen.offsets, seen.lengths)
        found.setdefault(place, Share([], row, seen, nbytes)).names.append(new_name)
    return list(found.values())


def selected(
    tensors: TensorTable, only: Selection, rename: Mapping[str, str], skip: Skip | None
) -> dict[str, str]:
    """Return the new names of the tensors to read, by stored name. Raises UsageError."""
    new_names = renamed(chosen(tensors.rows, only), rename)
    if skip is None:
        return new_names
    return {name: new_name for name, new_name in new_names.items() if not skip(new_name)}


def _index(
    name: str, shape: tuple[int, ...], rank: int, world: int, split: Split
) -> tuple[slice, ...]:
    """Return the index of a share, divided like ``torch.chunk``."""
    dim = split(name, shape) if callable(split) else first_match(split, name)
    if dim is None:
        return ()
    if not -len(shape) <= dim < len(shape):
        raise UsageError(f"tensor {name!r} of shape {list(shape)} has no dimension {dim}")
    dim %= len(shape)
    length = ceil_div(shape[dim], world)
    begin = min(rank * length, shape[dim])
    return (*(slice(None) for _ in range(dim)), slice(begin, min(begin + length, shape[dim])))


def read_in_groups(
    tensors: TensorTable,
    shares: Iterable[Share],
    fill: Fill,
    group_nbytes: int,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield shares by name, in order, reading the next group while the current one is used."""
    ahead: _Group | None = None
    try:
        for group in in_groups(shares, lambda share: share.nbytes, group_nbytes):
            before = ahead
            ahead = _Group(tensors, group, fill)
            if before is not None:
                yield from before.tensors()
        if ahead is not None:
            yield from ahead.tensors()
    finally:
        if ahead is not None:
            ahead.reading.cancel()


class _Group:
    """Shares being read."""

    def __init__(self, tensors: TensorTable, shares: Sequence[Share], fill: Fill) -> None:
        wanted = Wanted()
        self._made = [(share, share.window.add_to(wanted, share.row, tensors)) for share in shares]
        self.reading: Future[None] = start(fill(wanted))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.reading.result()
        made = self._made[::-1]
        self._made = []
        while made:
            share, tensor = made.pop()
            for name in share.names:
                yield name, share.window.view(tensor)
