"""Keepers that are wrong on purpose, each in one way. A simulator that does not catch them proves
nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from holdfast.storage.arenas.label import GenerationId, Label
from holdfast.storage.arenas.messages import Inventory
from holdfast.storage.keeper.decisions import votes
from holdfast.storage.keeper.decisions.generations import Generations
from holdfast.storage.keeper.decisions.slots import Grant, Refusal
from holdfast.storage.keeper.decisions.votes import Ballot, Outcome, Vote
from holdfast.storage.training.epochs import Epochs

from .breaking import Broken, Patch, listed_in
from .keepers import SIZE_MAX, Held, Memory, Record, SimulatedKeeper, State, Task, Trainer

__all__ = ["BROKEN_KEEPERS", "contradicting", "one_missing", "one_raises", "touched_goes_on"]

BROKEN_KEEPERS: list[Broken] = []

broken = listed_in(BROKEN_KEEPERS)


@broken("an image is labelled before its pages are written")
def _label_first() -> Iterator[Patch]:
    real = SimulatedKeeper.write_pages

    def late(self: SimulatedKeeper, memory: Memory, hashed: list[State | None]) -> Task:
        self.tasks.append(real(self, memory, hashed))
        yield

    yield SimulatedKeeper, "write_pages", late


@broken("a rank votes before its image is sealed")
def _early_vote() -> Iterator[Patch]:
    real = SimulatedKeeper.seal

    def early(self: SimulatedKeeper, trainer: Trainer, slot: int, held: Held, draft: Label) -> Task:
        self.vote(draft)
        yield from real(self, trainer, slot, held, draft)

    yield SimulatedKeeper, "seal", early


@broken("the newest agreed generation is written over")
def _overwritten() -> Iterator[Patch]:
    yield Generations, "_is_wanted", lambda self, id: False


@broken("what may yet be agreed is written over")
def _always_ahead() -> Iterator[Patch]:
    yield Generations, "_is_wanted", lambda self, id: id == self.newest_agreed


@broken("a step that a rank has left out is kept by the others")
def _left_out_alone() -> Iterator[Patch]:
    real = Generations.fill

    def fill(self: Generations, *given: Any) -> Grant | Refusal:
        self._left_out = []
        return real(self, *given)

    yield Generations, "fill", fill
    yield Generations, "_is_wanted", lambda self, id: id == self.newest_agreed


@broken("an older epoch is granted slots")
def _any_epoch() -> Iterator[Patch]:
    real = Generations.fill

    def fill(self: Generations, client: int, *given: Any) -> Grant | Refusal:
        self._epochs[client] = self.epoch
        return real(self, client, *given)

    yield Generations, "fill", fill


@broken("memory that a process of an older epoch has mapped is handed out")
def _mapped() -> Iterator[Patch]:
    yield Generations, "_is_mapped_by_stale", lambda self, slot: False


@broken("a resume drops nothing, and records nothing")
def _nothing_dropped() -> Iterator[Patch]:
    yield Generations, "_drop_later", lambda self, chosen: None
    yield Epochs, "has_left", lambda self, generation: False


@broken("what a resume drops while it is hashed is handed out at once")
def _hashed_still() -> Iterator[Patch]:
    real = Generations._drop_later

    def drop(self: Generations, chosen: int | None) -> None:
        real(self, chosen)
        for slot in self._slots.values():
            if slot.content.name == "ABANDONED":
                self._empty(slot)

    yield Generations, "_drop_later", drop


@broken("epochs are counted anew by each keeper")
def _epochs_anew() -> Iterator[Patch]:
    yield Epochs, "newest", property(lambda self: -1)
    yield Epochs, "has_left", lambda self, generation: False


@broken("a restart takes the newest image of each rank")
def _mixture() -> Iterator[Patch]:
    def newest(self: Generations, client: int, id: GenerationId, rank: int) -> int | None:
        found = [
            (slot.generation, number)
            for number, slot in self._slots.items()
            if slot.rank == rank and slot.content.name == "SEALED" and slot.generation
        ]
        return max(found)[1] if found else None

    yield Generations, "open", newest


def _offering(**changed: Any) -> Any:
    real = SimulatedKeeper.inventory

    def inventory(self: SimulatedKeeper) -> Inventory:
        found = real(self)
        generations = [
            replace(held, **{name: change(held) for name, change in changed.items()})
            for held in found.generations
        ]
        return replace(found, generations=tuple(generations))

    return inventory


@broken("a keeper says of all that it holds that it is agreed")
def _all_agreed() -> Iterator[Patch]:
    yield SimulatedKeeper, "inventory", _offering(agreed=lambda held: True)


@broken("a restart does not look whether all ranks are there")
def _some_ranks() -> Iterator[Patch]:
    everything = _offering(agreed=lambda held: True, ranks=lambda held: tuple(range(held.world)))
    yield SimulatedKeeper, "inventory", everything


@broken("a restart does not verify what it reads")
def _unverified() -> Iterator[Patch]:
    yield Record, "intact", lambda self, held, pieces: True


@broken("what a restart was offered may be written over")
def _unpinned() -> Iterator[Patch]:
    real = Generations.open

    def opened(self: Generations, client: int, id: GenerationId, rank: int) -> int | None:
        found = real(self, client, id, rank)
        self.released(client)
        return found

    yield Generations, "open", opened
    yield Generations, "offer", lambda self, client: None


@broken("what is flushed may be written over")
def _flushed_over() -> Iterator[Patch]:
    yield Generations, "pin", lambda self, id: ()


@broken("memory beyond the budget is used")
def _no_budget() -> Iterator[Patch]:
    real = Generations._no_room

    def room(self: Generations, rank: int, nbytes: int) -> Refusal | None:
        problem = real(self, rank, nbytes)
        return problem if problem and problem.reason.value == "no-free-slot" else None

    yield Generations, "_no_room", room


@broken("a vote that comes twice counts twice")
def _twice() -> Iterator[Patch]:
    def cast(self: Ballot, vote: Vote) -> Outcome | None:
        count = self.__dict__.setdefault("twice", {}).setdefault(vote.generation, [])
        count.append(vote)
        return Outcome.AGREED if len(count) == vote.world else None

    yield Ballot, "cast", cast


@broken("one vote less than all is enough")
def one_missing() -> Iterator[Patch]:
    """See its name on the list."""
    real = Ballot.cast

    def cast(self: Ballot, vote: Vote) -> Outcome | None:
        return real(self, replace(vote, world=max(1, vote.world - 1), rank=max(0, vote.rank - 1)))

    yield Ballot, "cast", cast


@broken("votes that contradict each other agree")
def contradicting() -> Iterator[Patch]:
    """See its name on the list."""
    yield votes, "_are_alike", lambda cast: True


@broken("a generation is agreed of which an image was written over")
def _agreed_though_lost() -> Iterator[Patch]:
    def agreed(self: Generations, id: GenerationId) -> bool:
        of = self._generations.get(id)
        if of is None:
            return False
        of.agreed = True
        return True

    yield Generations, "agreed", agreed
    yield Generations, "_is_wanted", lambda self, id: id == self.newest_agreed


@broken("a capture counts though its slot was given to a later step")
def _late_capture() -> Iterator[Patch]:
    def any_of(self: Generations, slot: int, client: int, id: GenerationId) -> bool:
        return slot in self._slots

    yield Generations, "is_filling", any_of


@broken("slots of one rank that are in the way of others are kept for ever")
def _surplus_kept() -> Iterator[Patch]:
    yield Generations, "_surplus", lambda self, rank: []
    yield Generations, "_free_thirds", lambda self, rank, nbytes: ()


@broken("slots of ranks that are no more are kept for ever")
def _former_ranks_kept() -> Iterator[Patch]:
    real = Generations._free_useless

    def free(self: Generations, rank: int, nbytes: int, world: int) -> tuple[int, ...]:
        return real(self, rank, nbytes, SIZE_MAX)

    yield Generations, "_free_useless", free
    yield Generations, "_free_foreign", lambda self, rank, nbytes: None


@broken("memory that has outlived a keeper is filled again")
def _outlived_filled() -> Iterator[Patch]:
    real = Generations.recall

    def recall(self: Generations, *args: Any, **options: Any) -> int | Refusal:
        return real(self, *args, **{**options, "outlived": False})

    yield Generations, "recall", recall


@broken("a keeper that is started anew does not know what was agreed on")
def _agreement_forgotten() -> Iterator[Patch]:
    yield Generations, "was_agreed", lambda self, id: None


@broken("a state that a failed load has touched begins an epoch")
def touched_goes_on() -> Iterator[Patch]:
    """No rank looks at what a failed load has left."""
    yield Record, "raises", lambda self, found, failed, touched: False


@broken("one rank raises where a load has failed, and another goes on")
def one_raises() -> Iterator[Patch]:
    """Each rank looks only at what it has read itself."""

    def raises(self: Record, found: Any, failed: Any, touched: list[State | None]) -> bool:
        return found is None and bool(touched)

    yield Record, "raises", raises
