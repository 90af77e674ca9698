"""Cuts a sequence of items into windows of bounded size, to process a checkpoint in bounded
memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slice:
    """Bytes [start, stop) of item number ``item``, at byte ``at`` of the window."""

    item: int
    start: int
    stop: int
    at: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Bytes [start, stop) of the sequence, and the slices that make them up.

    Compared by identity, because there may be thousands of slices.
    """

    start: int
    stop: int
    slices: tuple[Slice, ...]

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def windows(sizes: Sequence[int], window_nbytes: int, first: int = 0) -> Iterator[Window]:
    """Yield the windows of a sequence of items of ``sizes`` bytes.

    The first item begins at byte ``first``. Windows are cut at multiples of ``window_nbytes``. An
    item without bytes is in no window. If items are in descending order of their alignment, a power
    of two, and ``first`` and ``window_nbytes`` are multiples of the largest alignment, each item
    begins and is cut at multiples of its own.
    """
    begin = first
    position = first
    slices: list[Slice] = []
    for item, nbytes in enumerate(sizes):
        done = 0
        while done < nbytes:
            limit = (position // window_nbytes + 1) * window_nbytes
            take = min(nbytes - done, limit - position)
            slices.append(Slice(item, done, done + take, position - begin))
            done += take
            position += take
            if position == limit:
                yield Window(begin, position, tuple(slices))
                begin = position
                slices = []
    if slices:
        yield Window(begin, position, tuple(slices))
