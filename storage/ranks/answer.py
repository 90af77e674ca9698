"""What the leader answers in the first round of a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .calls import decoded_roster, encoded_roster
from .failures import Failure
from .member import LEADER
from .messages import codec
from .pairing import Log, Settled

__all__ = ["Answer", "AnswerMessage", "Verdict"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the leader has decided in a round, encoded; or the failure that ends the round for all
    ranks."""

    decision: bytes = b""
    failure: Failure | None = None

    def opened(self) -> bytes:
        """The decision. Raises the failure."""
        if self.failure is not None:
            self.failure.raise_alike()
        return self.decision


@dataclass(frozen=True, slots=True)
class AnswerMessage:
    """An :class:`Answer` as it is sent: rosters as text."""

    number: int
    roster: str
    verdict: Verdict
    failures: tuple[int, ...] = ()
    settled: str = ""
    instead: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What the leader has answered.

    ``failures``: the leader's failures in calls of this name; ``settled``: by rank, up to which of
    them are settled with it.

    ``instead`` is for ranks that were in another call than the leader, and for those that come
    late: the names and the numbers of other calls of the leader, which failed for the same reason.
    A rank that has seen one of these failures need not see the others.
    """

    number: int
    roster: Sequence[int]
    verdict: Verdict
    failures: Log = ()
    settled: Sequence[int] = ()
    instead: Sequence[tuple[str, int]] = ()

    @property
    def failed(self) -> bool:
        """Whether it is an error."""
        return self.verdict.failure is not None

    def encode(self) -> bytes:
        """The message that other ranks read."""
        message = AnswerMessage(
            self.number,
            encoded_roster(self.roster),
            self.verdict,
            tuple(self.failures),
            encoded_roster(self.settled) if self.settled else "",
            tuple(self.instead),
        )
        return codec(AnswerMessage).encode(message)

    @classmethod
    def decode(cls, data: bytes, world: int) -> Answer:
        """The answer to ranks of a job of that size."""
        message = codec(AnswerMessage).decode(data, f"the answer of rank {LEADER}")
        return cls(
            message.number,
            decoded_roster(message.roster, world),
            message.verdict,
            message.failures,
            decoded_roster(message.settled, world) if message.settled else (),
            message.instead,
        )

    def settled_with(self, rank: int) -> Settled:
        """Up to where the leader and ``rank`` were settled, as far as the leader knew."""
        return Settled(self.settled[rank], max(0, -self.roster[rank]))
