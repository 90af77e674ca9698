"""The pieces of a read: where they end, and how what arrives is joined into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

__all__ = ["PieceJoiner", "Rooms", "cut", "piece_ends"]


def piece_ends(start: int, nbytes: int, piece_nbytes: int) -> list[int]:
    """Where the pieces of a range of an object meet, with both ends of the range; the range is one
    piece if ``piece_nbytes`` is 0."""
    stop = start + nbytes
    if not piece_nbytes:
        return [start, stop]
    first = (start // piece_nbytes + 1) * piece_nbytes
    return [start, *range(first, stop, piece_nbytes), stop]


def cut(data: memoryview, start: int, piece_nbytes: int) -> Iterator[memoryview]:
    """The pieces of ``data``, which lies at ``start`` of an object, in order."""
    for begin, end in pairwise(piece_ends(start, len(data), piece_nbytes)):
        yield data[begin - start : end - start]


class Rooms:
    """Memory for a piece each, which joiners use one after the other: fresh memory costs a page
    fault per page. Thread-safe."""

    def __init__(self, piece_nbytes: int) -> None:
        self._piece_nbytes = piece_nbytes
        self._free: list[bytearray] = []

    @contextmanager
    def room(self) -> Iterator[bytearray]:
        """Nobody else uses this memory until the end of the body."""
        try:
            room = self._free.pop()
        except IndexError:
            room = bytearray(self._piece_nbytes)
        try:
            yield room
        finally:
            self._free.append(room)


class PieceJoiner:
    """Joins what arrives of a range into pieces, and passes each to ``take`` when it is whole.

    ``reached`` is the end of the last piece that was taken, or the start of the range.
    """

    def __init__(
        self,
        start: int,
        nbytes: int,
        piece_nbytes: int,
        take: Callable[[memoryview], None],
        room: bytearray,
    ) -> None:
        """``room``: memory to join in, of a piece at least."""
        self.reached = start
        self._stop = start + nbytes
        self._piece_nbytes = piece_nbytes
        self._take = take
        self._joined = memoryview(room)
        self._filled_nbytes = 0

    @property
    def left_nbytes(self) -> int:
        """How many bytes of the range have not been taken."""
        return self._stop - self.reached

    def restart(self) -> None:
        """What arrives next begins at ``reached``: drop what was not taken."""
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
