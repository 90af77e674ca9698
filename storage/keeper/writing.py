"""What a keeper writes: generations that trainers want in storage, and those that are due on
storage of the host itself. Neither is in the way of anything else: a failure is told, counted and
tried again.

What is to be in storage is committed by the lead keeper. Where there are others, each writes the
images that it holds when the lead keeper says for which attempt.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from ...errors import DamagedError, HoldfastError, SupersededError
from ..arenas.label import GenerationId
from ..arenas.messages import Durable, Event, Flush, FlushFailed, Local
from .flush import flush_part, flush_to
from .flush_together import flush_together
from .held import Held
from .local_level import LocalLevel
from .reporting import Reporting
from .standing import FlushEnd, FlushOrder, Standing, Written
from .status import Counters

__all__ = ["Writing"]

FLUSH_PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""How long a keeper waits after each failed flush; then the last of them again and again."""
_REPLACED = "a later step is to be written in the place of this one"
_OVERTAKEN = "the flush of a later step has ended, and how this one ended was not heard here"
_LOST = "not all images of this step are in memory any more where it was to be committed"

_log = logging.getLogger(__name__)


class Writing:
    """What is being written, and what is to be. ``tell(event)`` tells the trainers;
    ``damaged(generation)`` is called where memory no longer holds what was sealed."""

    def __init__(
        self,
        held: Held,
        local: LocalLevel | None,
        counters: Counters,
        reporting: Reporting,
        tell: Callable[[Event], Awaitable[None]],
        damaged: Callable[[GenerationId], None],
    ) -> None:
        self._held = held
        self._local = local
        self._counters = counters
        self._reporting = reporting
        self._run_later = reporting.run_later
        self._tell = tell
        self._damaged = damaged
        self._wanted: dict[GenerationId, Flush] = {}
        self._begun: set[GenerationId] = set()
        """What is being flushed, or waits for its turn."""
        self._turn = asyncio.Lock()
        self._writes_locally = False
        self._parts: dict[GenerationId, Flush] = {}
        """What waits for the lead keeper, and is kept for that."""
        self._order: FlushOrder | None = None
        """The newest that was followed."""
        self._ended: FlushEnd | None = None
        """The newest that is known here."""
        self.written: Written | None = None
        """What has become of this keeper's part of the newest flush."""
        self.flushing: GenerationId | None = None
        """What is being flushed."""

    def want(self, generation: GenerationId, request: Flush) -> None:
        """A generation is to be in storage, once it is agreed on. A trainer whose line was cut asks
        again, maybe for what waits already, or has ended."""
        if generation in self._parts or self.handed_over(generation):
            return
        over = self._over
        if over is not None and generation < over.generation:
            self._run_later(self._fail([generation], _OVERTAKEN))
            return
        self._wanted[generation] = request
        self.begin(generation)
        self._give_up_lost()

    def handed_over(self, generation: GenerationId) -> bool:
        """A trainer whose line was cut is here again, with this generation. Whether it is the one
        whose flush has ended last: trainers are told again, since this one may have missed it."""
        over = self._over
        if over is None or generation != over.generation:
            return False
        self._run_later(self._say(over))
        return True

    @property
    def _over(self) -> FlushEnd | None:
        """The newest end, unless what has failed is tried again."""
        ended = self._ended
        return ended if ended is not None and ended.final else None

    def agreed(self, generation: GenerationId) -> bool:
        """A generation is agreed on: write it to where it is wanted. It is kept for that from now
        on. Whether it is written to storage of the host."""
        self.begin(generation)
        local = self._local
        if local is None or not local.due(generation.step) or self._writes_locally:
            return False
        self._writes_locally = True
        self._held.generations.flushing(generation)
        self._run_later(self._write_locally(local, generation))
        return True

    def forget_dropped(self) -> None:
        """What is not agreed on, and will not be, since a resume has come, is not wanted any
        more."""
        generations = self._held.generations
        for generation in list(self._wanted):
            is_old = generation.epoch < generations.epoch
            if is_old and not generations.is_agreed(generation):
                del self._wanted[generation]
        for generation in [id for id in self._parts if id.epoch < generations.epoch]:
            self._release_part(generation)

    def begin(self, generation: GenerationId) -> None:
        """Begin to write a generation to storage, if it is wanted there, agreed on, and all here:
        trainers hand over their images one after the other."""
        if generation not in self._wanted or generation in self._begun:
            return
        if not self._held.generations.is_agreed(generation) or not self._is_whole(generation):
            return
        self._held.generations.flushing(generation)
        if self._reporting.leads:
            self._begun.add(generation)
            self._run_later(self._flush_until_durable(generation, self._wanted[generation]))
            return
        self._parts[generation] = self._wanted.pop(generation)
        self._run_later(self._settle_parts())

    def _is_whole(self, generation: GenerationId) -> bool:
        """Whether there is the image of each rank of this host."""
        labels = [image.label for image in self._held.images(generation)]
        ranks = {label.rank for label in labels}
        return bool(labels) and ranks.issuperset(self._reporting.own_ranks(labels[0].world))

    def _is_lost(self, generation: GenerationId) -> bool:
        """Whether an image of it is not here, and will not be."""
        is_whole = self._is_whole(generation)
        return not is_whole and self._held.generations.will_not_come(generation)

    async def _settle_parts(self) -> None:
        """Beside the part that is being written, only the newest is kept: each takes a slot. One
        that was agreed on late may have ended before."""
        order = None if self._order is None else self._order.generation
        await self._fail_parts([id for id in sorted(self._parts)[:-1] if id != order], _REPLACED)
        over = self._over
        if over is not None and any(id <= over.generation for id in self._parts):
            await self._tell_end(over)
        await self._reporting.tell()

    def waiting(self, epoch: int) -> tuple[GenerationId, ...]:
        """What is agreed on, and waits for the lead keeper of this epoch."""
        return tuple(id for id in sorted(self._parts) if id.epoch == epoch)

    async def _fail_parts(self, generations: Sequence[GenerationId], problem: str) -> None:
        for generation in generations:
            self._release_part(generation)
        await self._fail(generations, problem)

    async def _fail(self, generations: Sequence[GenerationId], problem: str) -> None:
        for generation in generations:
            await self._tell(FlushFailed(generation, problem, final=True))

    def _release_part(self, generation: GenerationId) -> None:
        del self._parts[generation]
        self._held.generations.flushed(generation)

    async def follow(self, standing: Standing) -> None:
        """Write what the lead keeper says, and tell what has become of it. That keeper itself says
        what it will not have written."""
        self._give_up_lost()
        if self._reporting.leads:
            self._end_lost()
            return
        order, ended = standing.flush, standing.ended
        if order is not None and order != self._order:
            self._order = order
            self._run_later(self._write_part(order))
        if ended is not None and ended != self._ended:
            self._ended = ended
            await self._tell_end(ended)

    def _give_up_lost(self) -> None:
        """Nobody waits for what is not all here, and will not be, as where a keeper has taken the
        place of one that has died, and not all of its trainers had an image to hand over."""
        waiting = self._wanted.keys() - self._begun
        lost = sorted(filter(self._is_lost, waiting))
        for generation in lost:
            del self._wanted[generation]
        if lost:
            self._run_later(self._fail(lost, _LOST))

    def _end_lost(self) -> None:
        """Nor at other hosts. One at a time: keepers hear of the newest end."""
        lost = max(filter(self._is_lost, self._reporting.lead.wanted), default=None)
        if lost is not None and self.flushing is None:
            self._reporting.end(FlushEnd(lost, "", problem=_LOST))

    async def _write_part(self, order: FlushOrder) -> None:
        """Write the images that are held here; say what has become of it."""
        request = self._parts.get(order.generation)
        images = self._held.images(order.generation)
        if request is None or not images:
            problem = f"nothing of step {order.generation.step} is to be written here"
            gone = self._is_lost(order.generation)
            written = Written(order.attempt, problem=problem, gone=gone)
        else:
            try:
                written = await flush_part(request, order.attempt, images)
            except (HoldfastError, OSError) as error:
                is_damaged = isinstance(error, DamagedError)
                if is_damaged:
                    self._damaged(order.generation)
                written = Written(order.attempt, problem=str(error), damaged=is_damaged)
        if self._order == order:
            self.written = written
            await self._reporting.tell()

    async def fail_parts(self, problem: str) -> None:
        """What waits for the lead keeper here will not be committed by it."""
        self._order = None
        await self._fail_parts(sorted(self._parts), problem)

    async def _tell_end(self, ended: FlushEnd) -> None:
        self._counters.flushed += not ended.problem
        await self._say(ended)
        if ended.final:
            self._wanted.pop(ended.generation, None)
            if ended.generation in self._parts:
                self._release_part(ended.generation)
            older = [id for id in sorted(self._parts) if id < ended.generation]
            await self._fail_parts(older, _OVERTAKEN)

    async def _say(self, ended: FlushEnd) -> None:
        """Trainers are told."""
        if ended.problem:
            await self._tell(FlushFailed(ended.generation, ended.problem, ended.final))
        else:
            await self._tell(Durable(ended.generation, ended.attempt, ended.nbytes))

    async def _write_locally(self, local: LocalLevel, generation: GenerationId) -> None:
        problem = ""
        try:
            await local.write(self._held.images(generation))
            self._counters.local += 1
        except (HoldfastError, OSError) as error:
            self._counters.local_failures += 1
            _log.warning("step %d is not on local storage: %s", generation.step, error)
            problem = str(error)
        finally:
            self._writes_locally = False
            self._held.generations.flushed(generation)
        await self._tell(Local(generation, problem))

    async def _flush_until_durable(self, generation: GenerationId, request: Flush) -> None:
        """Flush, and try again where that fails, until it is durable, a later one is to be flushed,
        a resume has dropped it or made others let go of it, or memory no longer holds what was
        sealed."""
        try:
            async with self._turn:
                self.flushing = generation
                for tried in itertools.count():
                    if await self._has_ended(generation, request):
                        return
                    await asyncio.sleep(FLUSH_PAUSES_S[min(tried, len(FLUSH_PAUSES_S) - 1)])
        finally:
            self.flushing = None
            self._wanted.pop(generation, None)
            self._begun.discard(generation)
            self._held.generations.flushed(generation)

    def _is_overtaken(self, generation: GenerationId) -> bool:
        return any(
            other > generation and self._held.generations.is_agreed(other) for other in self._wanted
        )

    def _is_dropped(self, generation: GenerationId) -> bool:
        """Whether a resume has dropped it; or other keepers have let go of it when one came."""
        generations = self._held.generations
        is_old = generation.epoch < generations.epoch
        return not generations.is_agreed(generation) or (is_old and not self._reporting.is_alone)

    async def _has_ended(self, generation: GenerationId, request: Flush) -> bool:
        """Flush once; whether there is nothing left to do."""
        began_s = time.perf_counter()
        try:
            attempt, nbytes = await self._flush(generation, request)
        except (HoldfastError, OSError) as error:
            self._counters.flush_failures += 1
            is_damaged = isinstance(error, DamagedError)
            is_over = is_damaged or isinstance(error, SupersededError)
            final = is_over or self._is_dropped(generation) or self._is_overtaken(generation)
            _log.warning("step %d is not flushed: %s", generation.step, error)
            if is_damaged:
                self._damaged(generation)
            await self._end(FlushEnd(generation, "", problem=str(error), final=final))
            return final
        _log.info("step %d is durable after %.1f s", generation.step, time.perf_counter() - began_s)
        self._counters.flushed += 1
        await self._end(FlushEnd(generation, attempt, nbytes))
        return True

    async def _end(self, ended: FlushEnd) -> None:
        """All are told."""
        self._ended = ended
        self._reporting.end(ended)
        await self._say(ended)

    async def _flush(self, generation: GenerationId, request: Flush) -> tuple[str, int]:
        """The id of the attempt, and how many bytes its images have."""

        def is_wanted() -> bool:
            return self._held.generations.is_agreed(generation)

        images = self._held.images(generation)
        if not self._reporting.is_alone:
            return await flush_together(request, generation, images, self._reporting, is_wanted)
        if not images or len(images) < images[0].label.world:
            raise DamagedError(f"not all images of step {generation.step} are in memory")
        attempt = await flush_to(request, images, is_wanted)
        return attempt, sum(image.label.nbytes for image in images if image.label.digests)
