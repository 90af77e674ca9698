"""The trainers of a keeper: processes that have connected, until the kernel tells that they have
ended.

A line says little about that: a forked child keeps it open. A pidfd is readable once the process
has ended and its memory is gone, so that what it had mapped may be used for something else.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ..arenas.line import Line
from ..arenas.messages import Event, Hello, UnderWay, encode

__all__ = ["Recalling", "Trainer", "Trainers"]

TELL_S = 5.0
"""How long a trainer may take to receive what it is told."""
UNDER_WAY_S = 0.5
"""How often one that waits for something long is told that it gets on."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Trainer:
    """A process that has connected. ``number``: for the state machine. ``handed``: the slots whose
    memory it has. ``asks``: the number of the request that is answered now."""

    number: int
    pid: int
    rank: int
    world: int
    host: str
    line: Line
    pidfd: int
    epoch: int = -1
    asks: int = 0
    handed: set[int] = field(default_factory=set)


class Recalling:
    """What a keeper does before it lets trainers in: ``over`` is set when it does."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self._moves = 0

    def moved(self) -> None:
        """It gets on."""
        self._moves += 1

    async def waited_for(self, tell: Callable[[], Awaitable[None]]) -> None:
        """Until it is over; meanwhile ``tell()`` says to who waits that it gets on. Raises what it
        raises where nobody waits any more."""
        if self.over.is_set():
            return
        told = self._moves
        while not self.over.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(UNDER_WAY_S):
                    await self.over.wait()
            if told != self._moves:
                told = self._moves
                await tell()
        await tell()


class Trainers:
    """All trainers that are alive. ``gone(trainer)`` is called when one has ended,
    ``back(trainer)`` when one has connected anew, and has lost what it was filling."""

    def __init__(self, gone: Callable[[Trainer], None], back: Callable[[Trainer], None]) -> None:
        self._gone = gone
        self._back = back
        self._numbers = itertools.count(1)
        self._by_pid: dict[int, Trainer] = {}

    def __iter__(self) -> Iterator[Trainer]:
        return iter(list(self._by_pid.values()))

    def __len__(self) -> int:
        return len(self._by_pid)

    def __contains__(self, trainer: Trainer) -> bool:
        return self._by_pid.get(trainer.pid) is trainer

    def at(self, line: Line, hello: Hello) -> Trainer:
        """The process at the other end of ``line``, watched until its end. Raises OSError where it
        has ended already."""
        pid = line.peer_pid
        known = self._by_pid.get(pid)
        if known is not None:
            known.line.close()
            known.line = line
            known.handed.clear()  # it has closed what it was handed, or has given it to us
            known.rank, known.world, known.host = hello.rank, hello.world, hello.host
            self._back(known)
            return known
        pidfd = line.peer_pidfd()
        trainer = Trainer(
            next(self._numbers), pid, hello.rank, hello.world, hello.host, line, pidfd
        )
        self._by_pid[pid] = trainer
        asyncio.get_running_loop().add_reader(pidfd, self._ended, trainer)
        return trainer

    def _ended(self, trainer: Trainer) -> None:
        """A process has ended, and its memory is gone."""
        self._unwatch(trainer)
        del self._by_pid[trainer.pid]
        trainer.line.close()
        _log.info("rank %d (process %d) has ended", trainer.rank, trainer.pid)
        self._gone(trainer)

    def _unwatch(self, trainer: Trainer) -> None:
        asyncio.get_running_loop().remove_reader(trainer.pidfd)
        os.close(trainer.pidfd)

    async def tell(self, trainer: Trainer, event: Event, fds: Sequence[int] = ()) -> None:
        """Tell a trainer, if it is still there."""
        await self._send(trainer, encode(0, event), fds)

    def under_way(self, trainer: Trainer) -> Callable[[], Awaitable[None]]:
        """To be called as often as one likes while what a trainer asks for now gets on: it is told
        so, but not too often."""
        number, told_s = trainer.asks, time.monotonic()

        async def moved() -> None:
            nonlocal told_s
            if time.monotonic() - told_s >= UNDER_WAY_S:
                told_s = time.monotonic()
                await self._send(trainer, encode(number, UnderWay()))

        return moved

    async def _send(self, trainer: Trainer, data: bytes, fds: Sequence[int] = ()) -> None:
        try:
            async with asyncio.timeout(TELL_S):
                await trainer.line.send(data, fds)
        except TimeoutError:  # it does not read: it is stopped, and finds its line closed
            trainer.line.close()
        except OSError as error:
            _log.debug("rank %d is not told: %s", trainer.rank, error)

    async def tell_all(self, event: Event, epoch: int) -> None:
        """Tell all trainers of an epoch, side by side."""
        told = [self.tell(trainer, event) for trainer in self if trainer.epoch == epoch]
        await asyncio.gather(*told)

    def close(self) -> None:
        """Watch them no more."""
        for trainer in self:
            self._unwatch(trainer)
        self._by_pid.clear()
