"""State machine of the leader, the keeper of rank 0. Decides which generations are agreed, which
one to encode, and which one to flush together. Pure.

All decisions follow from reports, which keepers repeat until they have seen an answer. A restarted
leader therefore reaches the same decisions.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from ...arenas.label import GenerationId
from ...arenas.messages import FlushEnd
from .standing import FlushOrder, Report, Standing, Written
from .votes import Ballot, Outcome

REST_MAX = 32
"""Most outcomes to skip after failed encodings."""


def incarnation_of(version: str) -> str:
    """Return which leader made a standing: each process that leads has its own incarnation."""
    return version.rpartition("/")[0]


def is_newer(version: str, than: str) -> bool:
    """Return whether a standing is newer than another one, since answers may overtake each other. A
    standing of another incarnation counts as newer."""
    if incarnation_of(version) != incarnation_of(than):
        return True
    return int(version.rpartition("/")[2]) > int(than.rpartition("/")[2])


@dataclass(eq=False)
class Lead:
    """The leader's state in one ``epoch``; -1 before the first. ``incarnation``: prefix of its
    standings' versions, unique to each process; ``names``: the keepers that report; ``guards``:
    whether they encode parity."""

    incarnation: str = ""
    epoch: int = -1
    names: frozenset[str] = frozenset()
    guards: bool = False
    _count: int = 0
    _ballot: Ballot = field(default_factory=Ballot)
    _flush: FlushOrder | None = None
    _ended: FlushEnd | None = None
    _heard: set[str] = field(default_factory=set)
    """Keepers that have reported in this epoch after seeing a standing of this leader. By then they
    have passed on everything they know from an earlier one."""
    _guard: GenerationId | None = None
    _attempt: str = ""
    """Version of the standing that first requested the encoding of ``_guard``."""
    _have_guarded: set[str] = field(default_factory=set)
    _guarded: GenerationId | None = None
    _knowing: set[str] = field(default_factory=set)
    """Keepers that know ``_guarded`` to be encoded on all keepers."""
    _protected: GenerationId | None = None
    _failures: int = 0
    _rest: int = 0
    """Number of outcomes to skip before the next encoding."""
    _newest: GenerationId | None = None
    """Newest generation with an outcome in this epoch."""
    _tried: GenerationId | None = None
    """Newest generation whose encoding was requested."""
    _written: dict[str, Written] = field(default_factory=dict)
    _wanted: set[GenerationId] = field(default_factory=set)
    _lost: set[int] = field(default_factory=set)
    """Ranks that have died in this epoch."""

    def begin(self, epoch: int, names: Collection[str], *, guards: bool) -> Lead:
        """Return the state at the beginning of an epoch with these keepers, or this one if that has
        begun. A flush that was ordered stays pending: keepers report its result in this epoch,
        too."""
        if epoch <= self.epoch:
            return self
        before = (self._count + 1, self._ballot, self._flush, self._ended)
        return Lead(self.incarnation, epoch, frozenset(names), guards, *before)

    @property
    def version(self) -> str:
        """Version of the current standing."""
        return f"{self.incarnation}/{self._count}"

    @property
    def wanted(self) -> frozenset[GenerationId]:
        """Generations that wait at other keepers to be flushed."""
        return frozenset(self._wanted)

    @property
    def _has_heard_all(self) -> bool:
        return len(self._heard) == len(self.names)

    def hear(self, report: Report) -> None:
        """Take a report into account. Ignores other epochs and unknown keepers."""
        if report.epoch != self.epoch or report.name not in self.names:
            return
        before = self._state()
        if incarnation_of(report.seen) == self.incarnation:
            self._heard.add(report.name)
        self._note_guarded_by_all(report)
        self._lost.update(report.lost)
        for vote in report.votes:
            if vote.generation.epoch == self.epoch:
                self._ballot.cast(vote)
        for generation in report.missing:
            self._decide(generation, Outcome.VOID)
        if report.agreed is not None:
            self._decide(report.agreed, Outcome.AGREED)
        self._note_ended(report.ended)
        for generation in report.wanted:
            self._decide(generation, Outcome.AGREED)
            self._note_wanted(generation)
        self._note_guards(report)
        self._protect()
        is_new_part = self._note_part(report)
        self._choose_guard()
        if is_new_part or self._state() != before:
            self._count += 1

    def _note_part(self, report: Report) -> bool:
        """Record a keeper's part of the ordered flush. Return whether it is new."""
        part = report.written
        if part is None or self._flush is None or part.attempt != self._flush.attempt:
            return False
        if part == self._written.get(report.name):
            return False
        self._written[report.name] = part
        return True

    def _decide(self, generation: GenerationId, outcome: Outcome) -> None:
        if generation.epoch == self.epoch and generation not in self._ballot.outcomes:
            self._ballot.decide(generation, outcome)

    def _note_wanted(self, generation: GenerationId) -> None:
        if generation.epoch == self.epoch and not self._is_over(generation):
            self._wanted.add(generation)

    def _note_ended(self, ended: FlushEnd | None) -> None:
        """Adopt an end that a keeper knows from an earlier leader, unless a later one is known."""
        if ended is not None and not self._is_over(ended.generation):
            self._end(ended)

    def _is_over(self, generation: GenerationId) -> bool:
        ended = self._ended
        return ended is not None and ended.final and generation <= ended.generation

    def void(self, generation: GenerationId) -> None:
        """Void a generation whose image has changed in memory."""
        self._ballot.decide(generation, Outcome.VOID)
        self._choose_guard()
        self._count += 1

    def _state(self) -> object:
        return self.standing(), self.wanted

    def _note_guards(self, report: Report) -> None:
        guard = self._guard
        if guard is None:
            return
        if report.guarded == guard:
            self._have_guarded.add(report.name)
            if len(self._have_guarded) == len(self.names):
                self._note_guarded(guard)
                self._failures = 0
                self._release_guard()
        elif report.unguarded == guard and report.attempt == self._attempt:
            self._failures += 1
            self._rest = min(2 ** (self._failures - 1), REST_MAX)
            self._tried = None
            self._release_guard()

    def _note_guarded_by_all(self, report: Report) -> None:
        if report.guarded_by_all is not None:
            self._note_guarded(report.guarded_by_all)
            if report.guarded_by_all == self._guarded:
                self._knowing.add(report.name)

    def _note_guarded(self, id: GenerationId) -> None:
        if self._guarded is None or id > self._guarded:
            self._guarded = id
            self._knowing = set()

    def _protect(self) -> None:
        """Mark the encoded generation as protected once all keepers know that it is encoded. Only
        then are trainers told and older parity is dropped: any surviving keeper can now tell the
        next leader or the next epoch."""
        if len(self._knowing) == len(self.names):
            self._protected = self._guarded

    def _release_guard(self) -> None:
        self._guard = None
        self._have_guarded = set()

    def _choose_guard(self) -> None:
        """Request the encoding of the newest agreed generation, one at a time.

        Waits until all keepers have reported, and know the last one to be encoded; they retain its
        predecessor until then. After a failure some outcomes are skipped, since retained
        generations take memory that steps need. Void outcomes count as well: if there are too few
        slots, only a newer encoded generation frees any.
        """
        if self._guard is not None and self._ballot.outcomes.get(self._guard) is Outcome.VOID:
            self._release_guard()
        if not self.guards or not self._has_heard_all or self._guarded != self._protected:
            return
        outcome = max((id for id in self._ballot.outcomes if id.epoch == self.epoch), default=None)
        if outcome is not None and (self._newest is None or outcome > self._newest):
            self._newest = outcome
            self._rest = max(0, self._rest - 1)
        newest = max((id for id in self._ballot.agreed if id.epoch == self.epoch), default=None)
        if newest is None:
            return
        if self._guard is None and self._rest == 0 and newest != self._tried:
            self._guard = self._tried = newest
            self._attempt = f"{self.incarnation}/{self._count + 1}"

    def order(self, flush: FlushOrder) -> None:
        """Order all keepers to write their images for this flush."""
        self._flush = flush
        self._written = {}
        self._count += 1

    def written(self) -> dict[str, Written]:
        """Return the results of the ordered flush, by keeper."""
        return dict(self._written)

    def end(self, flush: FlushEnd) -> None:
        """Record the end of a flush."""
        self._flush = None
        self._written = {}
        self._end(flush)
        self._count += 1

    def _end(self, flush: FlushEnd) -> None:
        self._ended = flush
        if flush.final:
            self._wanted = {id for id in self._wanted if id > flush.generation}

    def standing(self) -> Standing:
        """Return the current standing."""
        outcomes = self._ballot.outcomes
        settled = self._ballot.settled
        if settled is not None and (settled.epoch != self.epoch or not self._has_heard_all):
            settled = None  # a keeper that has not reported yet may know a generation to be agreed
        return Standing(
            self.version,
            self.epoch,
            tuple(sorted(id for id, of in outcomes.items() if of is Outcome.AGREED)),
            tuple(sorted(id for id, of in outcomes.items() if of is Outcome.VOID)),
            tuple(sorted(id for id in self._ballot.open if id.epoch == self.epoch)),
            self._guard,
            "" if self._guard is None else self._attempt,
            self._guarded,
            self._protected,
            self._has_heard_all,
            settled,
            self._flush,
            self._ended,
            tuple(sorted(self._lost)),
        )
