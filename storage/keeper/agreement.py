"""Tracks the job-wide state of generations on one keeper: agreed, being encoded, being flushed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

from ..arenas.hosts import GuardedGroup, KeeperHost
from ..arenas.label import GenerationId, Label
from ..arenas.messages import Agreed, Event, Protected, RankLost, Voided
from .decisions.standing import Report, Standing
from .decisions.votes import KEPT, Outcome, Vote
from .flushing.writing import Writing
from .parity.guards import Guards
from .reporting import Reporting
from .slot_memory import SlotPool
from .status import Counters

_VOID = "the images of the ranks do not match, or a rank has none"
_LATER = "later steps have overwritten some of its images"
_log = logging.getLogger(__name__)


class Agreement:
    """Job-wide state of generations, as seen by the keeper ``name``. ``tell(event)`` notifies the
    trainers of the current epoch; ``run_later(work)`` schedules a coroutine; ``writing`` flushes
    generations, and writes them to the local level."""

    def __init__(
        self,
        name: str,
        pool: SlotPool,
        guards: Guards,
        counters: Counters,
        tell: Callable[[Event], Coroutine[Any, Any, None]],
        run_later: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self.reporting = Reporting(
            name, self.report, self.follow, self._unheard, run_later, guards.certificate
        )
        self.writing = Writing(pool, counters, self.reporting, tell, self.damaged)
        self._pool = pool
        self._guards = guards
        self._counters = counters
        self._tell = tell
        self._run_later = run_later
        self._votes: dict[GenerationId, dict[int, Vote]] = {}
        """Votes by rank, for generations without an outcome."""
        self._handed_over: set[GenerationId] = set()
        """Generations of this epoch with images from the previous keeper."""
        self._known: dict[GenerationId, Outcome] = {}
        """Outcomes that this keeper has acted on."""
        self._open: tuple[GenerationId, ...] = ()
        self.protected: GenerationId | None = None
        """Newest generation that every keeper knows to be encoded on all keepers."""
        self._guarded: set[GenerationId] = set()
        """Generations known to be encoded on all keepers, with this keeper's parity still held."""
        self._guard_asked: GenerationId | None = None
        self._attempt = ""
        """Newest generation that the leader asked all keepers to encode, and the id of that
        attempt."""
        self._guarding: set[GenerationId] = set()
        """Generations that peers may be encoding, or have encoded without this keeper knowing."""
        self._lost: set[int] = set()
        """Ranks of this host that have died in this epoch."""
        self._announced: set[int] = set()
        """Dead ranks that the trainers of this host know."""

    def enter(
        self,
        epoch: int,
        chosen: int | None,
        hosts: Sequence[KeeperHost],
        groups: Sequence[GuardedGroup],
    ) -> None:
        """Enter ``epoch`` with one of its trainers. The first trainer of a new epoch resets all
        votes and drops the parity of steps after ``chosen``."""
        if epoch > self.reporting.lead.epoch:
            self._votes = {}
            self._handed_over = set()
            self._known = {}
            self._open = ()
            self._lost = set()
            self._announced = set()
            self._guards.stop()
            self._guards.drop_later(chosen)
            self._guarded = {id for id in self._guarded if groups and _is_left(id, chosen)}
            self._guarding = {id for id in self._guarding if groups and _is_left(id, chosen)}
            if not groups or not _is_left(self.protected, chosen):
                self.protected = max(self._guarded, default=None)
            self._pool.generations.guarding(self._relied_on())
        self.reporting.enter(epoch, hosts, groups)

    async def vote(self, label: Label, *, handed_over: bool = False) -> None:
        """Count the vote of a sealed image. ``handed_over``: the image comes from the previous
        keeper, which may have voted already."""
        id = label.generation
        if id.epoch != self._pool.generations.epoch:
            return  # a resume began a new epoch, perhaps from this step
        if handed_over:
            self._handed_over.add(id)
        known = self._known.get(id)
        if known is Outcome.AGREED:
            self._pool.generations.agreed(id)  # a trainer has handed the image over late
            self.writing.begin(id)
        elif known is Outcome.VOID:
            # The event was sent while this image was being captured, before its trainer listened.
            self._pool.generations.void(id)
            await self._tell(Voided(id, _VOID))
        else:
            self._votes.setdefault(id, {})[label.rank] = Vote.of(label)
            await self._void_incomplete()
            for old in sorted(self._votes.keys() - set(self._pool.generations.undecided))[:-KEPT]:
                await self._void(old, _LATER)
        await self.reporting.tell()

    def _incomplete(self) -> list[GenerationId]:
        """Return the generations that a rank of this keeper will never seal. Other keepers do not
        know them: a keeper reports votes only once all its ranks have voted."""
        return [
            id
            for id, votes in self._votes.items()
            if id not in self._handed_over
            and not self._whole(votes)
            and self._pool.generations.will_not_come(id)
        ]

    async def _void_incomplete(self) -> None:
        for id in self._incomplete():
            await self._void(id, _VOID)

    async def _void(self, id: GenerationId, text: str) -> None:
        """Void a generation that only this keeper knows of."""
        votes = self._votes.pop(id, None)
        if votes is not None and not self._pool.generations.is_agreed(id):
            self._counters.void += 1
            self._pool.generations.void(id)
            await self._tell(Voided(id, text))

    def rank_lost(self, rank: int) -> None:
        """Notify all trainers of the job that a rank of this host has died."""
        self._lost.add(rank)
        self.tell_later()

    def damaged(self, id: GenerationId) -> None:
        """Void a generation whose image has changed in memory."""
        self._votes.pop(id, None)
        if self.reporting.is_alone:
            self.reporting.lead.void(id)
        self._pool.generations.void(id)

    def look_for_missing(self) -> None:
        """Void or report the generations that a rank has skipped, so that nobody waits for them."""
        if self._incomplete():
            self._run_later(self._void_incomplete())
        if any(map(self._pool.generations.will_not_come, self._open)):
            self.tell_later()

    def tell_later(self) -> None:
        """Schedule a report of this keeper's news."""
        self._run_later(self.reporting.tell())

    def report(self) -> Report:
        """Return everything that this keeper knows."""
        generations = self._pool.generations
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
            self.writing.written,
            self.writing.waiting(epoch),
            tuple(sorted(self._lost)),
            self.writing.over,
        )

    def _made(self) -> GenerationId | None:
        """Return the generation to report as encoded: the last requested one, if its parity is
        held, else the newest with parity. The latter can be newer, requested by a leader that has
        died."""
        if self._guard_asked is not None and self._guards.holds(self._guard_asked):
            return self._guard_asked
        return self._guards.guarded

    def _whole(self, votes: dict[int, Vote]) -> Sequence[Vote]:
        """Return the votes of all ranks of this keeper, or none while some are missing, so that one
        report carries them all."""
        world = next(iter(votes.values())).world
        if set(self.reporting.own_ranks(world)) <= votes.keys():
            return list(votes.values())
        return ()

    async def follow(self, standing: Standing) -> None:
        """Act on a standing of the leader."""
        self._open = standing.open
        guards = (standing.guard, standing.guarded, standing.protected)
        agreed = {*standing.agreed, *filter(None, (*guards, standing.flushed))}
        for id in (*standing.void, *self._settled(standing, agreed)):
            is_news = self._is_news(id, Outcome.VOID, standing)
            # A restarted leader may not know that the generation was agreed before.
            if is_news and not self._pool.generations.is_agreed(id):
                self._counters.void += 1
                self._pool.generations.void(id)
                await self._tell(Voided(id, _VOID))
        for id in sorted(agreed):
            if self._is_news(id, Outcome.AGREED, standing):
                await self._agreed(id)
        named = {*standing.void, *agreed}
        self._known = {id: outcome for id, outcome in self._known.items() if id in named}
        await self._guard(standing)
        if standing.epoch == self.reporting.lead.epoch:
            for rank in sorted({*standing.lost} - self._announced):
                self._announced.add(rank)
                await self._tell(RankLost(rank))
        self._counters.report_failures = self.reporting.failures
        await self.writing.follow(standing)

    async def _unheard(self, problem: str) -> None:
        """Tell the trainers that pending votes and flushes fail because the leader is unreachable.
        Both stay, since this leader or the next one may still need them."""
        for id in sorted(self._votes):
            await self._tell(Voided(id, problem))
        await self.writing.unheard(problem)

    def _settled(self, standing: Standing, agreed: Collection[GenerationId]) -> list[GenerationId]:
        """Return the undecided generations whose outcome the leader has already forgotten, because
        this keeper was unreachable. Kept any longer, they would block later steps for ever."""
        settled = standing.settled
        if settled is None:
            return []
        named = {*agreed, *standing.open}
        undecided = {*self._pool.generations.undecided, *self._votes}
        return sorted(id for id in undecided if id <= settled and id not in named)

    def _is_news(self, id: GenerationId, outcome: Outcome, standing: Standing) -> bool:
        if id.epoch != standing.epoch or id in self._known:
            return False
        self._known[id] = outcome
        self._votes.pop(id, None)
        return True

    async def _agreed(self, id: GenerationId) -> None:
        generations = self._pool.generations
        if generations.agreed(id):
            self._counters.agreed += 1
            await self._tell(Agreed(id, self.writing.agreed(id)))
        elif generations.will_not_come(id):
            await self._tell(Voided(id, _LATER))
        # Otherwise a trainer may still hand its image over to this new keeper, see vote().

    async def _guard(self, standing: Standing) -> None:
        """Encode the requested generation, and retain everything that other keepers may rely on.

        The leader may die, or the epoch end, when another keeper already knows that all have
        encoded a generation. So each requested generation is retained until the leader has a report
        of every keeper, and the protected one until all keepers know of its successor.
        """
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
        self._pool.generations.guarding(kept)
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
        """Return the generations whose images and parity other keepers rely on, or may rely on."""
        newest = max(self._guarded, default=None)
        return {*self._guarding, *filter(None, (newest, self.protected))}

    async def close(self) -> None:
        """Stop reporting and encoding."""
        await self.reporting.close()
        await self._guards.close()


def _is_left(id: GenerationId | None, chosen: int | None) -> bool:
    return id is not None and chosen is not None and id.step <= chosen
