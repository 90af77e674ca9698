"""Pairing of failures: if two ranks failed in the same call, neither reports its failure to the
other.

Two ranks make the same sequence of calls of one name. When they meet in a call, or one sees the
other's failure, that *settles* all earlier failures. Later failures are paired in order, first with
first. A failure without a partner belongs to a call that the other rank has yet to make, and fails
that call.

A rank that only timed out may have been in a call that the other rank skips. Such failures are
dropped together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

LOGGED = 64
"""The number of failures of one name that a rank remembers."""

Log = Sequence[int]
"""Numbers of failed calls of one name, in order; ``-number`` if the rank had timed out."""


@dataclass(frozen=True, slots=True)
class Settled:
    """The last calls of the leader and of another rank whose failures are settled between them."""

    leader: int = 0
    other: int = 0

    def joined(self, known: Settled) -> Settled:
        """Return the later of both, on each side."""
        return Settled(max(self.leader, known.leader), max(self.other, known.other))


@dataclass(slots=True)
class CallHistory:
    """The leader's view of the calls of one name."""

    taken: list[int]
    """By rank, the number of its last call that the leader has taken, or has seen fail."""
    settled: dict[int, int] = field(default_factory=dict)
    """By rank, the leader's last failed call that is settled with it."""

    def of(self, rank: int) -> Settled:
        """Return the failures that the leader knows to be settled with a rank."""
        return Settled(self.settled.get(rank, 0), self.taken[rank])

    def settle(self, rank: int, settled: Settled) -> None:
        """Record failures as settled with a rank."""
        self.taken[rank] = settled.other
        if settled.leader:
            self.settled[rank] = settled.leader


def logged(log: Log, number: int, waited: bool) -> list[int]:
    """Append a failure to a log, and drop the oldest if it is full."""
    return [*log, -number if waited else number][-LOGGED:]


def paired(settled: Settled, leaders: Log, others: Log) -> tuple[Settled, list[int], list[int]]:
    """Pair off failures. Return the settled state and the unpaired rest of each log."""
    theirs = [number for number in leaders if abs(number) > settled.leader]
    ours = [number for number in others if abs(number) > settled.other]
    count = min(len(theirs), len(ours))
    if count:
        settled = Settled(abs(theirs[count - 1]), abs(ours[count - 1]))
    return settled, theirs[count:], ours[count:]
