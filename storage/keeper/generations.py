"""Which slots there are, what is in them, and which of them may be filled: a pure state machine. No
I/O, no clock.

A slot holds the image of one rank. A *generation* is one step of the job: it is *agreed* once all
ranks' images are sealed and alike where they have to be. What may not be written over:

- the newest generation that is agreed, since a restart may need it; or what this epoch went on
  from, until one of this epoch is agreed, since it may not be known here that it is agreed, too;
- the newest of which all keepers have made parity, since a restart without one of the hosts may
  need it; and the one that they make parity of now;
- one that is being sealed, flushed, or read by a trainer that restarts, even if it was dropped;
- memory that a living process of an older epoch has mapped: there is no way to take that from it;
  nor memory that has outlived a keeper, of which nobody knows who has mapped it;
- an image of a generation that may yet be agreed, or a rank that is ahead would always write over
  what the others are about to seal.

Where a rank has no slot left, the step is left out, for all ranks. Each resume begins an *epoch*.
What it did not go on from of later steps is dropped for good, or a later restart might jump to an
abandoned branch.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass

from ...core.units import size_text
from ..arenas.label import GenerationId
from .slots import Content, Grant, HeldRanks, Reason, Refusal, Slot

__all__ = ["SLOTS_PER_RANK", "Generations"]

SLOTS_PER_RANK = 3
"""The newest agreed one, the one that is about to be, and the one that is being filled."""
LEFT_OUT_KEPT = 64
"""So many steps that were left out are remembered: ranks are hardly ever that far apart."""


@dataclass(eq=False)
class _Generation:
    world: int
    agreed: bool = False
    was_agreed: bool = False
    """As the keeper before knew. Until it is known here anew, too, or its epoch is over, an older
    one does not give way to it: other keepers may rely on that."""
    lost: bool = False
    """Whether a rank has no image of it, or not any more: it will not be whole."""


class Generations:
    """The slots of one keeper. A *client* is a number for one trainer's process."""

    def __init__(self, budget_nbytes: int, slots_per_rank: int = SLOTS_PER_RANK) -> None:
        self.budget_nbytes = budget_nbytes
        self._slots_per_rank = slots_per_rank
        self._numbers = itertools.count()
        self._slots: dict[int, Slot] = {}
        self._generations: dict[GenerationId, _Generation] = {}
        self._epochs: dict[int, int] = {}
        """The epoch that each living client is in."""
        self._ranks: dict[int, int] = {}
        """The rank of each living client."""
        self.epoch = -1
        self._flushing: dict[GenerationId, list[list[Slot]]] = {}
        """What flushes read, even where it was dropped meanwhile."""
        self._newest_step: dict[int, int] = {}
        """By rank: the newest step of this epoch that was granted."""
        self._left_out: list[int] = []
        """The newest steps of this epoch for which a rank had no slot, here or on another host."""
        self._chosen: GenerationId | None = None
        """What this epoch went on from, if it is here."""
        self._guarding: frozenset[GenerationId] = frozenset()

    @property
    def slots(self) -> set[int]:
        """The numbers of all slots."""
        return set(self._slots)

    @property
    def newest_agreed(self) -> GenerationId | None:
        """What a restart can go on from, whichever processes die."""
        known = (
            id
            for id, of in self._generations.items()
            if of.agreed or (of.was_agreed and id.epoch < self.epoch)
        )
        return max(known, default=None)

    @property
    def undecided(self) -> list[GenerationId]:
        """Those of this epoch whose outcome is not known here."""
        return [
            id for id, of in self._generations.items() if id.epoch == self.epoch and not of.agreed
        ]

    def guarding(self, ids: Collection[GenerationId]) -> None:
        """Parity is made of these generations, or has been made of all their images: other keepers
        read them, and they are what is left where a host is lost."""
        self._guarding = frozenset(ids)

    def will_not_come(self, id: GenerationId) -> bool:
        """Whether a rank of this keeper will never seal its image of this generation: it has none,
        and has gone on."""
        if id.epoch != self.epoch:
            return True
        of = self._generations.get(id)
        if id.step in self._left_out or (of is not None and of.lost):
            return True
        held = {slot.rank for slot in self._slots.values() if slot.generation == id}
        return any(
            rank not in held and self._newest_step.get(rank, -1) >= id.step
            for client, rank in self._ranks.items()
            if self._epochs.get(client) == self.epoch
        )

    def enter(self, client: int, rank: int, epoch: int, chosen: int | None) -> Refusal | None:
        """``client`` goes on in ``epoch``, from step ``chosen``; None: from the beginning. The
        first to enter an epoch ends the one before."""
        # What was made again after its host was lost may be all that is known of its epoch.
        newest = max([self.epoch, *(id.epoch for id in self._generations)])
        if epoch < newest:
            return Refusal(Reason.STALE_EPOCH, f"epoch {epoch} is over: this is epoch {newest}")
        self._epochs[client] = epoch
        self._ranks[client] = rank
        if epoch > self.epoch:
            self.epoch = epoch
            self._newest_step = {}
            self._left_out = []
            self._drop_later(chosen)
            self._chosen = max((id for id in self._generations if id.step == chosen), default=None)
        return None

    def _drop_later(self, chosen: int | None) -> None:
        for slot in self._slots.values():
            if slot.content is Content.FILLING:
                self._empty(slot)
            elif slot.content is Content.CAPTURED:
                slot.content = Content.ABANDONED
        # What is of this epoch was made again after its host was lost: a trainer of it comes late.
        earlier = [id for id in self._generations if id.epoch < self.epoch]
        for id in [id for id in earlier if chosen is None or id.step > chosen]:
            self._forget(id)

    def _empty(self, slot: Slot) -> None:
        """There is no image in it; nor is there a generation any more if this was its last."""
        id = slot.generation
        slot.empty()
        if id is not None and not self._is_held(id):
            self._generations.pop(id, None)

    def _forget(self, id: GenerationId) -> None:
        """Its images are no more, but one that is being filled now stays so."""
        self._generations.pop(id, None)
        for slot in self._slots.values():
            if slot.generation == id and slot.content is Content.SEALED:
                slot.empty()

    def fill(self, client: int, rank: int, step: int, nbytes: int, world: int) -> Grant | Refusal:
        """A slot of ``nbytes`` for the image of ``rank`` at ``step`` of this epoch."""
        if self._epochs.get(client) != self.epoch:
            return Refusal(Reason.STALE_EPOCH, f"this is epoch {self.epoch}")
        if step <= self._newest_step.get(rank, -1):
            return Refusal(Reason.OLD_STEP, f"step {step} is not after the one before")
        if step in self._left_out:
            return Refusal(Reason.NO_FREE_SLOT, f"another rank has no slot for step {step}")
        self._give_up_behind(rank, step)
        freed = self._free_useless(rank, nbytes, world)
        usable = self._by_loss(rank)
        number = usable[0] if usable else None
        fresh = False
        if number is None or self._slots[number].generation is not None:
            problem, made_free = self._make_room(rank, nbytes)
            freed += made_free
            if problem is None:
                number = next(self._numbers)
                self._slots[number] = Slot(rank, nbytes, made=False)
                fresh = True
            elif number is None:
                self._leave_out(step)
                return problem
        self._begin_filling(self._slots[number], client, GenerationId(self.epoch, step), world)
        self._newest_step[rank] = step
        return Grant(number, fresh, freed)

    def _make_room(self, rank: int, nbytes: int) -> tuple[Refusal | None, tuple[int, ...]]:
        """Why there is no room for one more slot of ``rank``, if there is none; and what was freed
        for it."""
        freed: tuple[int, ...] = ()
        problem = self._no_room(rank, nbytes)
        if problem is not None and problem.reason is Reason.NO_MEMORY:
            freed += self._free_foreign(rank)
            problem = self._no_room(rank, nbytes)
        if problem is not None and problem.reason is Reason.NO_MEMORY:
            freed += self._free_thirds(rank, nbytes)
            problem = self._no_room(rank, nbytes)
        return problem, freed

    def _leave_out(self, step: int) -> None:
        self._left_out = [*self._left_out, step][-LEFT_OUT_KEPT:]

    def _give_up_behind(self, rank: int, step: int) -> None:
        """``rank`` goes on to ``step``: what it has not captured before will not be whole."""
        held = {slot.generation for slot in self._slots.values() if slot.rank == rank}
        for id, of in self._generations.items():
            if id.epoch == self.epoch and id.step < step and id not in held:
                of.lost = of.lost or not of.agreed

    def _lose(self, slot: Slot) -> None:
        """What is in it gives way: other slots may hold more of its generation."""
        of = self._generations.get(slot.generation) if slot.generation else None
        if of is not None:
            of.lost = True
            of.agreed = of.was_agreed = False
        self._empty(slot)

    def _begin_filling(self, slot: Slot, client: int, id: GenerationId, world: int) -> None:
        self._lose(slot)
        slot.content = Content.FILLING
        slot.generation = id
        slot.filler = client
        slot.mappers.add(client)
        self._generations.setdefault(id, _Generation(world))

    def _is_held(self, id: GenerationId) -> bool:
        return any(slot.generation == id for slot in self._slots.values())

    def _free_useless(self, rank: int, nbytes: int, world: int) -> tuple[int, ...]:
        """Slots whose memory has outlived a keeper, those of ranks that are no more, and those of a
        former size of the state are of no use once nothing protects what is in them."""
        freed = [
            number
            for number, slot in self._slots.items()
            if (
                slot.outlived or slot.rank >= world or (slot.rank == rank and slot.nbytes != nbytes)
            )
            and self._may_be_filled(slot)
        ]
        for of_rank in range(world):
            freed += [number for number in self._surplus(of_rank) if number not in freed]
        return self._given_up(freed)

    def _free_foreign(self, rank: int) -> tuple[int, ...]:
        """Slots of ranks that another keeper has now are in the way of others, once nothing
        protects what is in them."""
        ranks = self._ranks_now(rank)
        freed = [
            number
            for number, slot in self._slots.items()
            if slot.rank not in ranks and not slot.mappers and self._may_be_filled(slot)
        ]
        return self._given_up(freed)

    def _free_thirds(self, rank: int, nbytes: int) -> tuple[int, ...]:
        """A third slot of another rank gives way to the first or second of ``rank``: no step comes
        about without an image of each. What an epoch went on from takes room until then."""
        mine = sum(slot.nbytes == nbytes for slot in self._of_rank(rank).values())
        ranks = self._ranks_now(rank)
        if mine >= self._slots_per_rank - 1 or self._wanted_nbytes(ranks, rank, nbytes) > (
            self.budget_nbytes
        ):
            return ()
        freed = []
        for other in sorted(ranks - {rank}):
            if len(self._of_rank(other)) >= self._slots_per_rank:
                freed += self._by_loss(other)[:1]
        return self._given_up(freed)

    def _given_up(self, numbers: Collection[int]) -> tuple[int, ...]:
        """These slots are no more."""
        for number in numbers:
            self._lose(self._slots[number])
            del self._slots[number]
        return tuple(numbers)

    def _surplus(self, rank: int) -> list[int]:
        """Slots that took the place of others, which a process of an older epoch had mapped until
        it ended: the other ranks may have too few because of them."""
        count = sum(not self._is_mapped_by_stale(slot) for slot in self._of_rank(rank).values())
        return self._by_loss(rank)[: max(0, count - self._slots_per_rank)]

    def _of_rank(self, rank: int) -> dict[int, Slot]:
        return {number: slot for number, slot in self._slots.items() if slot.rank == rank}

    def _by_loss(self, rank: int) -> list[int]:
        """The slots of ``rank`` that may be filled, those whose loss matters least first."""
        mine = self._of_rank(rank)
        usable = [number for number, slot in mine.items() if self._may_be_filled(slot)]
        return sorted(usable, key=lambda number: mine[number].generation or GenerationId(-1, -1))

    def _may_be_filled(self, slot: Slot) -> bool:
        if not slot.made or slot.content not in (Content.FREE, Content.SEALED):
            return False
        if slot.readers or slot.flushes or self._is_mapped_by_stale(slot):
            return False
        return slot.generation is None or not self._is_wanted(slot.generation)

    def _is_wanted(self, id: GenerationId) -> bool:
        """Whether it is the newest that is agreed, or may become it."""
        newest = self._gone_on_from
        if id == newest or id in self._guarding:
            return True
        of = self._generations.get(id)
        if of is None or of.lost:
            return False
        return id.epoch == self.epoch and (newest is None or id > newest)

    @property
    def _gone_on_from(self) -> GenerationId | None:
        """What the next restart goes on from, as far as it is known here."""
        newest = self.newest_agreed
        if self._chosen in self._generations and (newest is None or newest.epoch < self.epoch):
            return self._chosen
        return newest

    def _is_mapped_by_stale(self, slot: Slot) -> bool:
        """Whether a living process of an older epoch may write to it."""
        return any(self._epochs.get(client, -1) < self.epoch for client in slot.mappers)

    def _no_room(self, rank: int, nbytes: int) -> Refusal | None:
        mine = [
            slot
            for slot in self._slots.values()
            if slot.rank == rank and not self._is_mapped_by_stale(slot)
        ]
        if len(mine) >= self._slots_per_rank:
            text = f"all {len(mine)} images of rank {rank} are in use"
            return Refusal(Reason.NO_FREE_SLOT, text)
        ranks = self._ranks_now(rank)
        wanted = self._wanted_nbytes(ranks, rank, nbytes)
        held = sum(slot.nbytes for slot in self._slots.values())
        if wanted <= self.budget_nbytes and held + nbytes <= self.budget_nbytes:
            return None
        if wanted > self.budget_nbytes:
            text = (
                f"{self._slots_per_rank} images of {size_text(nbytes)} for {len(ranks)} "
                f"rank{'s' * (len(ranks) > 1)} take {size_text(wanted)}, and there is room for "
                f"{size_text(self.budget_nbytes)}"
            )
        else:
            text = (
                f"{size_text(held)} are held, some of it by processes of former epochs, and there "
                f"is room for {size_text(self.budget_nbytes)}"
            )
        return Refusal(Reason.NO_MEMORY, text)

    def _ranks_now(self, rank: int) -> set[int]:
        """Those that have entered this epoch, and ``rank``."""
        entered = {
            of for client, of in self._ranks.items() if self._epochs.get(client) == self.epoch
        }
        return entered | {rank}

    def _wanted_nbytes(self, ranks: Collection[int], rank: int, nbytes: int) -> int:
        """What all slots of ``ranks`` take, where an image of ``rank`` has ``nbytes``."""
        sizes = dict.fromkeys(ranks, nbytes)
        for slot in self._slots.values():
            of_epoch = slot.generation is not None and slot.generation.epoch == self.epoch
            if slot.rank in ranks and slot.rank != rank and of_epoch:
                sizes[slot.rank] = slot.nbytes
        return self._slots_per_rank * sum(sizes.values())

    def made(self, slot: int) -> None:
        """A fresh slot has its memory, whatever has become of its filler meanwhile."""
        self._slots[slot].made = True

    def unmade(self, slot: int) -> None:
        """The memory of a fresh slot could not be had."""
        self._empty(self._slots[slot])
        del self._slots[slot]

    def is_filling(self, slot: int, client: int, id: GenerationId) -> bool:
        """Whether ``client`` fills the slot with its image of this generation."""
        held = self._slots.get(slot)
        return (
            held is not None
            and held.content is Content.FILLING
            and (held.filler, held.generation) == (client, id)
        )

    def captured(self, slot: int) -> None:
        """All bytes of the image are in it, whatever becomes of its writer; it is sealed now. To be
        followed by :meth:`sealed` or :meth:`unsealed`, once nothing writes to it any more."""
        self._slots[slot].content = Content.CAPTURED

    def sealed(self, slot: int) -> None:
        """It is hashed and labelled."""
        self._slots[slot].content = Content.SEALED

    def unsealed(self, slot: int) -> None:
        """Sealing has ended without a label."""
        self._empty(self._slots[slot])

    def dropped(self, slot: int, client: int) -> bool:
        """``client`` has captured nothing into it. Whether it was the one to fill it."""
        held = self._slots.get(slot)
        if held is None or held.content is not Content.FILLING or held.filler != client:
            return False
        self._empty(held)
        return True

    def drop_unfinished(self, client: int) -> None:
        """``client`` will not go on with what it was filling."""
        for number in self._slots:
            self.dropped(number, client)

    def is_sealing(self, slot: int, id: GenerationId) -> bool:
        """Whether the image of this generation is still what is being sealed there."""
        held = self._slots.get(slot)
        return held is not None and held.content is Content.CAPTURED and held.generation == id

    def agreed(self, id: GenerationId) -> bool:
        """All ranks have sealed it, and it is alike where it has to be. Whether it can be gone on
        from: not where a rank that was ahead has written over its image meanwhile."""
        of = self._generations.get(id)
        if of is None or of.lost:
            return False
        of.agreed = True
        return True

    def is_agreed(self, id: GenerationId) -> bool:
        """Whether it is."""
        of = self._generations.get(id)
        return of is not None and of.agreed

    def was_agreed(self, id: GenerationId) -> None:
        """The keeper before knew that it is agreed on: a restart may go on from it."""
        self._generations[id].was_agreed = True

    def is_restorable(self, id: GenerationId) -> bool:
        """Whether a restart may go on from it."""
        of = self._generations.get(id)
        return of is not None and (of.agreed or of.was_agreed)

    def void(self, id: GenerationId) -> None:
        """It does not belong together, is damaged, or a rank has nothing of it. A rank that is
        behind leaves it out."""
        self._forget(id)
        if id.epoch == self.epoch:
            self._leave_out(id.step)

    def flushing(self, id: GenerationId) -> None:
        """It is read to be written to storage; to be followed by :meth:`flushed`."""
        slots = [
            slot
            for slot in self._slots.values()
            if (slot.generation, slot.content) == (id, Content.SEALED)
        ]
        for slot in slots:
            slot.flushes += 1
        self._flushing.setdefault(id, []).append(slots)

    def flushed(self, id: GenerationId) -> None:
        """That has ended, well or not."""
        flushes = self._flushing[id]
        for slot in flushes.pop():
            slot.flushes -= 1
        if not flushes:
            del self._flushing[id]

    def open(self, client: int, id: GenerationId, rank: int) -> int | None:
        """The slot of an image, which ``client`` reads until it is :meth:`released`; None where
        there is none."""
        for number, slot in self._slots.items():
            if (slot.generation, slot.rank, slot.content) == (id, rank, Content.SEALED):
                slot.readers.add(client)
                return number
        return None

    def holds(self, slot: int, id: GenerationId) -> bool:
        """Whether a sealed image of this generation is in it, and was not given up."""
        held = self._slots.get(slot)
        return held is not None and (held.generation, held.content) == (id, Content.SEALED)

    def offer(self, client: int) -> None:
        """``client`` is about to choose what to go on from: what is agreed stays until
        :meth:`released`."""
        for slot in self._slots.values():
            id = slot.generation
            if slot.content is not Content.SEALED or id is None:
                continue
            if self.is_restorable(id) or id == self._gone_on_from:
                slot.readers.add(client)

    def released(self, client: int) -> None:
        """``client`` reads nothing any more."""
        for slot in self._slots.values():
            slot.readers.discard(client)

    def client_gone(self, client: int) -> None:
        """Its process has ended: it has no memory mapped."""
        self._epochs.pop(client, None)
        self._ranks.pop(client, None)
        self.drop_unfinished(client)
        for slot in self._slots.values():
            slot.mappers.discard(client)
            slot.readers.discard(client)

    def adopt(
        self, client: int, id: GenerationId, rank: int, world: int, nbytes: int
    ) -> int | Refusal:
        """A slot for a sealed image of this epoch, which ``client`` has from a keeper that is gone.
        Of older epochs it is not known here what a resume has dropped."""
        if id.epoch != self.epoch or self._epochs.get(client) != self.epoch:
            return Refusal(Reason.STALE_EPOCH, f"this is epoch {self.epoch}")
        for number, slot in self._slots.items():
            if slot.generation == id and slot.rank == rank:
                if slot.outlived and slot.nbytes == nbytes:
                    # It was granted to this client, and so to none of an older epoch that lives.
                    slot.outlived = False
                    slot.mappers.add(client)
                    self._newest_step[rank] = max(self._newest_step.get(rank, -1), id.step)
                    return number
                return Refusal(Reason.DUPLICATE, f"step {id.step} of rank {rank} is held already")
        problem = self._beyond_budget(nbytes)
        if problem is not None:
            return problem
        number = next(self._numbers)
        self._slots[number] = Slot(rank, nbytes, Content.SEALED, id, mappers={client})
        self._generations.setdefault(id, _Generation(world))
        self._newest_step[rank] = max(self._newest_step.get(rank, -1), id.step)
        return number

    def recall(
        self,
        id: GenerationId,
        rank: int,
        world: int,
        nbytes: int,
        *,
        epoch: bool = True,
        outlived: bool = False,
    ) -> int | Refusal:
        """A slot for a sealed image that is here again: of an earlier keeper, before any trainer
        has come, whose ``epoch`` this one begins with; or one that was lost with its host.
        ``outlived``: it is in the memory that the earlier keeper had, which others may have
        mapped."""
        for slot in self._slots.values():
            if slot.generation == id and slot.rank == rank:
                return Refusal(Reason.DUPLICATE, f"step {id.step} of rank {rank} is held already")
        problem = self._beyond_budget(nbytes)
        if problem is not None:
            return problem
        if epoch:
            self.epoch = max(self.epoch, id.epoch)
        number = next(self._numbers)
        self._slots[number] = Slot(rank, nbytes, Content.SEALED, id, outlived=outlived)
        self._generations.setdefault(id, _Generation(world))
        return number

    def _beyond_budget(self, nbytes: int) -> Refusal | None:
        held = sum(slot.nbytes for slot in self._slots.values())
        if held + nbytes <= self.budget_nbytes:
            return None
        text = f"{size_text(held + nbytes)} are more than {size_text(self.budget_nbytes)}"
        return Refusal(Reason.NO_MEMORY, text)

    def restorable(self) -> list[HeldRanks]:
        """The generations of which there are sealed images, the newest first."""
        found: dict[GenerationId, list[int]] = {}
        for slot in self._slots.values():
            if slot.content is Content.SEALED and slot.generation is not None:
                found.setdefault(slot.generation, []).append(slot.rank)
        return [
            HeldRanks(id, of.world, tuple(sorted(found[id])), self.is_restorable(id))
            for id, of in sorted(self._generations.items(), reverse=True)
            if id in found
        ]
