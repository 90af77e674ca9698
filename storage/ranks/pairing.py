"""Which failure of one rank belongs to which failure of another: where both failed in one call,
neither has to report its failure to the other.

Two ranks make the same calls of one name. A call in which they meet, or in which one learns of the
other's failure, *settles* all failures before it. Failures after that, of which the other has not
learned, belong together in order: first with first. A failure that is left over belongs to a call
that the other rank has yet to make, and fails that call.

Where a rank has only timed out, the call may be one that the other leaves out. Such failures are
dropped together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["LOGGED", "CallHistory", "Log", "Settled", "logged", "paired"]

LOGGED = 64
"""Failures of one name that a rank remembers."""

Log = Sequence[int]
"""The numbers of the calls of one name that a rank failed in, in order; ``-number`` where it had
timed out."""


@dataclass(frozen=True, slots=True)
class Settled:
    """Up to which call of the leader, and which call of the other rank, all failures are settled
    between the two."""

    leader: int = 0
    other: int = 0

    def joined(self, known: Settled) -> Settled:
        """What both together settle."""
        return Settled(max(self.leader, known.leader), max(self.other, known.other))


@dataclass(slots=True)
class CallHistory:
    """What the leader has seen of the calls of one name."""

    taken: list[int]
    """By rank: the number of its last call that the leader has taken, or has seen fail."""
    settled: dict[int, int] = field(default_factory=dict)
    """By rank: the last failed call of the leader that is settled with it."""

    def of(self, rank: int) -> Settled:
        """What is settled with that rank, as far as the leader has seen."""
        return Settled(self.settled.get(rank, 0), self.taken[rank])

    def settle(self, rank: int, settled: Settled) -> None:
        """All up to there is settled with that rank."""
        self.taken[rank] = settled.other
        if settled.leader:
            self.settled[rank] = settled.leader


def logged(log: Log, number: int, waited: bool) -> list[int]:
    """The log with one more failure, and without the oldest where it is full."""
    return [*log, -number if waited else number][-LOGGED:]


def paired(settled: Settled, leaders: Log, others: Log) -> tuple[Settled, list[int], list[int]]:
    """Cancel out what belongs together. Return what is settled then, and what is left of either
    log."""
    theirs = [number for number in leaders if abs(number) > settled.leader]
    ours = [number for number in others if abs(number) > settled.other]
    count = min(len(theirs), len(ours))
    if count:
        settled = Settled(abs(theirs[count - 1]), abs(ours[count - 1]))
    return settled, theirs[count:], ours[count:]
