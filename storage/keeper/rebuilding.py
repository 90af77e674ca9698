"""Rebuilds lost images: for trainers that resume, and ahead of them on a spare host."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from ...errors import HoldfastError
from ..arenas.messages import Rebuild, Refused
from .options import KeeperOptions
from .parity.guards import rebuilt, unseen
from .slot_memory import SlotPool
from .status import Counters

_log = logging.getLogger(__name__)


class Rebuilding:
    """Rebuilds images into the slots of one keeper."""

    def __init__(self, pool: SlotPool, options: KeeperOptions, counters: Counters) -> None:
        self._pool = pool
        self._options = options
        self._counters = counters

    async def rebuild(
        self, request: Rebuild, moved: Callable[[], Awaitable[None]] = unseen
    ) -> Refused | None:
        """Rebuild one image, unless an intact one is held. Return the reason why that failed, if it
        did. Calls ``moved()`` on progress."""
        with self._pool.pinned(request.generation):
            damaged = self._pool.slot_of(request.generation, request.rank)
            if damaged is not None and await damaged.is_whole():
                return None
            options = self._options
            try:
                label, memory = await rebuilt(request, options.run, options.certificate, moved)
            except (HoldfastError, OSError) as error:
                text = f"the image of rank {request.rank} cannot be rebuilt: {error}"
                return Refused("lost", text)
            refusal = await self._pool.add_rebuilt(label, memory, damaged)
            if refusal is not None:
                return Refused(refusal.reason.value, refusal.text)
            self._pool.generations.agreed(label.generation)
        self._counters.rebuilt += 1
        _log.info("the image of rank %d of step %d is rebuilt", label.rank, label.generation.step)
        return None
