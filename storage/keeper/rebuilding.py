"""Rebuilds lost images: for trainers that resume, and ahead of them on a spare host.

A spare is a keeper without trainers. It asks the keepers of the job, again and again, for their
inventories. If the newest generation that can be resumed has lost images, it rebuilds them, so that
a job which restarts on its host finds them there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from ...errors import HoldfastError
from ..arenas.hosts import KeeperHost
from ..arenas.label import GenerationId
from ..arenas.messages import Rebuild, Refused
from .decisions.choice import Stock, choices
from .options import KeeperOptions
from .parity.guards import rebuilt, unseen
from .reading import stock_of
from .slot_memory import SlotPool
from .status import Counters

SPARE_LOOK_S = 2.0

_log = logging.getLogger(__name__)


class Rebuilding:
    """Rebuilds images into the slots of one keeper."""

    def __init__(self, pool: SlotPool, options: KeeperOptions, counters: Counters) -> None:
        self._pool = pool
        self._options = options
        self._counters = counters

    def drop_except(self, generation: GenerationId) -> None:
        """Drop the images of all other generations."""
        for held in self._pool.generations.restorable():
            if held.generation != generation:
                self._pool.generations.discard(held.generation)
        self._pool.close_unheld()

    async def rebuild(
        self, request: Rebuild, moved: Callable[[], Awaitable[None]] = unseen
    ) -> Refused | None:
        """Rebuild one image, unless an intact one is held. Return the reason why that failed, if it
        did. Calls ``moved()`` on progress."""
        generations = self._pool.generations
        pin = generations.pin(request.generation)  # keep its slots from being overwritten
        try:
            damaged = self._pool.slot_of(request.generation, request.rank)
            if damaged is not None and await damaged.is_whole():
                return None
            options = self._options
            try:
                label, memory = await rebuilt(request, options.run, options.certificate, moved)
            except HoldfastError as error:
                text = f"the image of rank {request.rank} cannot be rebuilt: {error}"
                return Refused("lost", text)
            refusal = await self._pool.add_rebuilt(label, memory, damaged)
            if refusal is not None:
                return Refused(refusal.reason.value, refusal.text)
            generations.agreed(label.generation)
        finally:
            generations.unpin(pin)
        self._counters.rebuilt += 1
        _log.info("the image of rank %d of step %d is rebuilt", label.rank, label.generation.step)
        return None


class Spare:
    """A keeper that prepares to replace a lost one. ``own()``: its inventory; ``job``: keepers of
    the job to begin with; ``certificate``: PEM file to verify them with."""

    def __init__(
        self,
        rebuilding: Rebuilding,
        own: Callable[[], Stock],
        job: Sequence[KeeperHost],
        certificate: str,
    ) -> None:
        self._rebuilding = rebuilding
        self._own = own
        self._job = tuple(job)
        self._certificate = certificate
        self._problem = ""

    async def look(self) -> bool:
        """Ask the keepers of the job once, and rebuild lost images. Return whether any keeper has
        answered."""
        answers = await asyncio.gather(*(stock_of(host, self._certificate) for host in self._job))
        stocks = [answer for answer in answers if isinstance(answer, Stock)]
        newest = max(stocks, key=lambda stock: stock.inventory.epoch, default=None)
        if newest is None:
            return False
        if newest.inventory.hosts and newest.inventory.hosts != self._job:
            self._job = newest.inventory.hosts  # these have names, which the first ones lack
            return True
        own = self._own()
        found, _ = choices([*stocks, own], [own.host.name], lambda generation: True)
        for choice in found[:1]:
            self._rebuilding.drop_except(choice.generation)
            for lost in choice.rebuilt:
                hosts = tuple(stock.host for stock in stocks)
                request = Rebuild(choice.generation, lost.rank, lost.group, lost.lost, hosts)
                self._note(await self._rebuilding.rebuild(request), choice.generation)
        return True

    def _note(self, refused: Refused | None, generation: GenerationId) -> None:
        problem = "" if refused is None else f"step {generation.step}: {refused.text}"
        if problem and problem != self._problem:
            _log.warning("this spare cannot hold everything: %s", problem)
        self._problem = problem
