"""Which failure of one rank belongs to which of another: where both failed in one call, neither is
news to the other.

Two ranks make the same calls of one name. A call in which they meet, or in which one hears of the
other's failure, makes them *even*. What each fails in since then, unknown to the other, belongs
together in order: first with first. A failure that is left over belongs to a call that the other
rank has yet to make, and fails that.

Where a rank has only waited in vain, the call may be one that the other leaves out. Such failures
are forgotten together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["LOGGED", "Even", "Log", "Pairs", "logged", "paired"]

LOGGED = 64
"""Failures of one name that a rank remembers."""

Log = Sequence[int]
"""The numbers of the calls of one name that a rank failed in, in order; ``-number`` where it had
waited in vain."""


@dataclass(frozen=True, slots=True)
class Even:
    """Up to which call of the leader, and which of the other rank, these two owe each other
    nothing."""

    lead: int = 0
    other: int = 0

    def joined(self, known: Even) -> Even:
        """What follows from both."""
        return Even(max(self.lead, known.lead), max(self.other, known.other))


@dataclass(slots=True)
class Pairs:
    """What the leader knows of the calls of one name."""

    taken: list[int]
    """By rank: the number of its last call that the leader has taken, or knows to have failed."""
    even: dict[int, int] = field(default_factory=dict)
    """By rank: the leader's last call that it has nothing to hear of any more. Only calls that
    failed count."""

    def of(self, rank: int) -> Even:
        """Up to where the leader and that rank are even, as far as the leader knows."""
        return Even(self.even.get(rank, 0), self.taken[rank])

    def settle(self, rank: int, even: Even) -> None:
        """They are even up to there."""
        self.taken[rank] = even.other
        if even.lead:
            self.even[rank] = even.lead


def logged(log: Log, number: int, waited: bool) -> list[int]:
    """The log with one more failure, and without the oldest where it is full."""
    return [*log, -number if waited else number][-LOGGED:]


def paired(even: Even, leads: Log, others: Log) -> tuple[Even, list[int], list[int]]:
    """Cancel out what belongs together. Return up to where both are even then, and what is left of
    either log."""
    theirs = [number for number in leads if abs(number) > even.lead]
    ours = [number for number in others if abs(number) > even.other]
    count = min(len(theirs), len(ours))
    if count:
        even = Even(abs(theirs[count - 1]), abs(ours[count - 1]))
    return even, theirs[count:], ours[count:]
