"""Splitting a read into pieces, and joining received data into pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise


def piece_ends(start: int, nbytes: int, piece_nbytes: int) -> list[int]:
    """Return the piece boundaries of a range, including both ends of the range. The range is one
    piece if ``piece_nbytes`` is 0."""
    stop = start + nbytes
    if not piece_nbytes:
        return [start, stop]
    first = (start // piece_nbytes + 1) * piece_nbytes
    return [start, *range(first, stop, piece_nbytes), stop]


def cut(data: memoryview, start: int, piece_nbytes: int) -> Iterator[memoryview]:
    """Yield the pieces of ``data``, which starts at offset ``start`` of an object, in order."""
    for begin, end in pairwise(piece_ends(start, len(data), piece_nbytes)):
        yield data[begin - start : end - start]


class Rooms:
    """Thread-safe pool of piece-sized buffers. Reusing them avoids a page fault for each page of
    fresh memory."""

    def __init__(self, piece_nbytes: int) -> None:
        self._piece_nbytes = piece_nbytes
        self._free: list[bytearray] = []

    @contextmanager
    def room(self) -> Iterator[bytearray]:
        """Lend a buffer for the duration of the ``with`` body."""
        try:
            room = self._free.pop()
        except IndexError:
            room = bytearray(self._piece_nbytes)
        try:
            yield room
        finally:
            self._free.append(room)


class PieceJoiner:
    """Joins received data into pieces and passes each whole piece to ``take``.

    ``reached`` is the end of the last piece taken, or the start of the range.
    """

    def __init__(
        self,
        start: int,
        nbytes: int,
        piece_nbytes: int,
        take: Callable[[memoryview], None],
        room: bytearray,
    ) -> None:
        """Start at ``start``. ``room`` is scratch memory for at least one piece."""
        self.reached = start
        self._stop = start + nbytes
        self._piece_nbytes = piece_nbytes
        self._take = take
        self._joined = memoryview(room)
        self._filled_nbytes = 0

    @property
    def left_nbytes(self) -> int:
        """Number of bytes of the range that are not yet taken."""
        return self._stop - self.reached

    def restart(self) -> None:
        """Drop a partial piece. The next data must start at ``reached``."""
        self._filled_nbytes = 0

    def add(self, arrived: memoryview) -> None:
        """Add the next bytes of the range."""
        while len(arrived):
            filled = self._filled_nbytes
            multiple = (self.reached // self._piece_nbytes + 1) * self._piece_nbytes
            size = min(multiple, self._stop) - self.reached
            part = arrived[: size - filled]
            self._joined[filled : filled + len(part)] = part
            arrived = arrived[len(part) :]
            self._filled_nbytes += len(part)
            if self._filled_nbytes == size:
                self._take(self._joined[:size])
                self.reached += size
                self._filled_nbytes = 0
