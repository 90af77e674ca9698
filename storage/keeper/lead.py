"""What the lead keeper decides for the keepers of a job: which generations are agreed on, of which
one all make parity, and what is flushed together. A pure state machine. No I/O, no clock.

All of it follows from reports, which keepers repeat until they have seen an answer. So a lead
keeper that begins anew comes to the same outcomes.
"""

from __future__ import annotations

from collections.abc import Collection

from ..arenas.label import GenerationId
from .standing import FlushEnd, FlushOrder, Report, Standing, Written
from .votes import Ballot, Outcome

__all__ = ["REST_MAX", "Lead", "incarnation_of", "is_newer"]

REST_MAX = 32
"""So many generations at most are left out after one of which parity could not be made."""


def incarnation_of(version: str) -> str:
    """Which lead keeper has made a standing, of those that take each other's place."""
    return version.rpartition("/")[0]


def is_newer(version: str, than: str) -> bool:
    """Whether a standing was made after another one; answers overtake each other. That of another
    lead keeper is."""
    if incarnation_of(version) != incarnation_of(than):
        return True
    return int(version.rpartition("/")[2]) > int(than.rpartition("/")[2])


class Lead:
    """``incarnation``: begins the versions of standings, so that those of another lead keeper are
    told apart from them."""

    def __init__(self, incarnation: str = "") -> None:
        self._incarnation = incarnation
        self._count = 0
        self._ballot = Ballot()
        self._epoch = -1
        self._names: frozenset[str] = frozenset()
        self._heard: set[str] = set()
        """Those of them that have reported in this epoch, and knew already that this one leads:
        what they have heard of another lead keeper, they have said."""
        self._guards = False
        self._guard: GenerationId | None = None
        self._attempt = ""
        """The version of the standing that has said so first."""
        self._have_guarded: set[str] = set()
        self._guarded: GenerationId | None = None
        self._told: dict[str, GenerationId] = {}
        """The newest that each keeper knows all to have made parity of."""
        self._protected: GenerationId | None = None
        self._failures = 0
        self._rest = 0
        """After so many more outcomes the newest generation that is agreed on is guarded again."""
        self._newest: GenerationId | None = None
        """The newest outcome in this epoch."""
        self._tried: GenerationId | None = None
        """The newest of which parity was, or is, to be made."""
        self._flush: FlushOrder | None = None
        self._written: dict[str, Written] = {}
        self._ended: FlushEnd | None = None
        self._wanted: set[GenerationId] = set()

    @property
    def epoch(self) -> int:
        """-1 where none has begun."""
        return self._epoch

    @property
    def names(self) -> frozenset[str]:
        """The keepers that report."""
        return self._names

    @property
    def version(self) -> str:
        """Of the standing."""
        return f"{self._incarnation}/{self._count}"

    @property
    def wanted(self) -> frozenset[GenerationId]:
        """What waits at other keepers to be written to storage."""
        return frozenset(self._wanted)

    def begin(self, epoch: int, names: Collection[str], *, guards: bool) -> None:
        """An epoch of these keepers begins; ``guards``: they make parity. Votes of former epochs
        come to nothing."""
        if epoch <= self._epoch:
            return
        self._epoch = epoch
        self._names = frozenset(names)
        self._guards = guards
        self._heard = set()
        self._guard = self._tried = self._newest = None
        self._guarded = self._protected = None  # reports say what is left of it
        self._told = {}
        self._have_guarded = set()
        self._failures = self._rest = 0
        self._wanted = set()
        # What was ordered is still waited for: keepers say what has become of it.
        self._written = {}
        self._count += 1

    def hear(self, report: Report) -> None:
        """Take a report into account; one of another epoch, or of no keeper of this one, says
        nothing."""
        if report.epoch != self._epoch or report.name not in self._names:
            return
        before = self._state()
        if incarnation_of(report.seen) == self._incarnation:
            self._heard.add(report.name)
        self._note_told(report)
        for vote in report.votes:
            if vote.generation.epoch == self._epoch:
                self._ballot.cast(vote)
        for generation in report.missing:
            self._decide(generation, Outcome.VOID)
        if report.agreed is not None:
            self._decide(report.agreed, Outcome.AGREED)
        for generation in report.wanted:
            self._decide(generation, Outcome.AGREED)
            self._note_wanted(generation)
        self._note_guards(report)
        self._protect()
        part, flush = report.written, self._flush
        if part is not None and flush is not None and part.attempt == flush.attempt:
            self._written[report.name] = part
        self._choose_guard()
        if self._state() != before:
            self._count += 1

    def _decide(self, generation: GenerationId, outcome: Outcome) -> None:
        if generation.epoch == self._epoch and generation not in self._ballot.outcomes:
            self._ballot.decide(generation, outcome)

    def _note_wanted(self, generation: GenerationId) -> None:
        ended = self._ended
        if generation.epoch != self._epoch:
            return
        if ended is None or not ended.final or generation > ended.generation:
            self._wanted.add(generation)

    def void(self, generation: GenerationId) -> None:
        """Memory no longer holds what was sealed."""
        self._ballot.decide(generation, Outcome.VOID)
        self._choose_guard()
        self._count += 1

    def _state(self) -> object:
        return (self.standing(), tuple(sorted(self._written)), self.wanted)

    def _note_guards(self, report: Report) -> None:
        guard = self._guard
        if guard is None:
            return
        if report.guarded == guard:
            self._have_guarded.add(report.name)
            if self._have_guarded == self._names:
                self._note_guarded(guard)
                self._failures = 0
                self._release_guard()
        elif report.unguarded == guard and report.attempt == self._attempt:
            self._failures += 1
            self._rest = min(2 ** (self._failures - 1), REST_MAX)
            self._tried = None
            self._release_guard()

    def _note_told(self, report: Report) -> None:
        if report.told is not None:
            self._told[report.name] = max(report.told, self._told.get(report.name, report.told))
            self._note_guarded(report.told)

    def _note_guarded(self, id: GenerationId) -> None:
        if self._guarded is None or id > self._guarded:
            self._guarded = id

    def _protect(self) -> None:
        """Trainers are told of it, and what was guarded before is given up, once all keepers know:
        then any one that is left can say so in the next epoch, or to the next lead keeper."""
        if all(self._told.get(name) == self._guarded for name in self._names):
            self._protected = self._guarded

    def _release_guard(self) -> None:
        self._guard = None
        self._have_guarded = set()

    def _choose_guard(self) -> None:
        """Guard the newest generation, one at a time: once all keepers have been heard, and know
        what is guarded, which they keep until then beside the one before. After a failure some are
        left out: what is guarded takes memory that steps need. Those that are void count, too: if
        it is for lack of slots, it takes another guarded one for slots to be given up."""
        if self._guard is not None and self._ballot.outcomes.get(self._guard) is Outcome.VOID:
            self._release_guard()
        if not self._guards or self._heard != self._names or self._guarded != self._protected:
            return
        outcome = max((id for id in self._ballot.outcomes if id.epoch == self._epoch), default=None)
        if outcome is not None and (self._newest is None or outcome > self._newest):
            self._newest = outcome
            self._rest = max(0, self._rest - 1)
        newest = max((id for id in self._ballot.agreed if id.epoch == self._epoch), default=None)
        if newest is None:
            return
        if self._guard is None and self._rest == 0 and newest != self._tried:
            self._guard = self._tried = newest
            self._attempt = f"{self._incarnation}/{self._count + 1}"

    def order(self, flush: FlushOrder) -> None:
        """All keepers are to write this now."""
        self._flush = flush
        self._written = {}
        self._count += 1

    def written(self) -> dict[str, Written]:
        """What has become of the flush that was ordered, by keeper."""
        return dict(self._written)

    def end(self, flush: FlushEnd) -> None:
        """A flush has ended."""
        self._flush = None
        self._written = {}
        self._ended = flush
        if flush.final:
            self._wanted = {id for id in self._wanted if id > flush.generation}
        self._count += 1

    def standing(self) -> Standing:
        """How things stand."""
        outcomes = self._ballot.outcomes
        settled = self._ballot.settled
        return Standing(
            self.version,
            self._epoch,
            tuple(sorted(id for id, of in outcomes.items() if of is Outcome.AGREED)),
            tuple(sorted(id for id, of in outcomes.items() if of is Outcome.VOID)),
            tuple(sorted(id for id in self._ballot.open if id.epoch == self._epoch)),
            self._guard,
            "" if self._guard is None else self._attempt,
            self._guarded,
            self._protected,
            self._heard == self._names,
            settled if settled is not None and settled.epoch == self._epoch else None,
            self._flush,
            self._ended,
        )
