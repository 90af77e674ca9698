"""How long has nothing moved at the ranks that are waited for?

A heartbeat alone says little: a rank may beat while its storage stands still, or while it is in
another call. So each rank shows for how long it has been idle: since it last copied, hashed, read
or wrote something. A rank that itself waits shows how long the rank it waits for has been idle, so
that nobody is blamed for another's silence, and ranks that wait for each other in a circle grow
older together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...errors import DeadlineError
from .calls import Board, Shown

__all__ = ["Attendance", "Watch"]

SHOWN_AT_MOST = 10


class Attendance:
    """One rank in one call: what it shows of it on its board. ``worked`` may be called from any
    thread."""

    def __init__(self, name: str, text: str, thread: str, number: int, now_s: float) -> None:
        self.name, self.text, self.thread, self.number = name, text, thread, number
        self.met = False
        self.moved = 0
        """Grows with everything that moves."""
        self._seen = 0
        self._moved_s = now_s
        self._awaits: tuple[int, str, float, float] | None = (
            None  # rank, what, how idle it was, when
        )

    def worked(self) -> None:
        """Something has moved."""
        self.moved += 1

    def waits(self, rank: int, what: str, idle_s: float, now_s: float) -> None:
        """It waits for ``rank``, which has been idle for so long."""
        self._awaits = (rank, what, idle_s, now_s)

    def waited(self) -> None:
        """What was waited for has come: that is progress, too."""
        self._awaits = None
        self.moved += 1

    def shown(self, now_s: float) -> Shown:
        """As it is now."""
        if self.moved != self._seen:
            self._seen = self.moved
            self._moved_s = now_s
        idle_s = now_s - self._moved_s
        rank, what = -1, ""
        if self._awaits is not None:
            rank, what, awaited_s, at_s = self._awaits
            idle_s = min(idle_s, awaited_s + now_s - at_s)
        return Shown(
            self.name, self.number, self.text, self.thread, self.met, round(idle_s, 3), rank, what
        )


class Watch:
    """Of the ranks that one rank waits for, in the call of that ``name``."""

    def __init__(self, rank: int, name: str, text: str, silence_s: float) -> None:
        self._rank, self._name, self._text, self._silence_s = rank, name, text, silence_s
        self._last: dict[
            int, tuple[object, float, float]
        ] = {}  # what was seen, how idle that was, when

    def look(
        self, boards: Mapping[int, Board | None], what: str, now_s: float
    ) -> tuple[int, float]:
        """The rank that has been idle for longest, and for how long. Raises DeadlineError where
        that is too long."""
        idle = {rank: self._idle_s(rank, board, now_s) for rank, board in boards.items()}
        stuck = [rank for rank, idle_s in idle.items() if idle_s > self._silence_s]
        if stuck:
            raise self._too_long(stuck, boards, what, now_s)
        last = max(idle, key=lambda rank: idle[rank])
        return last, idle[last]

    def _idle_s(self, rank: int, board: Board | None, now_s: float) -> float:
        shown = None if board is None else board.shown(self._name)
        sign = (board.nonce, board.beats) if board is not None and shown is not None else None
        known = self._last.get(rank)
        if known is None or known[0] != sign:
            known = self._last[rank] = (sign, shown.idle_s if shown else 0.0, now_s)
        return known[1] + now_s - known[2]

    def _too_long(
        self, stuck: Sequence[int], boards: Mapping[int, Board | None], what: str, now_s: float
    ) -> DeadlineError:
        first = stuck[0]
        board = boards[first]
        shown = None if board is None else board.shown(self._name)
        names = ", ".join(map(str, stuck[:SHOWN_AT_MOST]))
        names += f" and {len(stuck) - SHOWN_AT_MOST} more" if len(stuck) > SHOWN_AT_MOST else ""
        waiting = f"waiting for {what}"
        if self._text:
            waiting += f" of the {self._text}"
        if shown is None:
            elsewhere = f"; it is in the {board.open[0].text}" if board and board.open else ""
            told = (
                f"rank {names} showed no sign of life for {self._silence_s:g} s, "
                f"{waiting}{elsewhere}"
            )
            advice = "Look at that rank's log; it died, hangs, or never called the same function."
        elif now_s - self._last[first][2] > self._silence_s / 2:
            told = f"rank {names} showed no sign of life for {self._silence_s:g} s, {waiting}"
            advice = "Look at that rank's log; it died, or hangs."
        elif shown.waits_for not in (-1, self._rank):
            told = f"rank {shown.waits_for} is what rank {names} waits for ({shown.what}), "
            told += f"where nothing has moved for {self._silence_s:g} s, {waiting}"
            first = shown.waits_for
            advice = "Look at that rank's log; it died, or hangs."
        else:
            told = (
                f"rank {names} lives, but nothing has moved there for {self._silence_s:g} s, "
                f"{waiting}"
            )
            advice = "Look at that rank's log, and at its way to the storage."
        return DeadlineError(told, rank=first, advice=advice)
