"""Keepers that are broken on purpose, each in one way. They prove that the simulator can find
errors.

A row describes the error and lists the replaced attributes: owner, name, and replacement. The
replacement is called like the original, with the original as its first argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from holdfast.storage.arenas.label import GenerationId
from holdfast.storage.arenas.messages import Agreed, Voided
from holdfast.storage.keeper.agreement import Agreement
from holdfast.storage.keeper.decisions import choice, votes
from holdfast.storage.keeper.decisions.generations import Generations
from holdfast.storage.keeper.decisions.lead import Lead
from holdfast.storage.keeper.decisions.slots import Content
from holdfast.storage.keeper.decisions.votes import Ballot, Outcome
from holdfast.storage.keeper.flushing import flush
from holdfast.storage.keeper.parity.guards import Guards
from holdfast.storage.training import keeper_inventory as memory_survey
from holdfast.storage.training.epochs import Epochs

from . import keeper_peers
from .breaking import Broken, Patch
from .keeper_host import HostKeeper
from .keeper_hosts import RANKS_MAX, Hosts
from .keeper_promises import Promises

Row = tuple[Any, str, Callable[..., Any]]


def keeper(name: str, *rows: Row, first: int = 0) -> Broken:
    """Return a broken keeper. ``first``: the first seed to try, if earlier ones expose nothing."""

    def patches() -> Iterator[Patch]:
        for owner, attribute, replacement in rows:
            yield owner, attribute, replaced(owner.__dict__[attribute], replacement)

    return Broken(name, patches, first=first)


def replaced(real: Any, replacement: Callable[..., Any]) -> Any:
    """Return a property or function that passes the original to its replacement."""
    if isinstance(real, property):
        return property(partial(replacement, real.fget))
    return lambda *given, **options: replacement(real, *given, **options)


def always(value: Any) -> Callable[..., Any]:
    """Replace a function by one that returns ``value``."""
    return lambda *given, **options: value


def only_agreed(real: Any, self: Generations, id: GenerationId) -> bool:
    """Return whether a generation is the newest agreed one; retain no other."""
    return id == self.newest_agreed


def late_pages(real: Any, self: HostKeeper, *given: Any) -> Any:
    """Write pages after the label."""
    self.tasks.append(real(self, *given))
    yield


def early_vote(real: Any, self: HostKeeper, *given: Any) -> Any:
    """Vote before sealing."""
    self.vote(given[-1])
    yield from real(self, *given)


def filled_in_any_epoch(real: Any, self: Generations, client: int, *given: Any) -> Any:
    """Treat each client as one of this epoch."""
    self._epochs[client] = self.epoch
    return real(self, client, *given)


def nothing_left_out(real: Any, self: Generations, *given: Any) -> Any:
    """Forget the steps that a rank has skipped."""
    self._left_out = []
    return real(self, *given)


def emptied_at_once(real: Any, self: Generations, chosen: int | None) -> None:
    """Free slots that are still being hashed."""
    real(self, chosen)
    for slot in self._slots.values():
        if slot.content is Content.ABANDONED:
            self._empty(slot)


def newest_of_rank(
    real: Any, self: Generations, client: int, id: GenerationId, rank: int
) -> int | None:
    """Open the newest image of a rank, whatever generation was requested."""
    found = [
        (slot.generation, number)
        for number, slot in self._slots.items()
        if slot.rank == rank and slot.content is Content.SEALED and slot.generation
    ]
    return max(found)[1] if found else None


def offering(**changed: Callable[[Any], Any]) -> Callable[..., Any]:
    """Change the inventory's statements about each generation."""

    def inventory(real: Any, self: HostKeeper) -> Any:
        found = real(self)
        entries = [
            replace(held, **{name: change(held) for name, change in changed.items()})
            for held in found.generations
        ]
        return replace(found, generations=tuple(entries))

    return inventory


def unpinned(real: Any, self: Generations, client: int, *given: Any) -> Any:
    """Release an opened image at once."""
    found = real(self, client, *given)
    self.released(client)
    return found


def unlimited(real: Any, *given: Any) -> Any:
    """Refuse a slot only for lack of slots."""
    problem = real(*given)
    return problem if problem and problem.reason.value == "no-free-slot" else None


def counted_twice(real: Any, self: Ballot, vote: Any) -> Outcome | None:
    """Count duplicates of a vote."""
    count = self.__dict__.setdefault("twice", {}).setdefault(vote.generation, [])
    count.append(vote)
    return Outcome.AGREED if len(count) == vote.world else None


def one_less(real: Any, self: Ballot, vote: Any) -> Any:
    """Accept one vote less than needed."""
    return real(self, replace(vote, world=max(1, vote.world - 1), rank=max(0, vote.rank - 1)))


def agreed_anyway(real: Any, self: Generations, id: GenerationId) -> bool:
    """Agree on a generation, whether it is complete or not."""
    of = self._generations.get(id)
    if of is not None:
        of.agreed = True
    return of is not None


BROKEN_ALONE = [
    keeper(
        "an image is labelled before its pages are written", (HostKeeper, "write_pages", late_pages)
    ),
    keeper("a rank votes before its image is sealed", (HostKeeper, "seal", early_vote)),
    keeper(
        "the newest agreed generation is overwritten", (Generations, "_is_wanted", always(False))
    ),
    keeper(
        "generations that may still be agreed are overwritten",
        (Generations, "_is_wanted", only_agreed),
    ),
    keeper(
        "the others keep a step that a rank has skipped",
        (Generations, "fill", nothing_left_out),
        (Generations, "_is_wanted", only_agreed),
    ),
    keeper("an older epoch is granted slots", (Generations, "fill", filled_in_any_epoch)),
    keeper(
        "memory mapped by a process of an older epoch is granted",
        (Generations, "_is_mapped_by_stale", always(False)),
    ),
    keeper(
        "a resume drops nothing, and records nothing",
        (Generations, "_drop_later", always(None)),
        (Epochs, "has_left", always(False)),
    ),
    keeper(
        "slots that a resume drops while they are hashed are granted at once",
        (Generations, "_drop_later", emptied_at_once),
    ),
    keeper(
        "each keeper counts epochs anew",
        (Epochs, "newest", always(-1)),
        (Epochs, "has_left", always(False)),
    ),
    keeper("a restart takes the newest image of each rank", (Generations, "open", newest_of_rank)),
    keeper(
        "a restart does not check that all ranks are there",
        (
            HostKeeper,
            "inventory",
            offering(agreed=lambda held: True, ranks=lambda held: tuple(range(held.world))),
        ),
        first=90,
    ),
    keeper("a restart does not verify what it reads", (Promises, "intact", always(True))),
    keeper(
        "images offered to a restart may be overwritten",
        (Generations, "open", unpinned),
        (Generations, "offer", always(None)),
        first=115,
    ),
    keeper("images being flushed may be overwritten", (Generations, "pin", always(()))),
    keeper("a keeper exceeds its budget", (Generations, "_no_room", unlimited)),
    keeper("duplicates of a vote count", (Ballot, "cast", counted_twice)),
    keeper("one vote less than all suffices", (Ballot, "cast", one_less)),
    keeper("contradicting votes agree", (votes, "_are_alike", always(True))),
    keeper(
        "a generation with an overwritten image is agreed",
        (Generations, "agreed", agreed_anyway),
        (Generations, "_is_wanted", only_agreed),
    ),
    keeper(
        "a capture counts though its slot was granted for a later step",
        (Generations, "is_filling", lambda real, self, slot, client, id: slot in self._slots),
    ),
    keeper(
        "surplus slots of a rank are never freed",
        (Generations, "_surplus", always([])),
        (Generations, "_free_thirds", always(None)),
    ),
    keeper(
        "slots of former ranks are never freed",
        (
            Generations,
            "_free_useless",
            lambda real, self, rank, nbytes, world: real(self, rank, nbytes, RANKS_MAX),
        ),
        (Generations, "_free_foreign", always(None)),
        first=220,
    ),
    keeper(
        "memory that has outlived a keeper is filled again",
        (
            Generations,
            "recall",
            lambda real, *given, **options: real(*given, **{**options, "outlived": False}),
        ),
    ),
    keeper(
        "a restarted keeper does not know which generations were agreed",
        (Generations, "was_agreed", always(None)),
    ),
    keeper(
        "a job begins an epoch with a state that a failed load has touched",
        (Promises, "raises", always(False)),
    ),
]


def one_is_enough(real: Any, self: Lead, report: Any) -> None:
    """Treat a generation as protected once one keeper has encoded it."""
    if self._guard is not None and report.guarded == self._guard:
        self._have_guarded = set(self.names)
    real(self, report)


def any_parity(real: Any, self: Lead, report: Any) -> None:
    """Accept parity of any generation as that of the requested one."""
    real(self, replace(report, guarded=self._guard) if report.guarded else report)


def forgetful_resume(real: Any, self: Agreement, epoch: int, *given: Any) -> None:
    """Drop all protected steps on a resume."""
    if epoch > self.reporting.lead.epoch:
        self._guarded, self._guarding, self.protected = set(), set(), None
        self._pool.generations.guarding(())
    real(self, epoch, *given)


def silent_on_protection(real: Any, self: Agreement) -> Any:
    """Report protected steps only if this keeper leads."""
    said = real(self)
    return said if self.reporting.leads else replace(said, guarded_by_all=None)


def entered_without_end(real: Any, self: HostKeeper, trainer: Any) -> Any:
    """Hide from the keeper which flush has ended."""
    trainer.ended = None
    return real(self, trainer)


def asked_once(real: Any, self: HostKeeper, trainer: Any, step: int) -> None:
    """Accept each flush request once, even if it was sent to an earlier keeper."""
    seen = trainer.__dict__.setdefault("seen", set())
    if step not in seen:
        seen.add(step)
        real(self, trainer, step)


async def agreed_or_void(real: Any, self: Agreement, id: GenerationId) -> None:
    """Void an agreed step without a local image, although one may still be handed over."""
    has_it = self._pool.generations.agreed(id)
    await self._tell(Agreed(id) if has_it else Voided(id, "no image"))
    if has_it:
        self.writing.agreed(id)


def settled_by_silence(
    real: Any, self: Agreement, standing: Any, agreed: Any
) -> list[GenerationId]:
    """Treat every generation that the leader does not name as void."""
    named = {*agreed, *standing.open}
    return [id for id in self._pool.generations.undecided if id not in named]


async def newest_pieces(real: Any, self: Any, name: str, number: int) -> Any:
    """Read pieces of the newest images, of any generation."""
    found = await keeper_peers._at(name)
    newest: dict[int, Any] = {}
    for slot in found.slots.values():
        if slot.label is not None:
            before = newest.get(slot.label.rank)
            if before is None or slot.label.generation > before.label.generation:
                newest[slot.label.rank] = slot
    return {rank: slot.memory.pieces[number] for rank, slot in newest.items()}


def looks_once(real: Any, self: Hosts, job: Any) -> Any:
    """Choose by the first answers of all keepers."""
    stocks, others, unheard = yield from self.answers(job)
    for host in self.hosts.values():
        self.note_protected(host.keeper)
    promised = [one for one in (self.agreed, self.guarded) if one is not None]
    return stocks, others, unheard, promised


def any_attempt(real: Any, self: Lead, report: Any) -> None:
    """Count a part written for one attempt towards another."""
    part, ordered = report.written, self._flush
    if part is not None and ordered is not None:
        report = replace(report, written=replace(part, attempt=ordered.attempt))
    real(self, report)


async def nothing_written(*given: Any) -> dict[str, Any]:
    """Wait for no keeper."""
    return {}


def damage_ignored(real: Any, *given: Any) -> Any:
    """Treat damaged images as intact."""
    return real(*given[:-1], memory_survey.Tried(failed=given[-1].failed))


def rebuilt_in_place(
    real: Any, stocks: Any, rebuilders: Any, is_of_use: Any, damaged: Any = ()
) -> Any:
    """Let the keeper of a damaged image rebuild it."""
    names = [name for _, _, name in damaged if name in rebuilders]
    return real(stocks, names[:1] or rebuilders, is_of_use, damaged)


BROKEN_HOSTS = [
    keeper(
        "one rank raises where a load has failed, and another resumes",
        (
            Promises,
            "raises",
            lambda real, self, found, failed, touched: found is None and bool(touched),
        ),
    ),
    keeper(
        "a keeper never reports that a step will not come",
        (Generations, "will_not_come", always(False)),
    ),
    keeper(
        "a step is protected once one keeper has encoded it", (Lead, "_note_guards", one_is_enough)
    ),
    keeper(
        "parity of another step counts as parity of this one", (Lead, "_note_guards", any_parity)
    ),
    keeper(
        "images that parity was made of may be overwritten", (Generations, "guarding", always(None))
    ),
    keeper(
        "parity is dropped before all keepers have encoded the next step",
        (Guards, "keep", lambda real, self, ids: real(self, ())),
        first=30,
    ),
    keeper("a resume gives up what is protected", (Agreement, "enter", forgetful_resume)),
    keeper(
        "a new leader does not hear what is protected", (Agreement, "report", silent_on_protection)
    ),
    keeper(
        "a new leader does not hear which flushes wait for it",
        (Agreement, "report", lambda real, self: replace(real(self), wanted=())),
        first=40,
    ),
    keeper(
        "a new leader does not hear which flush has ended",
        (Agreement, "report", lambda real, self: replace(real(self), ended=None)),
        first=700,
    ),
    keeper(
        "a trainer does not tell a new keeper which flush has ended",
        (HostKeeper, "enter", entered_without_end),
        first=700,
    ),
    keeper(
        "a request to flush is lost with the keeper that it was sent to",
        (HostKeeper, "wish", asked_once),
    ),
    keeper(
        "a new keeper voids an agreed step before its images are handed over",
        (Agreement, "_agreed", agreed_or_void),
    ),
    keeper(
        "steps that a new leader has not heard of are void",
        (Agreement, "_settled", settled_by_silence),
    ),
    keeper(
        "a rebuilt image is not compared with its checksums",
        (keeper_peers, "is_sealed", always(True)),
        (Promises, "intact", always(True)),
    ),
    keeper("parity is made of images of any step", (keeper_peers.Peers, "pieces", newest_pieces)),
    keeper(
        "a restart resumes from a step that is not agreed",
        (HostKeeper, "inventory", offering(agreed=lambda held: True)),
        first=175,
    ),
    keeper(
        "a restart resumes from a dropped step",
        (Epochs, "has_left", always(False)),
        (Generations, "_drop_later", always(None)),
        first=50,
    ),
    keeper(
        "a restart does not look for parity", (choice, "_rebuilt", always("it is lost")), first=8
    ),
    keeper(
        "steps offered to a restart are dropped while it chooses",
        (Generations, "offer", always(None)),
        (Guards, "offer", always(None)),
        first=160,
    ),
    keeper(
        "a restart goes by what a keeper offered before the others did",
        (Hosts, "survey", looks_once),
        first=95,
    ),
    keeper(
        "a restart does not wait for keepers that do not answer",
        (memory_survey, "awaited", always(False)),
        first=70,
    ),
    keeper("parts written for one attempt count for another", (Lead, "hear", any_attempt)),
    keeper(
        "a checkpoint is committed though a keeper has written nothing",
        (flush, "_written", nothing_written),
    ),
    keeper(
        "the next epoch follows the newest one in storage", (Epochs, "newest", always(-1)), first=18
    ),
    keeper(
        "a damaged image counts as held",
        (memory_survey, "kept_in_memory", damage_ignored),
        first=50,
    ),
    keeper(
        "a keeper takes its damaged image for a rebuilt one",
        (memory_survey, "choices", rebuilt_in_place),
        (HostKeeper, "is_whole", always(True)),
        first=50,
    ),
]
