"""Votes: whether the images of one step, which each rank has captured by itself, belong together. A
pure state machine.

Ranks go by a plan that they agreed on earlier, their *accord*; what was equal on several ranks then
is written by one of them. So a generation is whole if all ranks have sealed their images, by the
same accord, and what has to be equal still is. All that a vote says is in the label of an image, so
an outcome can be worked out again.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..arenas.label import GenerationId, Label

__all__ = ["Ballot", "Outcome", "Vote", "outcome_of_labels"]

KEPT = 16
"""So many generations without an outcome are remembered: those before will not have one."""


class Outcome(enum.Enum):
    """Of a generation."""

    AGREED = "agreed"
    VOID = "void"


@dataclass(frozen=True)
class Vote:
    """That a rank has sealed its image of a generation; see :class:`~..arenas.label.Label`."""

    generation: GenerationId
    rank: int
    world: int
    accord: str
    equal: Mapping[str, str]

    @classmethod
    def of(cls, label: Label) -> Vote:
        """What a label says."""
        return cls(label.generation, label.rank, label.world, label.accord, dict(label.equal))


@dataclass
class _Count:
    world: int
    votes: dict[int, Vote] = field(default_factory=dict)


class Ballot:
    """The votes of all ranks."""

    def __init__(self) -> None:
        self._counts: dict[GenerationId, _Count] = {}
        self._outcomes: dict[GenerationId, Outcome] = {}

    def cast(self, vote: Vote) -> Outcome | None:
        """Count a vote; the outcome, once it is known. A vote that comes twice counts once. One
        that contradicts an earlier one of the same rank, or the size of the world, voids the
        generation."""
        known = self._outcomes.get(vote.generation)
        if known is not None:
            return known
        count = self._counts.setdefault(vote.generation, _Count(vote.world))
        before = count.votes.setdefault(vote.rank, vote)
        outcome: Outcome | None = None
        if before != vote or vote.world != count.world or not 0 <= vote.rank < vote.world:
            outcome = Outcome.VOID
        elif len(count.votes) == count.world:
            outcome = Outcome.AGREED if _are_alike(count.votes.values()) else Outcome.VOID
        if outcome is not None:
            self._outcomes[vote.generation] = outcome
            del self._counts[vote.generation]
        self._forget_old()
        return outcome

    def void(self, generation: GenerationId) -> None:
        """It has turned out not to be whole: votes that come again change nothing."""
        self._counts.pop(generation, None)
        self._outcomes[generation] = Outcome.VOID
        self._forget_old()

    def _forget_old(self) -> None:
        for id in sorted(self._counts)[:-KEPT]:
            del self._counts[id]
        for id in sorted(self._outcomes)[:-KEPT]:
            del self._outcomes[id]


def outcome_of_labels(labels: Iterable[Label]) -> Outcome | None:
    """What the votes of these labels, of one generation, come to; None where some are missing."""
    ballot = Ballot()
    outcome = None
    for label in labels:
        outcome = ballot.cast(Vote.of(label))
    return outcome


def _are_alike(votes: Iterable[Vote]) -> bool:
    accords = set[str]()
    equal: dict[str, str] = {}
    for vote in votes:
        accords.add(vote.accord)
        for name, value in vote.equal.items():
            if equal.setdefault(name, value) != value:
                return False
    return len(accords) == 1
