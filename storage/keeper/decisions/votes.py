"""State machine that decides whether images of one step, captured by each rank on its own, belong
together. Pure.

Ranks follow a plan that they agreed on earlier, their *agreement*: values that were equal on
several ranks are written by one of them. So a generation is whole if all ranks have sealed their
images under the same agreement, and these values are still equal.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ...arenas.label import GenerationId, Label

KEPT = 16
"""Number of undecided generations to remember; older ones will never be decided."""


class Outcome(enum.Enum):
    """Outcome of a generation."""

    AGREED = "agreed"
    VOID = "void"


@dataclass(frozen=True)
class Vote:
    """A rank's statement that it has sealed its image; see :class:`~...arenas.label.Label`."""

    generation: GenerationId
    rank: int
    world: int
    agreement: str
    equal: Mapping[str, str]

    @classmethod
    def of(cls, label: Label) -> Vote:
        """Return the vote that a label implies."""
        return cls(label.generation, label.rank, label.world, label.agreement, dict(label.equal))


@dataclass
class _Count:
    world: int
    votes: dict[int, Vote] = field(default_factory=dict)


class Ballot:
    """The votes of all ranks."""

    def __init__(self) -> None:
        self._counts: dict[GenerationId, _Count] = {}
        self._outcomes: dict[GenerationId, Outcome] = {}
        self.settled: GenerationId | None = None
        """Newest generation whose outcome was forgotten. Generations up to this one without an
        outcome are void, or agreed and superseded."""

    def cast(self, vote: Vote) -> Outcome | None:
        """Count a vote, and return the outcome if it is known. Duplicates count once. A vote that
        contradicts an earlier one of its rank, or the world size, voids the generation."""
        known = self._outcomes.get(vote.generation)
        if known is not None:
            return known
        if self.settled is not None and vote.generation <= self.settled:
            return Outcome.VOID
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

    @property
    def outcomes(self) -> Mapping[GenerationId, Outcome]:
        """Outcomes of the newest generations."""
        return self._outcomes

    @property
    def agreed(self) -> list[GenerationId]:
        """Agreed generations among the outcomes."""
        return [id for id, outcome in self._outcomes.items() if outcome is Outcome.AGREED]

    @property
    def open(self) -> list[GenerationId]:
        """Generations with votes but no outcome."""
        return list(self._counts)

    def decide(self, generation: GenerationId, outcome: Outcome) -> None:
        """Record an outcome that is known from elsewhere; later votes do not change it."""
        self._counts.pop(generation, None)
        self._outcomes[generation] = outcome
        self._forget_old()

    def _forget_old(self) -> None:
        for id in sorted(self._counts)[:-KEPT]:
            del self._counts[id]
        newest = max(self.agreed, default=None)
        for id in sorted(self._outcomes)[:-KEPT]:
            if id != newest:
                del self._outcomes[id]
                self.settled = id if self.settled is None else max(id, self.settled)
        for id in [id for id in self._counts if self.settled is not None and id <= self.settled]:
            del self._counts[id]


def _are_alike(votes: Iterable[Vote]) -> bool:
    agreements = set[str]()
    equal: dict[str, str] = {}
    for vote in votes:
        agreements.add(vote.agreement)
        for name, value in vote.equal.items():
            if equal.setdefault(name, value) != value:
                return False
    return len(agreements) == 1
