"""Matches the pieces of a driver's read to the reads of a plan.

Each is verified and delivered while it is still in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ...errors import StorageError
from ...planner.loading import LoadPlan

__all__ = ["PieceDelivery", "are_pieces", "connected_reads"]


def are_pieces(plan: LoadPlan, piece_nbytes: int) -> bool:
    """Return whether each read of ``plan`` lies within one piece of the driver."""
    if not piece_nbytes:
        return False
    return bool((plan.start // piece_nbytes == (plan.stop - 1) // piece_nbytes).all())


def connected_reads(plan: LoadPlan, chunk_nbytes: int) -> Iterator[range]:
    """Yield runs of reads in one chunk that are adjacent to each other."""
    images = plan.image.tolist()
    starts = plan.start.tolist()
    stops = plan.stop.tolist()
    first = 0
    for number in range(1, len(starts) + 1):
        is_connected = (
            number < len(starts)
            and images[number] == images[first]
            and starts[number] == stops[number - 1]
            and starts[number] % chunk_nbytes != 0
        )
        if not is_connected:
            yield range(first, number)
            first = number


class PieceDelivery:
    """Calls ``deliver`` with each read's number and its piece, in order.

    ``numbers`` are the expected reads; ``sizes`` the bytes of each read of the plan.
    """

    def __init__(
        self, numbers: range, sizes: Sequence[int], deliver: Callable[[int, memoryview], None]
    ) -> None:
        self._numbers = numbers
        self._sizes = sizes
        self._deliver = deliver
        self._taken = 0
        self._error: Exception | None = None

    def take(self, piece: memoryview) -> None:
        """Deliver a piece; see :data:`TakePiece`. Does nothing after an error."""
        if self._error is not None:
            return
        try:
            self._deliver(self._next(len(piece)), piece)
        except Exception as error:
            self._error = error

    def finish(self) -> None:
        """Raise the error of ``deliver``, if any; StorageError if the driver's pieces violate
        its traits."""
        if self._error is not None:
            raise self._error
        if self._taken < len(self._numbers):
            raise _wrong_piece(self._taken, 0, self._sizes[self._numbers[self._taken]])

    def _next(self, nbytes: int) -> int:
        """Return the read that a piece of ``nbytes`` fulfils. A wrong piece would look like a
        damaged file."""
        due_nbytes = 0
        if self._taken < len(self._numbers):
            due_nbytes = self._sizes[self._numbers[self._taken]]
        if nbytes != due_nbytes:
            raise _wrong_piece(self._taken, nbytes, due_nbytes)
        self._taken += 1
        return self._numbers[self._taken - 1]


def _wrong_piece(position: int, nbytes: int, due_nbytes: int) -> StorageError:
    return StorageError(
        f"piece {position} of a read has {nbytes:,} bytes instead of {due_nbytes:,}",
        advice="The driver breaks its contract; its conformance kit shows how.",
    )
