"""Followers keep steps in memory until the lead keeper has them written."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from support.clock import in_virtual_time, run_virtual
from support.kept_memory import pinned

from holdfast.errors import SaveError, StorageError, SupersededError
from holdfast.storage.arenas.label import GenerationId
from holdfast.storage.arenas.messages import Durable, Event, Flush, FlushFailed
from holdfast.storage.keeper.decisions.generations import Generations
from holdfast.storage.keeper.decisions.slots import Grant
from holdfast.storage.keeper.decisions.standing import FlushEnd, FlushOrder, Standing, Written
from holdfast.storage.keeper.flushing import writing
from holdfast.storage.keeper.flushing.flush import _written
from holdfast.storage.keeper.flushing.writing import Writing
from holdfast.storage.keeper.status import Counters

SLOTS = 5


@pytest.fixture(autouse=True)
def no_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every flush fail, as if storage were unavailable."""

    async def flush_part(*given: object) -> None:
        raise StorageError("storage is away")

    monkeypatch.setattr(writing, "flush_part", flush_part)


class Waiting:
    """A keeper with one rank and agreed steps; nothing is written to storage."""

    name = "b"
    leads = False
    is_alone = False
    ranks = 1

    def __init__(self) -> None:
        self.generations = Generations(10_000, SLOTS)
        assert self.generations.enter(1, 0, 0, None) is None
        self.told: list[Event] = []
        held: Any = SimpleNamespace(generations=self.generations, images=self.images)
        reporting: Any = self
        self.writing = Writing(held, None, Counters(), reporting, self.note, self.damaged)
        self.tasks: list[asyncio.Task[None]] = []

    def images(self, id: GenerationId) -> list[Any]:
        """Return the images of rank 0 for this generation."""
        slots = self.generations._slots.values()
        label = SimpleNamespace(rank=0, world=1)
        return [SimpleNamespace(label=label) for slot in slots if slot.generation == id]

    def own_ranks(self, world: int) -> range:
        """Return every rank of this host."""
        return range(self.ranks)

    async def note(self, event: Event) -> None:
        """Record an event for the trainer."""
        self.told.append(event)

    async def tell(self) -> None:
        """Do nothing: there is no lead keeper."""

    def damaged(self, id: GenerationId) -> None:
        """Fail the test: no image is damaged here."""
        raise AssertionError(id)

    def run_later(self, work: Coroutine[Any, Any, None]) -> None:
        """Start the work as a task."""
        self.tasks.append(asyncio.ensure_future(work))

    async def want(self, step: int) -> None:
        """Seal a step, have it agreed on, and request its flush."""
        grant = self.generations.fill(1, 0, step, 100, 1)
        assert isinstance(grant, Grant), grant
        if grant.fresh:
            self.generations.made(grant.slot)
        self.generations.captured(grant.slot)
        self.generations.sealed(grant.slot)
        id = GenerationId(0, step)
        assert self.generations.agreed(id)
        self.writing.want(id, Flush(step, "storage"))
        await self.settle()

    async def follow(self, order: int | None = None, ended: FlushEnd | None = None) -> None:
        """Apply a standing of the lead keeper: the order to write a step, or the end of a flush."""
        flush = None if order is None else FlushOrder(GenerationId(0, order), f"attempt {order}")
        await self.writing.follow(Standing("lead/1", 0, flush=flush, ended=ended))
        await self.settle()

    async def settle(self) -> None:
        """Run all tasks to their end."""
        while self.tasks:
            await self.tasks.pop()

    def failed(self) -> list[int]:
        """Return the steps whose flush failed for good, in the order of the events."""
        assert all(isinstance(event, FlushFailed) and event.final for event in self.told)
        return [event.generation.step for event in self.told]

    def reads(self) -> list[int]:
        """Return the steps whose memory is pinned until they are written."""
        return sorted(slot.generation.step for slot in pinned(self.generations) if slot.generation)


@in_virtual_time
async def test_a_later_step_takes_the_place_of_one_that_waits_and_not_of_one_being_written() -> (
    None
):
    """A waiting step is replaced by a newer one, but a step in flight is finished.

    Otherwise storage that is slower than the steps would never complete one.
    """
    waiting = Waiting()
    await waiting.want(4)
    await waiting.follow(order=4)
    await waiting.want(8)
    assert waiting.reads() == [4, 8]
    await waiting.want(12)
    assert waiting.reads() == [4, 12]
    assert waiting.failed() == [8]


@in_virtual_time
async def test_steps_before_one_that_has_ended_are_not_waited_for_any_longer() -> None:
    """The keeper drops an earlier step although it has not seen how that flush ended.

    Responses can overtake each other, and each carries only the newest result.
    """
    waiting = Waiting()
    await waiting.want(4)
    await waiting.follow(order=4)
    await waiting.want(8)
    await waiting.follow(ended=FlushEnd(GenerationId(0, 8), "attempt 8", problem="no room"))
    assert waiting.reads() == []
    assert waiting.failed() == [8, 4]
    assert waiting.told[1].text.startswith("the flush of a later step has ended")


@in_virtual_time
async def test_an_end_that_is_not_final_ends_nothing_else() -> None:
    """After a failure that is not final, all steps remain pinned for a retry."""
    waiting = Waiting()
    await waiting.want(4)
    await waiting.follow(order=4)
    await waiting.want(8)
    end = FlushEnd(GenerationId(0, 4), "attempt 4", problem="storage is away", final=False)
    await waiting.follow(ended=end)
    assert waiting.reads() == [4, 8]


@in_virtual_time
async def test_who_asks_again_for_what_has_ended_is_told_how() -> None:
    """A trainer that asks again for a flushed step gets its result.

    Its connection was cut meanwhile, or its keeper has died.
    """
    waiting = Waiting()
    end = FlushEnd(GenerationId(0, 8), "attempt 8", 100)
    await waiting.follow(ended=end)
    waiting.told.clear()
    await waiting.want(4)
    assert waiting.failed() == [4]
    waiting.told.clear()
    await waiting.want(8)
    assert waiting.told == [Durable(GenerationId(0, 8), "attempt 8", 100)]
    assert waiting.reads() == []
    await waiting.want(12)
    assert waiting.reads() == [12]


@in_virtual_time
async def test_who_asks_again_for_what_waits_changes_nothing() -> None:
    """A repeated request for a waiting step pins its memory once and releases it once."""
    waiting = Waiting()
    await waiting.want(4)
    waiting.writing.want(GenerationId(0, 4), Flush(4, "storage"))
    await waiting.settle()
    assert waiting.writing.waiting(0) == (GenerationId(0, 4),)
    await waiting.follow(ended=FlushEnd(GenerationId(0, 4), "attempt 4", 100))
    assert waiting.reads() == []


@in_virtual_time
async def test_what_is_not_handed_over_whole_is_not_waited_for() -> None:
    """A keeper drops an adopted step when one rank has no image of it and has moved on."""
    waiting = Waiting()
    assert waiting.generations.enter(2, 1, 0, None) is None
    waiting.ranks = 2
    id = GenerationId(0, 4)
    assert isinstance(waiting.generations.adopt(1, id, 0, 2, 100), int)
    assert waiting.generations.agreed(id)
    waiting.writing.want(id, Flush(4, "storage"))
    await waiting.settle()
    assert waiting.told == []
    assert waiting.reads() == []
    assert isinstance(waiting.generations.fill(2, 1, 5, 100, 2), Grant)
    await waiting.follow()
    assert waiting.failed() == [4]


class Peers:
    """Reports of the keepers ``a`` and ``b``.

    At the second change a new job runs, on ``a`` alone.
    """

    name = "a"

    def __init__(self) -> None:
        self.lead = self
        self.names = frozenset("ab")
        self.moves = 0
        self.parts: dict[str, Written] = {}

    def written(self) -> Mapping[str, Written]:
        """Return the reports."""
        return self.parts

    def unheard(self) -> Sequence[str]:
        """Return no names: every keeper of the current job reports."""
        return []

    async def moved(self, within_s: float) -> None:
        """Count a change of the reports."""
        self.moves += 1
        if self.moves == 2:
            self.names = frozenset("a")
        assert self.moves < 10, "it waits for a keeper that reports to nobody here"


def test_nothing_is_waited_for_of_a_keeper_that_is_not_of_the_job_any_more() -> None:
    """A flush fails if the next job starts without one of the keepers that it waits for."""
    peers = Peers()
    with pytest.raises(SaveError, match=re.escape("the keeper b has stopped reporting")):
        run_virtual(_written(peers, lambda: True))  # type: ignore[arg-type]
    assert peers.moves == 2


def test_what_a_keeper_has_nothing_of_any_more_is_not_tried_again() -> None:
    """A flush is not retried once a keeper no longer holds the step.

    A replacement keeper has lost its part, and newer steps have taken the memory. The other keepers
    still held two of three slots for it, so a retry would block every later step.
    """
    peers = Peers()
    peers.parts["b"] = Written("attempt", problem="nothing of it is here", gone=True)
    with pytest.raises(SupersededError, match="the keeper b no longer holds it"):
        run_virtual(_written(peers, lambda: True))  # type: ignore[arg-type]
