"""What a keeper writes: generations that trainers want in storage, and those that are due on
storage of the host itself. Neither is in the way of anything else: a failure is told, counted and
tried again."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from ...errors import DamagedError, HoldfastError
from ..arenas.label import GenerationId
from ..arenas.messages import Durable, Event, Flush, FlushFailed
from .flush import flush_to
from .held import Held
from .local_level import LocalLevel
from .status import Counters

__all__ = ["Writing"]

FLUSH_PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""How long a keeper waits after each failed flush; then the last of them again and again."""

_log = logging.getLogger(__name__)


class Writing:
    """What is being written, and what is to be. ``run_later(work)`` runs a coroutine beside all
    else; ``tell(event)`` tells the trainers; ``damaged(generation)`` is called where memory no
    longer holds what was sealed."""

    def __init__(
        self,
        held: Held,
        local: LocalLevel | None,
        counters: Counters,
        run_later: Callable[[Coroutine[Any, Any, None]], None],
        tell: Callable[[Event], Awaitable[None]],
        damaged: Callable[[GenerationId], None],
    ) -> None:
        self._held = held
        self._local = local
        self._counters = counters
        self._run_later = run_later
        self._tell = tell
        self._damaged = damaged
        self._wanted: dict[GenerationId, Flush] = {}
        self._turn = asyncio.Lock()
        self._writes_locally = False
        self.flushing: GenerationId | None = None
        """What is being flushed."""

    def want(self, generation: GenerationId, request: Flush) -> None:
        """A generation is to be in storage, once it is agreed on."""
        self._wanted[generation] = request
        if self._held.generations.is_agreed(generation):
            self._begin(generation)

    def agreed(self, generation: GenerationId) -> None:
        """A generation is agreed on: write it to where it is wanted. It is kept for that from now
        on."""
        if generation in self._wanted:
            self._begin(generation)
        local = self._local
        if local is not None and local.due(generation.step) and not self._writes_locally:
            self._writes_locally = True
            self._held.generations.flushing(generation)
            self._run_later(self._write_locally(local, generation))

    def forget_dropped(self) -> None:
        """What is not agreed on, and will not be, since a resume has come, is not wanted any
        more."""
        generations = self._held.generations
        for generation in list(self._wanted):
            is_old = generation.epoch < generations.epoch
            if is_old and not generations.is_agreed(generation):
                del self._wanted[generation]

    def _begin(self, generation: GenerationId) -> None:
        self._held.generations.flushing(generation)
        self._run_later(self._flush_until_durable(generation, self._wanted[generation]))

    async def _write_locally(self, local: LocalLevel, generation: GenerationId) -> None:
        try:
            await local.write(self._held.images(generation))
            self._counters.local += 1
        except (HoldfastError, OSError) as error:
            self._counters.local_failures += 1
            _log.warning("step %d is not on local storage: %s", generation.step, error)
        finally:
            self._writes_locally = False
            self._held.generations.flushed(generation)

    async def _flush_until_durable(self, generation: GenerationId, request: Flush) -> None:
        """Flush, and try again where that fails, until it is durable, a later one is to be flushed,
        a resume has dropped it, or memory no longer holds what was sealed."""
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
            self._held.generations.flushed(generation)

    def _is_overtaken(self, generation: GenerationId) -> bool:
        return any(
            other > generation and self._held.generations.is_agreed(other) for other in self._wanted
        )

    async def _has_ended(self, generation: GenerationId, request: Flush) -> bool:
        """Flush once; whether there is nothing left to do."""
        images = self._held.images(generation)
        began_s = time.perf_counter()
        try:
            if not images or len(images) < images[0].label.world:
                raise DamagedError(f"not all images of step {generation.step} are in memory")
            attempt = await flush_to(
                request, images, lambda: self._held.generations.is_agreed(generation)
            )
        except (HoldfastError, OSError) as error:
            self._counters.flush_failures += 1
            is_dropped = not self._held.generations.is_agreed(generation)
            is_damaged = isinstance(error, DamagedError)
            final = is_damaged or is_dropped or self._is_overtaken(generation)
            _log.warning("step %d is not flushed: %s", generation.step, error)
            if is_damaged:
                self._damaged(generation)
            await self._tell(FlushFailed(generation, str(error), final))
            return final
        nbytes = sum(image.label.nbytes for image in images if image.label.digests)
        _log.info("step %d is durable after %.1f s", generation.step, time.perf_counter() - began_s)
        self._counters.flushed += 1
        await self._tell(Durable(generation, attempt, nbytes))
        return True
