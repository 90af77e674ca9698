"""State machine of a keeper's slots: their contents, and which may be overwritten. Pure.

A slot holds the image of one rank. A *generation* is one step of the job; it is *agreed* once all
ranks have sealed their images, and replicated values match. Each resume begins an *epoch* and
discards all later steps; otherwise a later restart could pick up an abandoned branch. If a rank has
no slot left, the step is skipped on all ranks.

These are never overwritten:

- the newest agreed generation, which a restart may need; before this epoch has one, the generation
  that it resumed from, which may be agreed without this keeper knowing
- older generations of the history, unless steps need their memory
- the newest generation that all keepers have encoded, which is needed after the loss of a host; and
  any generation being encoded now
- an image that is being sealed, flushed, or read by a restarting trainer, even if it was dropped
- memory mapped by a live process of an older epoch, since it cannot be revoked; and memory that
  outlived a keeper, since nobody knows who has it mapped
- an image of a generation that may still be agreed; otherwise a rank that runs ahead would keep
  overwriting the steps that the others are about to seal
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass

from ....core.units import size_text
from ...arenas.label import GenerationId
from ...arenas.messages import GenerationEntry
from .history import levels_of, retained
from .slots import ENDED, Content, Grant, Pin, Reason, Refusal, Slot, short_of_memory

SLOTS_PER_RANK = 3
"""For the newest agreed image, the next to be agreed, and the image being filled."""
LEFT_OUT_KEPT = 64
"""Number of skipped steps to remember: ranks are hardly ever that far apart."""


@dataclass(eq=False)
class _Generation:
    world: int
    agreed: bool = False
    was_agreed: bool = False
    """Agreed according to the previous keeper. It displaces no older generation, on which other
    keepers may rely, until this keeper learns of the agreement as well or its epoch ends."""
    lost: bool = False
    """True if the image of some rank is missing for good, so that it stays incomplete."""


class Generations:
    """The slots of one keeper. A *client* is a number that identifies one trainer process."""

    def __init__(self, budget_nbytes: int) -> None:
        self.budget_nbytes = budget_nbytes
        self.history = 0
        """Number of older generations to retain."""
        self.every = 1
        """Distance of kept steps."""
        self._is_full = False
        """True once the system has lacked memory for a slot, so that the history takes no more."""
        self._is_short = False
        """True while steps need memory, so that the history protects none."""
        self._numbers = itertools.count()
        self._slots: dict[int, Slot] = {}
        self._generations: dict[GenerationId, _Generation] = {}
        self._epochs: dict[int, int] = {}
        """Epoch of each live client."""
        self._ranks: dict[int, int] = {}
        """Rank of each live client."""
        self.epoch = -1
        self._newest_step: dict[int, int] = {}
        """Newest step of this epoch granted to each rank."""
        self._left_out: list[int] = []
        """Recent steps of this epoch that some rank, here or on another host, had no slot for."""
        self._chosen: GenerationId | None = None
        """Generation that this epoch resumed from, if it is held here."""
        self._guarding: frozenset[GenerationId] = frozenset()

    @property
    def slots(self) -> set[int]:
        """Numbers of all slots."""
        return set(self._slots)

    @property
    def newest_agreed(self) -> GenerationId | None:
        """Newest generation that a restart can use, whichever processes die."""
        known = (
            id
            for id, of in self._generations.items()
            if of.agreed or (of.was_agreed and id.epoch < self.epoch)
        )
        return max(known, default=None)

    @property
    def undecided(self) -> list[GenerationId]:
        """Generations of this epoch whose outcome this keeper does not know."""
        return [
            id for id, of in self._generations.items() if id.epoch == self.epoch and not of.agreed
        ]

    def guarding(self, ids: Collection[GenerationId]) -> None:
        """Set the generations that are being encoded, or are encoded on all keepers. Other keepers
        read their images, and need them if a host is lost."""
        self._guarding = frozenset(ids)

    def will_not_come(self, id: GenerationId) -> bool:
        """Return whether some rank of this keeper will never seal its image of a generation,
        because it has moved on without one."""
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
        """Enter ``epoch``, resumed from step ``chosen`` (None: from scratch), as ``client``. The
        first client of a new epoch ends the previous one."""
        # A rebuilt generation may be all that this keeper knows of its epoch.
        newest = max([self.epoch, *(id.epoch for id in self._generations)])
        if epoch < newest:
            return Refusal(Reason.STALE_EPOCH, f"epoch {epoch} is over: this is epoch {newest}")
        self._epochs[client] = epoch
        self._ranks[client] = rank
        if epoch > self.epoch:
            self.epoch = epoch
            self._newest_step = {}
            self._left_out = []
            self._is_full = False
            self.released(ENDED)
            self._drop_later(chosen)
            # An earlier resume from the same step may have left a later image of it that was never
            # agreed.
            self._chosen = max(
                (id for id in self._generations if id.step == chosen),
                key=lambda id: (self.is_restorable(id), id),
                default=None,
            )
        return None

    def _drop_later(self, chosen: int | None) -> None:
        for slot in self._slots.values():
            if slot.content is Content.FILLING:
                self._empty(slot)
            elif slot.content is Content.CAPTURED:
                slot.content = Content.ABANDONED
        # Generations of this epoch were rebuilt after the loss of a host; this trainer is a late
        # one.
        earlier = [id for id in self._generations if id.epoch < self.epoch]
        for id in [id for id in earlier if chosen is None or id.step > chosen]:
            self._forget(id)

    def _empty(self, slot: Slot) -> None:
        id = slot.generation
        slot.empty()
        if id is not None and not self._is_held(id):
            self._generations.pop(id, None)

    def _forget(self, id: GenerationId) -> None:
        """Discard a generation with its sealed images. A slot that is being filled stays as it
        is."""
        self._generations.pop(id, None)
        for slot in self._slots.values():
            if slot.generation == id and slot.content is Content.SEALED:
                slot.empty()

    def fill(self, client: int, rank: int, step: int, nbytes: int, world: int) -> Grant | Refusal:
        """Grant ``rank`` a slot of ``nbytes`` for ``step`` of this epoch, or refuse."""
        if self._epochs.get(client) != self.epoch:
            return Refusal(Reason.STALE_EPOCH, f"this is epoch {self.epoch}")
        if step <= self._newest_step.get(rank, -1):
            return Refusal(Reason.OLD_STEP, f"step {step} is not after the previous one")
        if step in self._left_out:
            return Refusal(Reason.NO_FREE_SLOT, f"another rank has no slot for step {step}")
        self._give_up_behind(rank, step)
        self._free_useless(rank, nbytes, world)
        number = next(iter(self._by_loss(rank)), None)
        fresh = False
        if number is None or self._slots[number].generation is not None:
            problem = self._make_room(rank, nbytes)
            if problem is not None and number is None and self.history:
                number, problem = self._instead_of_history(rank, nbytes, problem)
            if problem is None:
                number = next(self._numbers)
                self._slots[number] = Slot(rank, nbytes, made=False)
                fresh = True
            elif number is None:
                self._leave_out(step)
                return problem
        self._begin_filling(self._slots[number], client, GenerationId(self.epoch, step), world)
        self._newest_step[rank] = step
        return Grant(number, fresh)

    def _make_room(self, rank: int, nbytes: int) -> Refusal | None:
        """Free memory for one more slot of ``rank``. Return why there is still no room, if so."""
        problem = self._no_room(rank, nbytes)
        for free in (self._free_foreign, self._free_thirds):
            if problem is not None and problem.reason is Reason.NO_MEMORY:
                free(rank, nbytes)
                problem = self._no_room(rank, nbytes)
        return problem

    def _leave_out(self, step: int) -> None:
        self._left_out = [*self._left_out, step][-LEFT_OUT_KEPT:]

    def _give_up_behind(self, rank: int, step: int) -> None:
        """Mark earlier generations without an image of ``rank`` as lost: it has moved on to
        ``step``."""
        held = {slot.generation for slot in self._slots.values() if slot.rank == rank}
        for id, of in self._generations.items():
            if id.epoch == self.epoch and id.step < step and id not in held:
                of.lost = of.lost or not of.agreed

    def _lose(self, slot: Slot) -> None:
        """Discard the image in a slot to reuse it. Its generation is incomplete from now on."""
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

    def _free_useless(self, rank: int, nbytes: int, world: int) -> None:
        """Free unprotected slots that no step can use: memory that outlived a keeper, ranks that no
        longer exist, images of a former size, and surplus slots."""
        freed = [
            number
            for number, slot in self._slots.items()
            if (
                slot.outlived or slot.rank >= world or (slot.rank == rank and slot.nbytes != nbytes)
            )
            and self._may_be_filled(slot)
        ]
        for of_rank in range(world):
            surplus = self._surplus(of_rank, SLOTS_PER_RANK + self.history)
            freed += [number for number in surplus if number not in freed]
        self._remove(freed)

    def _free_foreign(self, rank: int, nbytes: int) -> None:
        """Free unprotected slots of ranks that another keeper serves now."""
        ranks = self._ranks_now(rank)
        foreign = {n: s for n, s in self._slots.items() if s.rank not in ranks and not s.mappers}
        self._remove([n for n, slot in foreign.items() if self._may_be_filled(slot)])

    def _instead_of_history(
        self, rank: int, nbytes: int, problem: Refusal
    ) -> tuple[int | None, Refusal | None]:
        """Return the oldest slot of ``rank`` that only the history needs, or free those of other
        ranks. Return the ``problem`` as well, if there is still no room."""
        self._is_short = True
        try:
            self._remove([n for n in self._by_loss(rank) if self._slots[n].nbytes != nbytes])
            if len(self._of_rank(rank)) >= SLOTS_PER_RANK and self._no_room(rank, nbytes):
                return next(iter(self._by_loss(rank)), None), problem
            for other in sorted({slot.rank for slot in self._slots.values()}):
                self._remove(self._surplus(other, SLOTS_PER_RANK))
            return None, self._no_room(rank, nbytes)
        finally:
            self._is_short = False

    def _free_thirds(self, rank: int, nbytes: int) -> None:
        """Free third slots of other ranks if ``rank`` lacks its first or second: no step is agreed
        without an image of every rank. Memory is short until then, since the generation that the
        epoch resumed from is retained."""
        mine = sum(slot.nbytes == nbytes for slot in self._of_rank(rank).values())
        ranks = self._ranks_now(rank)
        if mine >= SLOTS_PER_RANK - 1 or self._wanted_nbytes(ranks, rank, nbytes) > (
            self.budget_nbytes
        ):
            return
        freed = []
        for other in sorted(ranks - {rank}):
            if len(self._of_rank(other)) >= SLOTS_PER_RANK:
                freed += self._by_loss(other)[:1]
        self._remove(freed)

    def _remove(self, numbers: Collection[int]) -> None:
        for number in numbers:
            self._lose(self._slots[number])
            del self._slots[number]

    def _surplus(self, rank: int, share: int) -> list[int]:
        """Return the slots of ``rank`` beyond its ``share``. They stood in for slots mapped by a
        process of an older epoch, which has ended since; other ranks may lack memory because of
        them."""
        count = sum(not self._is_mapped_by_stale(slot) for slot in self._of_rank(rank).values())
        return self._by_loss(rank)[: max(0, count - share)]

    def _of_rank(self, rank: int) -> dict[int, Slot]:
        return {number: slot for number, slot in self._slots.items() if slot.rank == rank}

    def _by_loss(self, rank: int | None = None) -> list[int]:
        """Return the slots of ``rank``, or of all ranks, that may be overwritten, oldest first."""
        slots = self._slots if rank is None else self._of_rank(rank)
        usable = [number for number, slot in slots.items() if self._may_be_filled(slot)]
        return sorted(usable, key=lambda number: slots[number].order)

    def _may_be_filled(self, slot: Slot) -> bool:
        if not slot.made or slot.content not in (Content.FREE, Content.SEALED):
            return False
        if slot.readers or slot.pins or self._is_mapped_by_stale(slot):
            return False
        return slot.generation is None or not self._is_wanted(slot.generation)

    def _is_wanted(self, id: GenerationId) -> bool:
        """Return whether a generation is the newest agreed one, is encoded, or may still be
        agreed."""
        newest = self._gone_on_from
        if id == newest or id in self._guarding or id in self._history():
            return True
        of = self._generations.get(id)
        if of is None or of.lost:
            return False
        return id.epoch == self.epoch and (newest is None or id > newest)

    def _history(self) -> list[GenerationId]:
        """Return the older generations to retain."""
        if not self.history or self._is_short:
            return []
        agreed = sorted(filter(self.is_restorable, self._generations))
        return retained(levels_of(agreed, self.every), self._gone_on_from, self.history)

    @property
    def _gone_on_from(self) -> GenerationId | None:
        """Generation that the next restart would use, to this keeper's knowledge."""
        newest = self.newest_agreed
        if self._chosen in self._generations and (newest is None or newest.epoch < self.epoch):
            return self._chosen
        return newest

    def _is_mapped_by_stale(self, slot: Slot) -> bool:
        """Return whether a live process of an older epoch may write to the slot."""
        return any(self._epochs.get(client, -1) < self.epoch for client in slot.mappers)

    def _no_room(self, rank: int, nbytes: int) -> Refusal | None:
        mine = [
            slot
            for slot in self._slots.values()
            if slot.rank == rank and not self._is_mapped_by_stale(slot)
        ]
        if len(mine) >= SLOTS_PER_RANK + self.history:
            text = f"all {len(mine)} images of rank {rank} are in use"
            return Refusal(Reason.NO_FREE_SLOT, text)
        if self._is_full and len(mine) >= SLOTS_PER_RANK:
            return Refusal(Reason.NO_MEMORY, "the system has no memory for older steps")
        ranks = self._ranks_now(rank)
        wanted = self._wanted_nbytes(ranks, rank, nbytes)
        held = sum(slot.nbytes for slot in self._slots.values())
        if wanted <= self.budget_nbytes and held + nbytes <= self.budget_nbytes:
            return None
        count = f"{len(ranks)} rank{'s' * (len(ranks) > 1)}"
        needed = f"{SLOTS_PER_RANK} images of {size_text(nbytes)} for {count}"
        return short_of_memory(needed, wanted, held, self.budget_nbytes)

    def _ranks_now(self, rank: int) -> set[int]:
        entered = {
            of for client, of in self._ranks.items() if self._epochs.get(client) == self.epoch
        }
        return entered | {rank}

    def _wanted_nbytes(self, ranks: Collection[int], rank: int, nbytes: int) -> int:
        """Return the size of the slots that ``ranks`` need, given images of ``nbytes`` for
        ``rank``."""
        sizes = dict.fromkeys(ranks, nbytes)
        for slot in self._slots.values():
            of_epoch = slot.generation is not None and slot.generation.epoch == self.epoch
            if slot.rank in ranks and slot.rank != rank and of_epoch:
                sizes[slot.rank] = slot.nbytes
        return SLOTS_PER_RANK * sum(sizes.values())

    def made(self, slot: int) -> None:
        """Record that a fresh slot has its memory, even if its client has given up meanwhile."""
        self._slots[slot].made = True

    def unmade(self, slot: int) -> None:
        """Remove a fresh slot whose memory could not be allocated."""
        self._empty(self._slots[slot])
        del self._slots[slot]
        self._is_full = True

    def is_filling(self, slot: int, client: int, id: GenerationId) -> bool:
        """Return whether ``client`` is filling the slot with its image of this generation."""
        held = self._slots.get(slot)
        return (
            held is not None
            and held.content is Content.FILLING
            and (held.filler, held.generation) == (client, id)
        )

    def captured(self, slot: int) -> None:
        """Record that the image is complete, and is being sealed. The end of its trainer no
        longer matters. Call :meth:`sealed` or :meth:`unsealed` once nothing writes to the slot
        any more."""
        self._slots[slot].content = Content.CAPTURED

    def sealed(self, slot: int) -> None:
        """Record that the image is hashed and labelled."""
        self._slots[slot].content = Content.SEALED

    def unsealed(self, slot: int) -> None:
        """Free a slot whose sealing has failed."""
        self._empty(self._slots[slot])

    def dropped(self, slot: int, client: int) -> bool:
        """Free a slot into which ``client`` has captured nothing. Return whether ``client`` was
        filling it."""
        held = self._slots.get(slot)
        if held is None or held.content is not Content.FILLING or held.filler != client:
            return False
        self._empty(held)
        return True

    def drop_unfinished(self, client: int) -> None:
        """Free the slots that ``client`` was filling."""
        for number in self._slots:
            self.dropped(number, client)

    def is_sealing(self, slot: int, id: GenerationId) -> bool:
        """Return whether the slot is still sealing its image of this generation."""
        held = self._slots.get(slot)
        return held is not None and held.content is Content.CAPTURED and held.generation == id

    def agreed(self, id: GenerationId) -> bool:
        """Record that a generation is agreed. Return False if it cannot be restored, because a rank
        that ran ahead has overwritten its image."""
        of = self._generations.get(id)
        if of is None or of.lost:
            return False
        of.agreed = True
        return True

    def is_agreed(self, id: GenerationId) -> bool:
        """Return whether this keeper knows the generation to be agreed."""
        of = self._generations.get(id)
        return of is not None and of.agreed

    def was_agreed(self, id: GenerationId) -> None:
        """Record that the previous keeper knew the generation to be agreed, so a restart may use
        it."""
        self._generations[id].was_agreed = True

    def is_restorable(self, id: GenerationId) -> bool:
        """Return whether a restart may use the generation."""
        of = self._generations.get(id)
        return of is not None and (of.agreed or of.was_agreed)

    def discard(self, id: GenerationId) -> None:
        """Discard a generation with its slots, unless somebody reads it."""
        of_it = {number: slot for number, slot in self._slots.items() if slot.generation == id}
        if not any(slot.readers or slot.pins for slot in of_it.values()):
            self._forget(id)
            self._remove([n for n, slot in of_it.items() if self._may_be_filled(slot)])

    def void(self, id: GenerationId) -> None:
        """Discard a generation that is inconsistent, damaged or incomplete. Ranks that are behind
        skip its step."""
        self._forget(id)
        if id.epoch == self.epoch:
            self._leave_out(id.step)

    def pin(self, id: GenerationId) -> Pin:
        """Keep the sealed images of a generation from being overwritten, even if it is dropped,
        until :meth:`unpin` gets the result."""
        slots = tuple(
            slot
            for slot in self._slots.values()
            if (slot.generation, slot.content) == (id, Content.SEALED)
        )
        for slot in slots:
            slot.pins += 1
        return slots

    def unpin(self, pin: Pin) -> None:
        """Undo one :meth:`pin`."""
        for slot in pin:
            slot.pins -= 1

    def open(self, client: int, id: GenerationId, rank: int) -> int | None:
        """Return the slot of an image, pinned for ``client`` until :meth:`released`; None if there
        is no such image."""
        for number, slot in self._slots.items():
            if (slot.generation, slot.rank, slot.content) == (id, rank, Content.SEALED):
                slot.readers.add(client)
                return number
        return None

    def holds(self, slot: int, id: GenerationId) -> bool:
        """Return whether the slot has a sealed image of this generation that was not dropped."""
        held = self._slots.get(slot)
        return held is not None and (held.generation, held.content) == (id, Content.SEALED)

    def offer(self, client: int) -> None:
        """Pin what ``client`` may resume from until it is released, or, if it dies, a new epoch."""
        for slot in self._slots.values():
            id = slot.generation
            if slot.content is not Content.SEALED or id is None:
                continue
            if self.is_restorable(id) or id == self._gone_on_from:
                slot.readers.add(client)

    def released(self, client: int) -> None:
        """Unpin all slots that ``client`` reads."""
        for slot in self._slots.values():
            slot.readers.discard(client)

    def client_gone(self, client: int) -> None:
        """Forget a client whose process has ended, so that it has no memory mapped."""
        self._epochs.pop(client, None)
        self._ranks.pop(client, None)
        self.drop_unfinished(client)
        for slot in self._slots.values():
            slot.client_gone(client)

    def adopt(
        self, client: int, id: GenerationId, rank: int, world: int, nbytes: int
    ) -> int | Refusal:
        """Return a slot for a sealed image of this epoch that ``client`` has kept from a dead
        keeper, after freeing older ones if memory is short: that keeper may have discarded them.
        Images of older epochs are refused, since a resume may have dropped their steps."""
        if id.epoch != self.epoch or self._epochs.get(client) != self.epoch:
            return Refusal(Reason.STALE_EPOCH, f"this is epoch {self.epoch}")
        self._newest_step[rank] = max(self._newest_step.get(rank, -1), id.step)
        for number, slot in self._slots.items():
            if slot.generation == id and slot.rank == rank:
                if slot.outlived and slot.nbytes == nbytes:
                    # The memory was granted to this client, so no live process of an older epoch
                    # has it mapped.
                    slot.outlived = False
                    slot.mappers.add(client)
                    return number
                return Refusal(Reason.DUPLICATE, f"step {id.step} of rank {rank} is already held")
        adopted = Slot(rank, nbytes, Content.SEALED, id, mappers={client})
        older = [n for n in self._by_loss() if self._slots[n].order < id]
        while isinstance(added := self._add_sealed(adopted, world), Refusal) and older:
            self._remove([older.pop(0)])
        return added

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
        """Return a slot for a sealed image that is available again.

        With ``epoch``, it was kept by an earlier keeper or on local storage, and this keeper begins
        in its epoch, before any trainer has connected. Without, it was rebuilt after the loss of
        its host. ``outlived``: the memory comes from the earlier keeper, and other processes may
        have it mapped.
        """
        for slot in self._slots.values():
            if slot.generation == id and slot.rank == rank:
                return Refusal(Reason.DUPLICATE, f"step {id.step} of rank {rank} is already held")
        number = self._add_sealed(Slot(rank, nbytes, Content.SEALED, id, outlived=outlived), world)
        if epoch and not isinstance(number, Refusal):
            self.epoch = max(self.epoch, id.epoch)
        return number

    def _add_sealed(self, slot: Slot, world: int) -> int | Refusal:
        nbytes = slot.nbytes + sum(other.nbytes for other in self._slots.values())
        if nbytes > self.budget_nbytes:
            text = f"{size_text(nbytes)} are more than {size_text(self.budget_nbytes)}"
            return Refusal(Reason.NO_MEMORY, text)
        assert slot.generation is not None
        number = next(self._numbers)
        self._slots[number] = slot
        self._generations.setdefault(slot.generation, _Generation(world))
        return number

    def restorable(self) -> list[GenerationEntry]:
        """Return the generations with sealed images, newest first."""
        found: dict[GenerationId, list[int]] = {}
        for slot in self._slots.values():
            if slot.content is Content.SEALED and slot.generation is not None:
                found.setdefault(slot.generation, []).append(slot.rank)
        return [
            GenerationEntry(id, of.world, tuple(sorted(found[id])), self.is_restorable(id))
            for id, of in sorted(self._generations.items(), reverse=True)
            if id in found
        ]
