"""Boxes: n-dimensional hyper-rectangles of a tensor, and flat ranges of them.

Offsets and lengths are in elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.units import ceil_div


@dataclass(frozen=True, slots=True)
class Box:
    """The elements ``offsets[d] <= index[d] < offsets[d] + lengths[d]``.

    ``str(box)`` reads ``[0:128,0:4096]``. Raises ValueError if offsets and lengths differ in
    number, or a length is negative.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.lengths):
            raise ValueError(
                f"{len(self.offsets)} offsets and {len(self.lengths)} lengths do not make a box"
            )
        if any(length < 0 for length in self.lengths):
            raise ValueError(f"a box cannot have the lengths {self.lengths}")

    @property
    def ndim(self) -> int:
        return len(self.lengths)

    @property
    def volume(self) -> int:
        """Number of elements; 1 for a zero-dimensional box."""
        return math.prod(self.lengths)

    @property
    def stops(self) -> tuple[int, ...]:
        """First index past the box, per dimension."""
        return tuple(
            offset + length for offset, length in zip(self.offsets, self.lengths, strict=True)
        )

    def shifted(self, by: Sequence[int]) -> Box:
        """Return the box moved by ``by[d]`` elements along each dimension d."""
        return Box(
            tuple(offset + step for offset, step in zip(self.offsets, by, strict=True)),
            self.lengths,
        )

    def __str__(self) -> str:
        return (
            "[" + ",".join(f"{a}:{b}" for a, b in zip(self.offsets, self.stops, strict=True)) + "]"
        )


def intersect(a: Box, b: Box) -> Box | None:
    """Return the elements in both boxes, or None.

    Raises ValueError if the boxes differ in their number of dimensions.
    """
    offsets = tuple(map(max, a.offsets, b.offsets))
    lengths = tuple(
        min(pair) - offset for offset, *pair in zip(offsets, a.stops, b.stops, strict=True)
    )
    if any(length <= 0 for length in lengths):
        return None
    return Box(offsets, lengths)


def row_strides(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the row-major strides, in elements, of an array of shape ``lengths``."""
    strides = [1] * len(lengths)
    for dim in range(len(lengths) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * lengths[dim]
    return tuple(strides)


def flat_to_boxes(lengths: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return elements [start, stop) of an array in row-major order, as disjoint boxes in that
    order.

    ``lengths`` is the shape of the array. There are at most ``max(1, 2 * ndim - 1)`` boxes, and
    none for an empty range. Raises ValueError if the range does not lie within the array.
    """
    volume = math.prod(lengths)
    if not 0 <= start <= stop <= volume:
        raise ValueError(
            f"elements {start} to {stop} are not a range of an array of shape {tuple(lengths)}"
        )
    if start == stop:
        return []
    return _boxes((), tuple(lengths), start, stop) if lengths else [Box((), ())]


def _boxes(prefix: tuple[int, ...], lengths: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Return the boxes of a non-empty range of the array at index ``prefix`` of the whole one."""
    row = math.prod(lengths[1:])
    # The rows from head to tail are whole.
    head = ceil_div(start, row)
    tail = stop // row
    if head > tail:
        return _boxes((*prefix, tail), lengths[1:], start - tail * row, stop - tail * row)
    boxes: list[Box] = []
    if start < head * row:
        boxes += _boxes((*prefix, head - 1), lengths[1:], start - (head - 1) * row, row)
    if head < tail:
        offsets = (*prefix, head, *(0 for _ in lengths[1:]))
        boxes.append(Box(offsets, (*(1 for _ in prefix), tail - head, *lengths[1:])))
    if tail * row < stop:
        boxes += _boxes((*prefix, tail), lengths[1:], 0, stop - tail * row)
    return boxes
