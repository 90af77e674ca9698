"""Whatever trainers ask of a keeper in whichever order, no slot in use is filled, memory stays
within its budget, and what is agreed is there until something newer is."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.effort import examples

from holdfast.storage.arenas.label import GenerationId
from holdfast.storage.keeper.decisions.generations import Generations
from holdfast.storage.keeper.decisions.slots import Grant, Pin

WORLD = 2
SIZES = (10, 14)
BUDGET = 3 * WORLD * max(SIZES) + 30


class KeeperMachine(RuleBasedStateMachine):
    """A model beside it that only knows what was done with each slot."""

    def __init__(self) -> None:
        super().__init__()
        self.generations = Generations(BUDGET)
        self.clients = 0
        self.rank_of: dict[int, int] = {}
        self.epoch_of: dict[int, int] = {}
        self.step = 0
        self.nbytes = SIZES[0]
        self.sizes: dict[int, int] = {}
        self.image: dict[int, tuple[GenerationId, int]] = {}
        self.filling: dict[int, int] = {}
        self.unmade: set[int] = set()
        self.sealing: set[int] = set()
        self.sealed: set[int] = set()
        self.mapped: dict[int, set[int]] = {}
        self.flushes: list[tuple[Pin, set[int]]] = []
        self.newest: GenerationId | None = None
        """The newest agreed one that nothing has dropped."""

    @initialize()
    def begin(self) -> None:
        """The first job."""
        self.resume(False)

    @rule(dies=st.booleans())
    def resume(self, dies: bool) -> None:
        """All ranks begin an epoch, from what is newest; those of the one before die, or stay."""
        if dies:
            for client in list(self.rank_of):
                self.die(client)
        chosen = None if self.newest is None else self.newest.step
        for rank in range(WORLD):
            self.clients += 1
            epoch = self.generations.epoch + (rank == 0)
            assert self.generations.enter(self.clients, rank, epoch, chosen) is None
            self.rank_of[self.clients], self.epoch_of[self.clients] = rank, epoch
        self.step = chosen or 0
        self.filling = {}
        for slot in list(self.image):
            id = self.image[slot][0]
            if slot not in self.sealing and (chosen is None or id.step > chosen):
                self.sealed.discard(slot)
                del self.image[slot]

    def die(self, client: int) -> None:
        """Its memory is gone."""
        self.generations.client_gone(client)
        del self.rank_of[client], self.epoch_of[client]
        for slot in [slot for slot, filler in self.filling.items() if filler == client]:
            del self.filling[slot]
        for clients in self.mapped.values():
            clients.discard(client)

    @precondition(lambda self: self.rank_of)
    @rule(data=st.data())
    def end(self, data: Any) -> None:
        """One process ends."""
        self.die(data.draw(st.sampled_from(sorted(self.rank_of))))

    @rule(nbytes=st.sampled_from(SIZES))
    def lay_out(self, nbytes: int) -> None:
        """From now on images have this size."""
        self.nbytes = nbytes

    @precondition(lambda self: self.rank_of)
    @rule(data=st.data(), ahead=st.booleans())
    def fill(self, data: Any, ahead: bool) -> None:
        """A process asks for a slot, also one that belongs to an older epoch."""
        self.step += ahead
        self.ask(data.draw(st.sampled_from(sorted(self.rank_of))))

    @rule()
    def keep(self) -> None:
        """All ranks keep a step, as they do when nothing goes wrong."""
        self.step += 1
        for client, epoch in self.epoch_of.items():
            slot = self.ask(client) if epoch == self.generations.epoch else None
            if slot is None:
                continue
            if slot in self.unmade:
                self.make_slot(slot, True)
            self.capture_slot(slot, True)
            self.seal_slot(slot, True)

    def ask(self, client: int) -> int | None:
        """The slot that is granted."""
        rank = self.rank_of[client]
        before = self.generations.slots
        grant = self.generations.fill(client, rank, self.step, self.nbytes, WORLD)
        for slot in before - self.generations.slots:
            assert self.is_free(slot), "a slot in use is given back"
            self.sizes.pop(slot)
            self.forget(slot)
            self.mapped.pop(slot, None)
        if not isinstance(grant, Grant):
            return None
        slot = grant.slot
        assert self.epoch_of[client] == self.generations.epoch
        assert grant.fresh == (slot not in self.sizes)
        assert self.is_free(slot), "a slot in use is filled"
        self.forget(slot)
        self.sizes[slot] = self.nbytes
        if grant.fresh:
            self.unmade.add(slot)
        self.image[slot] = (GenerationId(self.generations.epoch, self.step), rank)
        self.filling[slot] = client
        self.mapped.setdefault(slot, set()).add(client)
        return slot

    def is_free(self, slot: int) -> bool:
        """Whether nothing is lost, or used by two, if it is filled."""
        stale = any(
            self.epoch_of[client] < self.generations.epoch for client in self.mapped.get(slot, ())
        )
        wanted = slot in self.sealed and self.image[slot][0] == self.newest
        busy = slot in self.filling or slot in self.sealing or slot in self.unmade
        flushed = any(slot in slots for _, slots in self.flushes)
        return not (stale or wanted or busy or flushed)

    def forget(self, slot: int) -> None:
        """There is no image in it."""
        self.image.pop(slot, None)
        self.sealed.discard(slot)

    @rule(well=st.booleans())
    def make(self, well: bool) -> None:
        """The memory of a slot is there, or cannot be had."""
        if self.unmade:
            self.make_slot(min(self.unmade), well)

    def make_slot(self, slot: int, well: bool) -> None:
        """This one."""
        self.unmade.discard(slot)
        if well:
            self.generations.made(slot)
            return
        self.generations.unmade(slot)
        self.sizes.pop(slot)
        self.filling.pop(slot, None)
        self.mapped.pop(slot, None)
        self.forget(slot)

    @rule(well=st.booleans())
    def capture(self, well: bool) -> None:
        """What is filled for the longest time is whole, or is dropped."""
        made = [slot for slot in self.filling if slot not in self.unmade]
        if made:
            self.capture_slot(made[0], well)

    def capture_slot(self, slot: int, well: bool) -> None:
        """This one."""
        client = self.filling.pop(slot)
        assert self.generations.is_filling(slot, client, self.image[slot][0])
        if well:
            self.generations.captured(slot)
            self.sealing.add(slot)
        else:
            assert self.generations.dropped(slot, client)
            self.forget(slot)

    @rule(well=st.booleans())
    def seal(self, well: bool) -> None:
        """Hashing ends; and if that was the last rank, the generation is agreed."""
        if self.sealing:
            self.seal_slot(min(self.sealing), well)

    def seal_slot(self, slot: int, well: bool) -> None:
        """This one."""
        self.sealing.discard(slot)
        id, _ = self.image[slot]
        if not well or not self.generations.is_sealing(slot, id):
            self.generations.unsealed(slot)
            self.forget(slot)
            return
        self.generations.sealed(slot)
        self.sealed.add(slot)
        ranks = {self.image[other][1] for other in self.sealed if self.image[other][0] == id}
        if ranks == set(range(WORLD)):
            assert self.generations.agreed(id)
            self.newest = id if self.newest is None else max(self.newest, id)

    @precondition(lambda self: self.newest is not None)
    @rule()
    def flush(self) -> None:
        """The newest is written to storage, beside all else."""
        assert self.newest is not None
        slots = {slot for slot in self.sealed if self.image[slot][0] == self.newest}
        self.flushes.append((self.generations.pin(self.newest), slots))

    @precondition(lambda self: self.flushes)
    @rule(index=st.integers(0, 9))
    def flushed(self, index: int) -> None:
        """One of them has ended, in any order."""
        pin, _ = self.flushes.pop(index % len(self.flushes))
        self.generations.unpin(pin)

    @invariant()
    def memory_is_within_its_budget(self) -> None:
        """And known slot by slot."""
        assert set(self.sizes) == self.generations.slots
        assert sum(self.sizes.values()) <= BUDGET

    @invariant()
    def the_newest_agreed_is_whole(self) -> None:
        """It can be gone on from, by all ranks; so can all that are said to be agreed."""
        assert self.generations.newest_agreed == self.newest
        for held in self.generations.restorable():
            if held.agreed:
                assert held.ranks == tuple(range(WORLD))


TestKeeperMachine = KeeperMachine.TestCase
TestKeeperMachine.settings = examples(200)
