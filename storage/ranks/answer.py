"""The leader's answer in the first round of a call."""

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
    """The leader's encoded decision in a round, or the failure that ends it for all ranks."""

    decision: bytes = b""
    failure: Failure | None = None

    def opened(self) -> bytes:
        """Return the decision, or raise the failure."""
        if self.failure is not None:
            self.failure.raise_alike()
        return self.decision


@dataclass(frozen=True, slots=True)
class AnswerMessage:
    """The wire form of an :class:`Answer`, with rosters as text."""

    number: int
    roster: str
    verdict: Verdict
    failures: tuple[int, ...] = ()
    settled: str = ""
    instead: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """The leader's answer.

    ``failures``: the leader's failures in calls of this name. ``settled``: by rank, the last of
    them that is settled with that rank.

    ``instead`` serves late ranks and those in a different call from the leader: names and numbers
    of other calls of the leader that failed for the same reason. A rank that has seen one of these
    failures need not see the others.
    """

    number: int
    roster: Sequence[int]
    verdict: Verdict
    failures: Log = ()
    settled: Sequence[int] = ()
    instead: Sequence[tuple[str, int]] = ()

    @property
    def failed(self) -> bool:
        """Return whether the answer is an error."""
        return self.verdict.failure is not None

    def encode(self) -> bytes:
        """Encode the message that other ranks read."""
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
        """Decode an answer, in a job of ``world`` ranks."""
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
        """Return the last settled failures between the leader and ``rank``."""
        return Settled(self.settled[rank], max(0, -self.roster[rank]))
