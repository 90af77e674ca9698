"""Writes generations to storage on request, and to the local level when due.

Writes block nothing else: failures are reported, counted and retried. The leader commits to
storage. With several keepers, each writes the images that it holds once the leader has named the
attempt.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from ....errors import DamagedError, HoldfastError, SupersededError
from ...arenas.label import GenerationId
from ...arenas.messages import Event, Flush, FlushEnd, FlushLost, Local
from ..decisions.slots import Pin
from ..decisions.standing import FlushOrder, Standing, Written
from ..reporting import Reporting
from ..slot_memory import SlotPool
from ..status import Counters
from .flush import flush, flush_part
from .local_level import LocalLevel

FLUSH_PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Pauses after consecutive failed flushes; the last one repeats."""
_REPLACED = "a later step is flushed instead of this one"
_OVERTAKEN = "the flush of a later step has ended, and the result of this one is unknown"
_LOST = "some images of this step are no longer in memory, so it cannot be committed"

_log = logging.getLogger(__name__)


class Writing:
    """Pending and running writes of one keeper. ``tell(event)`` notifies the trainers;
    ``damaged(generation)`` is called if an image has changed in memory."""

    def __init__(
        self,
        pool: SlotPool,
        counters: Counters,
        reporting: Reporting,
        tell: Callable[[Event], Coroutine[Any, Any, None]],
        damaged: Callable[[GenerationId], None],
    ) -> None:
        self._pool = pool
        self.local: LocalLevel | None = None
        """The local level, if any."""
        self._counters = counters
        self._reporting = reporting
        self._run_later = reporting.run_later
        self._tell = tell
        self._damaged = damaged
        self._wanted: dict[GenerationId, Flush] = {}
        self._begun: set[GenerationId] = set()
        """Generations being flushed, or queued for it."""
        self._turn = asyncio.Lock()
        self._writes_locally = False
        self._parts: dict[GenerationId, tuple[Flush, Pin]] = {}
        """Generations pinned here until the leader has them flushed."""
        self._order: FlushOrder | None = None
        """Newest order that was followed."""
        self._ended: FlushEnd | None = None
        """Newest end of a flush known here."""
        self.written: Written | None = None
        """Result of this keeper's part of the newest flush."""
        self.flushing: GenerationId | None = None
        """Generation being flushed."""

    def want(self, generation: GenerationId, request: Flush) -> None:
        """Request that a generation is flushed once it is agreed. A trainer that has reconnected
        repeats its request, even if the flush is pending or has ended."""
        if generation in self._parts or self.handed_over(generation):
            return
        over = self.over
        if over is not None and generation < over.generation:
            self._run_later(self._fail([generation], _OVERTAKEN))
            return
        self._wanted[generation] = request
        self.begin(generation)
        self._give_up_lost()

    def handed_over(self, generation: GenerationId) -> bool:
        """Handle a generation handed over by a reconnected trainer. If its flush was the last to
        end, announce that again, since the trainer may have missed it, and return True."""
        over = self.over
        if over is None or generation != over.generation:
            return False
        self._run_later(self._tell(over))
        return True

    @property
    def over(self) -> FlushEnd | None:
        """The newest end of a flush, unless it will be retried."""
        ended = self._ended
        return ended if ended is not None and ended.final else None

    @property
    def durable(self) -> GenerationId | None:
        """Generation of the newest flush, if that has succeeded."""
        over = self.over
        return over.generation if over is not None and not over.problem else None

    def agreed(self, generation: GenerationId) -> bool:
        """Begin the flush of an agreed generation, if wanted, and the write to the local level, if
        due; both pin it. Return whether the local write has begun."""
        self.begin(generation)
        local = self.local
        if local is None or not local.due(generation.step) or self._writes_locally:
            return False
        self._writes_locally = True
        pin = self._pool.generations.pin(generation)
        self._run_later(self._write_locally(local, generation, pin))
        return True

    def forget_dropped(self) -> None:
        """Forget flushes that can no longer be agreed, since a resume began a new epoch."""
        generations = self._pool.generations
        for generation in list(self._wanted):
            is_old = generation.epoch < generations.epoch
            if is_old and not generations.is_agreed(generation):
                del self._wanted[generation]
        for generation in [id for id in self._parts if id.epoch < generations.epoch]:
            self._release_part(generation)

    def begin(self, generation: GenerationId) -> None:
        """Begin a flush if it is wanted, agreed, and complete on this host: trainers hand over
        their images one by one."""
        if generation not in self._wanted or generation in self._begun:
            return
        if not self._pool.generations.is_agreed(generation) or not self._is_whole(generation):
            return
        pin = self._pool.generations.pin(generation)
        if self._reporting.leads:
            self._begun.add(generation)
            self._run_later(self._flush_until_durable(generation, self._wanted[generation], pin))
            return
        self._parts[generation] = (self._wanted.pop(generation), pin)
        self._run_later(self._settle_parts())

    def _is_whole(self, generation: GenerationId) -> bool:
        labels = [image.label for image in self._pool.images(generation)]
        ranks = {label.rank for label in labels}
        return bool(labels) and ranks.issuperset(self._reporting.own_ranks(labels[0].world))

    def _is_lost(self, generation: GenerationId) -> bool:
        is_whole = self._is_whole(generation)
        return not is_whole and self._pool.generations.will_not_come(generation)

    async def _settle_parts(self) -> None:
        """Keep only the newest pending part, and the part being written, since each takes a slot.
        If the flush of one has already ended, because it was agreed late here, announce that."""
        order = None if self._order is None else self._order.generation
        await self._fail_parts([id for id in sorted(self._parts)[:-1] if id != order], _REPLACED)
        over = self.over
        if over is not None and any(id <= over.generation for id in self._parts):
            await self._tell_end(over)
        await self._reporting.tell()

    def waiting(self, epoch: int) -> tuple[GenerationId, ...]:
        """Return the agreed generations that wait for the leader of this epoch."""
        return tuple(id for id in sorted(self._parts) if id.epoch == epoch)

    async def _fail_parts(self, generations: Sequence[GenerationId], problem: str) -> None:
        for generation in generations:
            self._release_part(generation)
        await self._fail(generations, problem)

    async def _fail(self, generations: Sequence[GenerationId], problem: str) -> None:
        for generation in generations:
            await self._tell(FlushLost(generation, problem))

    def _release_part(self, generation: GenerationId) -> None:
        _, pin = self._parts.pop(generation)
        self._pool.generations.unpin(pin)

    async def follow(self, standing: Standing) -> None:
        """Act on a standing: announce the flush that has ended, and write the ordered part. The
        leader has its own, and only ends the flushes that are lost."""
        await self.note_end(standing.ended)
        self._give_up_lost()
        if self._reporting.leads:
            self._end_lost()
            return
        order = standing.flush
        if order is not None and order != self._order:
            self._order = order
            self._run_later(self._write_part(order))

    async def note_end(self, ended: FlushEnd | None) -> None:
        """Announce the end of a flush, unless this or a later one is known."""
        if ended is not None and ended != self._ended and not self._is_over(ended.generation):
            self._ended = ended
            await self._tell_end(ended)

    def _is_over(self, generation: GenerationId) -> bool:
        return self.over is not None and generation <= self.over.generation

    def _give_up_lost(self) -> None:
        """Fail requested flushes with images missing for good, as when a keeper was replaced and
        some trainer had no image to hand over."""
        waiting = self._wanted.keys() - self._begun
        lost = sorted(filter(self._is_lost, waiting))
        for generation in lost:
            del self._wanted[generation]
        if lost:
            self._run_later(self._fail(lost, _LOST))

    def _end_lost(self) -> None:
        """Fail the flush that other keepers wait for, but whose images are missing here for good.
        One at a time, since keepers learn only of the newest end."""
        lost = max(filter(self._is_lost, self._reporting.lead.wanted), default=None)
        if lost is not None and self.flushing is None:
            self._reporting.end(FlushEnd(lost, "", problem=_LOST))

    async def _write_part(self, order: FlushOrder) -> None:
        request, _ = self._parts.get(order.generation, (None, ()))
        images = self._pool.images(order.generation)
        if request is None or not images:
            problem = f"this keeper has nothing of step {order.generation.step} to write"
            gone = self._is_lost(order.generation)
            written = Written(order.attempt, problem=problem, gone=gone)
        else:
            try:
                written = await flush_part(request, order, images)
            except (HoldfastError, OSError) as error:
                is_damaged = isinstance(error, DamagedError)
                if is_damaged:
                    self._damaged(order.generation)
                written = Written(order.attempt, problem=str(error), damaged=is_damaged)
        if self._order == order:
            self.written = written
            await self._reporting.tell()

    async def unheard(self, problem: str) -> None:
        """Tell the trainers that the parts which wait for an unreachable leader have failed. The
        parts stay: another leader may still order them, and cannot finish without."""
        await self._fail(sorted(self._parts), problem)

    async def _tell_end(self, ended: FlushEnd) -> None:
        self._counters.flushed += not ended.problem
        await self._tell(ended)
        if ended.final:
            self._wanted.pop(ended.generation, None)
            if ended.generation in self._parts:
                self._release_part(ended.generation)
            older = [id for id in sorted(self._parts) if id < ended.generation]
            await self._fail_parts(older, _OVERTAKEN)

    async def _write_locally(self, local: LocalLevel, generation: GenerationId, pin: Pin) -> None:
        problem = ""
        try:
            await local.write(self._pool.images(generation))
            self._counters.local += 1
        except (HoldfastError, OSError) as error:
            self._counters.local_failures += 1
            _log.warning(
                "step %d could not be written to local storage: %s", generation.step, error
            )
            problem = str(error)
        finally:
            self._writes_locally = False
            self._pool.generations.unpin(pin)
        await self._tell(Local(generation, problem))

    async def _flush_until_durable(
        self, generation: GenerationId, request: Flush, pin: Pin
    ) -> None:
        """Flush, with retries, until the generation is durable, superseded, dropped or damaged."""
        try:
            async with self._turn:
                self.flushing = generation
                for tried in itertools.count():
                    if await self._is_overtaken_by_end(generation):
                        return
                    if await self._has_ended(generation, request):
                        return
                    await asyncio.sleep(FLUSH_PAUSES_S[min(tried, len(FLUSH_PAUSES_S) - 1)])
        finally:
            self.flushing = None
            self._wanted.pop(generation, None)
            self._begun.discard(generation)
            self._pool.generations.unpin(pin)

    def _is_overtaken(self, generation: GenerationId) -> bool:
        return any(
            other > generation and self._pool.generations.is_agreed(other) for other in self._wanted
        )

    async def _is_overtaken_by_end(self, generation: GenerationId) -> bool:
        """Return whether the flush of this generation or a later one has ended meanwhile, and fail
        this one if it is older. An earlier leader may have ended it."""
        over = self.over
        if over is None or generation > over.generation:
            return False
        if generation < over.generation:
            await self._fail([generation], _OVERTAKEN)
        return True

    def _is_dropped(self, generation: GenerationId) -> bool:
        """Return whether a resume has dropped the generation, here or on other keepers."""
        generations = self._pool.generations
        is_old = generation.epoch < generations.epoch
        return not generations.is_agreed(generation) or (is_old and not self._reporting.is_alone)

    async def _has_ended(self, generation: GenerationId, request: Flush) -> bool:
        """Flush once. Return whether no retry is needed."""
        began_s = time.perf_counter()
        try:
            ended = await self._flush(generation, request)
        except (HoldfastError, OSError) as error:
            self._counters.flush_failures += 1
            is_damaged = isinstance(error, DamagedError)
            is_over = is_damaged or isinstance(error, SupersededError)
            final = is_over or self._is_dropped(generation) or self._is_overtaken(generation)
            _log.warning("step %d could not be flushed: %s", generation.step, error)
            if is_damaged:
                self._damaged(generation)
            if await self._is_overtaken_by_end(generation):
                return True
            await self._end(FlushEnd(generation, "", problem=str(error), final=final))
            return final
        _log.info("step %d is durable after %.1f s", generation.step, time.perf_counter() - began_s)
        self._counters.flushed += 1
        await self._end(ended)
        return True

    async def _end(self, ended: FlushEnd) -> None:
        self._ended = ended
        self._reporting.end(ended)
        await self._tell(ended)

    async def _flush(self, generation: GenerationId, request: Flush) -> FlushEnd:
        def is_wanted() -> bool:
            return self._pool.generations.is_agreed(generation)

        images = self._pool.images(generation)
        return await flush(request, generation, images, self._reporting, is_wanted)
