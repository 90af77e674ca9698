"""What a keeper makes of how things stand among the keepers of its job: which generations are
agreed on, of which one parity is made, and what is written to storage together."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any

from ..arenas.hosts import GuardedGroup, KeeperHost
from ..arenas.label import GenerationId, Label
from ..arenas.messages import Agreed, Event, Protected, Voided
from .guards import Guards
from .held import Held
from .reporting import Reporting
from .standing import Report, Standing
from .status import Counters
from .votes import KEPT, Outcome, Vote
from .writing import Writing

__all__ = ["Agreement"]

_VOID = "ranks have captured what does not belong together, or one has nothing of it"
_LATER = "later steps have taken the place of some of its images"
_log = logging.getLogger(__name__)


class Agreement:
    """Of the keeper ``name``. ``tell(event)`` tells the trainers of this epoch; ``run_later(work)``
    runs a coroutine beside all else."""

    def __init__(
        self,
        name: str,
        held: Held,
        guards: Guards,
        counters: Counters,
        tell: Callable[[Event], Awaitable[None]],
        run_later: Callable[[Coroutine[Any, Any, None]], None],
        certificate: str,
    ) -> None:
        self.reporting = Reporting(
            name, self.report, self.follow, self._unheard, run_later, certificate
        )
        self._held = held
        self._guards = guards
        self._counters = counters
        self._tell = tell
        self._run_later = run_later
        self._writing: Writing | None = None
        self._votes: dict[GenerationId, dict[int, Vote]] = {}
        """Of generations whose outcome is not known here."""
        self._handed_over: set[GenerationId] = set()
        """Those of this epoch of which the keeper before had images."""
        self._known: dict[GenerationId, Outcome] = {}
        """The outcomes that were followed."""
        self._open: tuple[GenerationId, ...] = ()
        self.protected: GenerationId | None = None
        """The newest generation of which all keepers know that all have made parity of it."""
        self._guarded: set[GenerationId] = set()
        """Those of which this keeper knows it, and has its part."""
        self._guard_asked: GenerationId | None = None
        self._attempt = ""
        """What all are to make parity of now, or were to; and the attempt at that."""
        self._guarding: set[GenerationId] = set()
        """Those of which they make it, or have, which this keeper has not been told."""

    def writes(self, writing: Writing) -> None:
        """What writes generations, which needs this to do so together with others."""
        self._writing = writing

    def enter(
        self,
        epoch: int,
        chosen: int | None,
        hosts: Sequence[KeeperHost],
        groups: Sequence[GuardedGroup],
    ) -> None:
        """A trainer goes on in ``epoch``; it may not be the first one."""
        if epoch > self.reporting.lead.epoch:
            self._votes = {}
            self._handed_over = set()
            self._known = {}
            self._open = ()
            self._guards.stop()
            self._guards.drop_later(chosen)
            self._guarded = {id for id in self._guarded if groups and _is_left(id, chosen)}
            self._guarding = {id for id in self._guarding if groups and _is_left(id, chosen)}
            if not groups or not _is_left(self.protected, chosen):
                self.protected = max(self._guarded, default=None)
            self._held.generations.guarding(self._relied_on())
        self.reporting.enter(epoch, hosts, groups)

    async def vote(self, label: Label, *, handed_over: bool = False) -> None:
        """An image is sealed; ``handed_over``: by the keeper before, which may have voted, too."""
        id = label.generation
        if id.epoch != self._held.generations.epoch:
            return  # a resume came first, which may have gone on from it
        if handed_over:
            self._handed_over.add(id)
        known = self._known.get(id)
        if known is Outcome.AGREED:
            self._held.generations.agreed(id)  # a trainer has handed it over later
            if self._writing is not None:
                self._writing.begin(id)
        elif known is Outcome.VOID:
            # It was about to be captured then, and its trainer was not yet listening.
            self._held.generations.void(id)
            await self._tell(Voided(id, _VOID))
        else:
            self._votes.setdefault(id, {})[label.rank] = Vote.of(label)
            await self._void_incomplete()
            for old in sorted(self._votes.keys() - set(self._held.generations.undecided))[:-KEPT]:
                await self._void(old, _LATER)
        await self.reporting.tell()

    def _incomplete(self) -> list[GenerationId]:
        """Those of which a rank of this keeper has nothing, and will not. No other keeper has heard
        of them: votes are told once all ranks of a keeper have voted."""
        return [
            id
            for id, votes in self._votes.items()
            if id not in self._handed_over
            and not self._whole(votes)
            and self._held.generations.will_not_come(id)
        ]

    async def _void_incomplete(self) -> None:
        for id in self._incomplete():
            await self._void(id, _VOID)

    async def _void(self, id: GenerationId, text: str) -> None:
        """Nothing comes of it, as is known here alone."""
        votes = self._votes.pop(id, None)
        if votes is not None and not self._held.generations.is_agreed(id):
            self._counters.void += 1
            self._held.generations.void(id)
            await self._tell(Voided(id, text))

    def damaged(self, id: GenerationId) -> None:
        """Memory no longer holds what was sealed."""
        self._votes.pop(id, None)
        if self.reporting.is_alone:
            self.reporting.lead.void(id)
        self._held.generations.void(id)

    def look_for_missing(self) -> None:
        """A rank has gone on: others may wait for what it has left out."""
        if self._incomplete():
            self._run_later(self._void_incomplete())
        if any(map(self._held.generations.will_not_come, self._open)):
            self.tell_later()

    def tell_later(self) -> None:
        """There is something new here."""
        self._run_later(self.reporting.tell())

    def report(self) -> Report:
        """All that this keeper knows."""
        generations = self._held.generations
        epoch = self.reporting.lead.epoch
        newest = generations.newest_agreed
        return Report(
            self.reporting.name,
            epoch,
            tuple(vote for votes in self._votes.values() for vote in self._whole(votes)),
            tuple(id for id in self._open if generations.will_not_come(id)),
            newest if newest is not None and newest.epoch == epoch else None,
            self._made(),
            self._guards.unguarded,
            self._attempt,
            max(self._guarded, default=None),
            None if self._writing is None else self._writing.written,
            () if self._writing is None else self._writing.waiting(epoch),
        )

    def _made(self) -> GenerationId | None:
        """Of what there is parity: of what all are to make it of now; else the newest, which may be
        newer, as where a lead keeper has died that had all make parity of that."""
        if self._guard_asked is not None and self._guards.holds(self._guard_asked):
            return self._guard_asked
        return self._guards.guarded

    def _whole(self, votes: dict[int, Vote]) -> Sequence[Vote]:
        """The votes of all ranks of this keeper, none before they are complete: one report for
        all."""
        world = next(iter(votes.values())).world
        if set(self.reporting.own_ranks(world)) <= votes.keys():
            return list(votes.values())
        return ()

    async def follow(self, standing: Standing) -> None:
        """Make use of how things stand."""
        self._open = standing.open
        guards = (standing.guard, standing.guarded, standing.protected)
        agreed = {*standing.agreed, *filter(None, (*guards, standing.flushed))}
        for id in (*standing.void, *self._settled(standing, agreed)):
            is_news = self._is_news(id, Outcome.VOID, standing)
            # A lead keeper that has begun anew may not know that it was agreed on before.
            if is_news and not self._held.generations.is_agreed(id):
                self._counters.void += 1
                self._held.generations.void(id)
                await self._tell(Voided(id, _VOID))
        for id in sorted(agreed):
            if self._is_news(id, Outcome.AGREED, standing):
                await self._agreed(id)
        named = {*standing.void, *agreed}
        self._known = {id: outcome for id, outcome in self._known.items() if id in named}
        await self._guard(standing)
        if self._writing is not None:
            self._counters.report_failures = self.reporting.failures
            await self._writing.follow(standing)

    async def _unheard(self, problem: str) -> None:
        """What only the lead keeper could finish will not be; and nobody waits any longer to hear
        what it makes of votes, though it may yet make something of them."""
        for id in sorted(self._votes):
            await self._tell(Voided(id, problem))
        if self._writing is not None:
            await self._writing.fail_parts(problem)

    def _settled(self, standing: Standing, agreed: Collection[GenerationId]) -> list[GenerationId]:
        """What has no outcome here, and none in the lead keeper's memory: it went by while this
        keeper was not reached. Kept any longer it would be in the way of later steps for ever."""
        settled = standing.settled
        if settled is None:
            return []
        named = {*agreed, *standing.open}
        undecided = {*self._held.generations.undecided, *self._votes}
        return sorted(id for id in undecided if id <= settled and id not in named)

    def _is_news(self, id: GenerationId, outcome: Outcome, standing: Standing) -> bool:
        if id.epoch != standing.epoch or id in self._known:
            return False
        self._known[id] = outcome
        self._votes.pop(id, None)
        return True

    async def _agreed(self, id: GenerationId) -> None:
        if not self._held.generations.agreed(id):
            await self._tell(Voided(id, _LATER))
            return
        self._counters.agreed += 1
        local = self._writing is not None and self._writing.agreed(id)
        await self._tell(Agreed(id, local))

    async def _guard(self, standing: Standing) -> None:
        """Make parity of what all make it of now; keep that of what all have made it of.

        Another keeper may know that all have made it when the lead keeper dies, or the epoch ends.
        So what all were about to make it of is kept until the lead keeper has heard what each
        knows. And what was protected before is kept until all know."""
        if standing.heard:
            self._guarding = set()
        if standing.guard is not None:
            self._guarding.add(standing.guard)
        if standing.guarded is not None:
            self._guarded.add(standing.guarded)
        protected = standing.protected
        is_news = protected is not None and (self.protected is None or protected > self.protected)
        if is_news:
            self.protected = protected
        kept = self._relied_on()
        self._held.generations.guarding(kept)
        if self.protected is not None:
            self._guards.keep(kept)
        self._guarded = {id for id in self._guarded if id in kept or self._guards.holds(id)}
        if protected is not None and is_news and protected.epoch == standing.epoch:
            self._counters.protected += 1
            await self._tell(Protected(protected))
        group = self.reporting.group()
        if standing.guard is None or group is None:
            self._guards.stop()
            return
        self._guard_asked = standing.guard
        self._attempt = standing.attempt
        member = group.names.index(self.reporting.name)
        self._guards.make(standing.guard, group, member, self.reporting.hosts)

    def _relied_on(self) -> set[GenerationId]:
        """Those whose images, and parity of them, others rely on, or may."""
        newest = max(self._guarded, default=None)
        return {*self._guarding, *filter(None, (newest, self.protected))}

    async def close(self) -> None:
        """Take part in nothing more."""
        await self.reporting.close()
        await self._guards.close()


def _is_left(id: GenerationId | None, chosen: int | None) -> bool:
    """Whether a resume from step ``chosen`` has not dropped it."""
    return id is not None and chosen is not None and id.step <= chosen
