"""Idle times: how long the ranks being waited for have made no progress.

A heartbeat alone proves little: a rank may send heartbeats while its storage hangs, or while it is
in another call. So each rank publishes how long it has been idle: the time since it last copied,
hashed, read or wrote something. A rank that is waiting publishes the idle time of the rank it waits
for. So no rank is blamed for the silence of another, and ranks that wait for each other in a circle
all reach the deadline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...errors import DeadlineError
from .calls import OpenCall, RankStatus

SHOWN_AT_MOST = 10


class Participation:
    """One rank in one call, as in its status record. Progress is reported from any thread."""

    def __init__(self, name: str, text: str, thread: str, number: int, now_s: float) -> None:
        self.name = name
        self.text = text
        self.thread = thread
        self.number = number
        self.taken = False
        self.progress = 0
        """A counter of progress events."""
        self._seen = 0
        self._moved_s = now_s
        # The rank, what it is waited for, its idle time, and when that was observed.
        self._awaits: tuple[int, str, float, float] | None = None

    def report_progress(self) -> None:
        """Count one progress event."""
        self.progress += 1

    def waits_for_rank(self, rank: int, what: str, idle_s: float, now_s: float) -> None:
        """Record that this rank waits for ``rank``, which has been idle for ``idle_s``."""
        self._awaits = (rank, what, idle_s, now_s)

    def wait_ended(self) -> None:
        """Record that the wait has ended, which is progress too."""
        self._awaits = None
        self.progress += 1

    def open_call(self, now_s: float) -> OpenCall:
        """Return the entry for the status record."""
        if self.progress != self._seen:
            self._seen = self.progress
            self._moved_s = now_s
        idle_s = now_s - self._moved_s
        rank = -1
        what = ""
        if self._awaits is not None:
            rank, what, awaited_s, at_s = self._awaits
            idle_s = min(idle_s, awaited_s + now_s - at_s)
        return OpenCall(
            self.name, self.number, self.text, self.thread, self.taken, round(idle_s, 3), rank, what
        )


class Watch:
    """The idle times of the ranks that one rank waits for, in the call of this ``name``."""

    def __init__(self, rank: int, name: str, text: str, silence_s: float) -> None:
        self._rank = rank
        self._name = name
        self._text = text
        self._silence_s = silence_s
        # By rank: last sign, idle time at that point, when observed.
        self._last: dict[int, tuple[object, float, float]] = {}

    def look(
        self, statuses: Mapping[int, RankStatus | None], what: str, now_s: float
    ) -> tuple[int, float]:
        """Return the rank that has been idle longest, and how long. Raises DeadlineError."""
        idle = {rank: self._idle_s(rank, status, now_s) for rank, status in statuses.items()}
        stuck = [rank for rank, idle_s in idle.items() if idle_s > self._silence_s]
        if stuck:
            raise self._too_long(stuck, statuses, what, now_s)
        last = max(idle, key=lambda rank: idle[rank])
        return last, idle[last]

    def _idle_s(self, rank: int, status: RankStatus | None, now_s: float) -> float:
        open_call = None if status is None else status.open_call(self._name)
        sign = (status.nonce, status.heartbeats) if status and open_call else None
        known = self._last.get(rank)
        if known is None or known[0] != sign:
            known = self._last[rank] = (sign, open_call.idle_s if open_call else 0.0, now_s)
        return known[1] + now_s - known[2]

    def _too_long(
        self,
        stuck: Sequence[int],
        statuses: Mapping[int, RankStatus | None],
        what: str,
        now_s: float,
    ) -> DeadlineError:
        first = stuck[0]
        status = statuses[first]
        open_call = None if status is None else status.open_call(self._name)
        names = ", ".join(map(str, stuck[:SHOWN_AT_MOST]))
        names += f" and {len(stuck) - SHOWN_AT_MOST} more" if len(stuck) > SHOWN_AT_MOST else ""
        waiting = f"for {self._silence_s:g} s, waiting for {what}"
        if self._text:
            waiting += f" of the {self._text}"
        advice = "Look at that rank's log; it died, or hangs."
        if open_call is None:
            message = f"rank {names} showed no sign of life {waiting}"
            if status and status.open:
                message += f"; it is in the {status.open[0].text}"
            advice = "Look at that rank's log; it died, hangs, or never called the same function."
        elif now_s - self._last[first][2] > self._silence_s / 2:
            message = f"rank {names} showed no sign of life {waiting}"
        elif open_call.waits_for not in (-1, self._rank):
            first = open_call.waits_for
            message = f"rank {first}, for which rank {names} waits ({open_call.what}), "
            message += f"has made no progress {waiting}"
        else:
            message = f"rank {names} is alive, but has made no progress {waiting}"
            advice = "Look at that rank's log, and at its path to the storage."
        return DeadlineError(message, rank=first, advice=advice)
