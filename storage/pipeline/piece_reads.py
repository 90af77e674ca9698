"""Reads of a plan that arrive as the pieces of one read of the driver: each is verified and
delivered while the processor's cache holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ...planner.loading import LoadPlan

__all__ = ["PieceDelivery", "are_pieces", "connected_reads"]


def are_pieces(plan: LoadPlan, piece_nbytes: int) -> bool:
    """Whether each read of ``plan`` lies within a piece of a driver with this trait."""
    if not piece_nbytes:
        return False
    return bool((plan.start // piece_nbytes == (plan.stop - 1) // piece_nbytes).all())


def connected_reads(plan: LoadPlan, chunk_nbytes: int) -> Iterator[range]:
    """Numbers of the reads of one chunk that begin where the one before ends."""
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
    """Calls ``deliver`` with the number of each read and the piece that it is, in order."""

    def __init__(self, numbers: range, deliver: Callable[[int, memoryview], None]) -> None:
        self._numbers = iter(numbers)
        self._deliver = deliver
        self._error: Exception | None = None

    def take(self, piece: memoryview) -> None:
        """See :data:`TakePiece`. After an error of ``deliver`` this does nothing."""
        if self._error is not None:
            return
        try:
            self._deliver(next(self._numbers), piece)
        except Exception as error:
            self._error = error

    def finish(self) -> None:
        """Raise the error of ``deliver``, if there was one."""
        if self._error is not None:
            raise self._error
