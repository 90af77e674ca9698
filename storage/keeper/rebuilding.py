"""Rebuilds lost images: for trainers that resume, and ahead of them on a spare host.

A spare is a keeper without trainers. It asks the keepers of the job, again and again, for their
inventories. If the newest generation that can be resumed has lost images, it rebuilds them, so that
a job which restarts on its host finds them there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from ...errors import HoldfastError
from ..arenas.hosts import KeeperHost
from ..arenas.label import GenerationId
from ..arenas.messages import Inventory, Rebuild, Refused
from .decisions.choice import Choice, Stock, choices
from .options import KeeperOptions
from .parity.guards import rebuilt, unseen
from .reading import Unheard, stock_of
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
            except (HoldfastError, OSError) as error:
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


class Server(Protocol):
    """The part of a keeper that a spare uses."""

    pool: SlotPool
    rebuilding: Rebuilding

    @property
    def host(self) -> KeeperHost: ...

    @property
    def is_unused(self) -> bool: ...

    def inventory(self) -> Inventory: ...


class Spare:
    """A keeper that prepares to replace a lost one. ``job``: keepers of the job to begin with;
    ``certificate``: PEM file to verify them with."""

    def __init__(self, keeper: Server, job: Sequence[KeeperHost], certificate: str) -> None:
        self._keeper = keeper
        self._job = tuple(job)
        self._certificate = certificate
        self._made: GenerationId | None = None
        """Generation that this spare has rebuilt images of."""
        self._problem = ""

    async def look(self) -> bool:
        """Ask the keepers of the job once, and rebuild lost images. Return whether any keeper has
        answered. Does nothing while one of them is slow: its images are not lost."""
        answers = await asyncio.gather(*(stock_of(host, self._certificate) for host in self._job))
        stocks = [answer for answer in answers if isinstance(answer, Stock)]
        newest = max(stocks, key=lambda stock: stock.inventory.epoch, default=None)
        if newest is None:
            return False
        if newest.inventory.hosts and newest.inventory.hosts != self._job:
            self._job = newest.inventory.hosts  # these have names, which the first ones lack
            return True
        is_slow = any(isinstance(answer, Unheard) and answer.listens for answer in answers)
        if is_slow or not self._keeper.is_unused:
            return True
        own = Stock(self._keeper.host, self._keeper.inventory())
        found, _ = choices([*stocks, own], [own.host.name], lambda generation: True)
        if found:
            await self._prepare(found[0], tuple(stock.host for stock in stocks))
        return True

    async def _prepare(self, choice: Choice, hosts: tuple[KeeperHost, ...]) -> None:
        if self._made is not None and self._made != choice.generation:
            self._keeper.pool.discard(self._made)
            self._made = None
        for lost in choice.rebuilt:
            if not self._keeper.is_unused:
                return
            request = Rebuild(choice.generation, lost.rank, lost.group, lost.lost, hosts)
            refused = await self._keeper.rebuilding.rebuild(request)
            if refused is None:
                self._made = choice.generation
            self._note(refused, choice.generation)

    def _note(self, refused: Refused | None, generation: GenerationId) -> None:
        problem = "" if refused is None else f"step {generation.step}: {refused.text}"
        if problem and problem != self._problem:
            _log.warning("this spare cannot hold everything: %s", problem)
        self._problem = problem
