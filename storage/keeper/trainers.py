"""Tracks the connected trainer processes until the kernel reports their end.

A closed connection proves nothing: a forked child may keep it open. A pidfd becomes readable after
the process has ended and its memory is gone, so that slots it had mapped can be reused.
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

from ..arenas.messages import (
    OTHER_VERSION,
    VERSION,
    Event,
    Hello,
    Progress,
    Refused,
    Replaced,
    encode,
)
from ..arenas.sockets import Line

TELL_S = 5.0
"""Time limit for a trainer to receive a message."""
PROGRESS_S = 0.5
"""Interval of progress messages to a trainer that waits for a long request."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Trainer:
    """A connected process. ``number``: identifies it in the state machine; ``identity``: see
    ``Line.peer_identity``; ``node``: see :class:`~..arenas.messages.Hello`; ``handed``: slots whose
    memory it was given; ``asks``: number of the request being answered; ``left``: it has announced
    its end."""

    number: int
    pid: int
    rank: int
    world: int
    host: str
    node: int
    line: Line
    pidfd: int
    identity: int
    epoch: int = -1
    asks: int = 0
    left: bool = False
    handed: set[int] = field(default_factory=set)


class Startup:
    """Startup of a keeper; ``over`` is set when trainers are let in."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self._moves = 0

    def moved(self) -> None:
        """Record progress."""
        self._moves += 1

    async def wait(self, tell: Callable[[], Awaitable[None]]) -> None:
        """Wait until startup is over, and call ``tell()`` on progress. Raises as ``tell()`` does
        when the waiting trainer has gone."""
        if self.over.is_set():
            return
        seen = self._moves
        while not self.over.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROGRESS_S):
                    await self.over.wait()
            if seen != self._moves:
                seen = self._moves
                await tell()
        await tell()


_UNKNOWN_PROCESS = Refused(
    "process",
    "this rank runs in another PID namespace, so the keeper cannot tell when it ends: let both "
    "share one (in Kubernetes: shareProcessNamespace: true), or use Linux 6.9 or newer",
)


class Trainers:
    """All live trainers. ``gone(trainer)`` is called when one has ended; ``back(trainer)`` when one
    has reconnected, and lost the image that it was filling."""

    def __init__(self, gone: Callable[[Trainer], None], back: Callable[[Trainer], None]) -> None:
        self._gone = gone
        self._back = back
        self._numbers = itertools.count(1)
        self._by_process: dict[int, Trainer] = {}
        self._dismissing: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[Trainer]:
        return iter(list(self._by_process.values()))

    def __len__(self) -> int:
        return len(self._by_process)

    def __contains__(self, trainer: Trainer) -> bool:
        return self._by_process.get(trainer.identity) is trainer

    def at(self, line: Line, hello: Hello) -> Trainer | Refused:
        """Return the process at the other end of ``line``, watched until it ends; a refusal if
        nothing identifies it. Raises OSError if it has ended already."""
        pidfd = line.peer_pidfd()
        identity = line.peer_identity(pidfd)
        if not identity:
            os.close(pidfd)
            return _UNKNOWN_PROCESS
        known = self._by_process.get(identity)
        if known is not None:
            os.close(pidfd)
            self._dismiss(known.line)
            known.line = line
            known.handed.clear()  # the trainer has closed these, or hands them over
            known.rank, known.world, known.host = hello.rank, hello.world, hello.host
            known.node = hello.node
            known.left = False
            self._back(known)
            return known
        number = next(self._numbers)
        of_rank = hello.rank, hello.world, hello.host, hello.node
        trainer = Trainer(number, line.peer_pid, *of_rank, line, pidfd, identity)
        self._by_process[identity] = trainer
        asyncio.get_running_loop().add_reader(pidfd, self._ended, trainer)
        return trainer

    def _dismiss(self, line: Line) -> None:
        """Close the earlier connection of a process that has connected again."""
        dismissing = asyncio.ensure_future(_dismissed(line))
        self._dismissing.add(dismissing)
        dismissing.add_done_callback(self._dismissing.discard)

    def _ended(self, trainer: Trainer) -> None:
        self._unwatch(trainer)
        del self._by_process[trainer.identity]
        trainer.line.close()
        _log.info("rank %d (process %d) has ended", trainer.rank, trainer.pid)
        self._gone(trainer)

    def _unwatch(self, trainer: Trainer) -> None:
        asyncio.get_running_loop().remove_reader(trainer.pidfd)
        os.close(trainer.pidfd)

    async def tell(self, trainer: Trainer, event: Event, fds: Sequence[int] = ()) -> None:
        """Send an event to a trainer, unless it has disconnected."""
        await self._send(trainer, encode(0, event), fds)

    def in_flight(self, trainer: Trainer) -> Callable[[], Awaitable[None]]:
        """Return a callback that reports progress on the trainer's current request. May be called
        often: messages are rate-limited."""
        number, sent_s = trainer.asks, time.monotonic()

        async def moved() -> None:
            nonlocal sent_s
            if time.monotonic() - sent_s >= PROGRESS_S:
                sent_s = time.monotonic()
                await self._send(trainer, encode(number, Progress()))

        return moved

    async def _send(self, trainer: Trainer, data: bytes, fds: Sequence[int] = ()) -> None:
        try:
            async with asyncio.timeout(TELL_S):
                await trainer.line.send(data, fds)
        except TimeoutError:  # it is stopped, and will find its connection closed
            trainer.line.close()
        except OSError as error:
            _log.debug("rank %d cannot be notified: %s", trainer.rank, error)

    async def tell_all(self, event: Event, epoch: int) -> None:
        """Send an event to all trainers of an epoch, concurrently."""
        sending = [self.tell(trainer, event) for trainer in self if trainer.epoch == epoch]
        await asyncio.gather(*sending)

    def close(self) -> None:
        """Stop watching all trainers."""
        for dismissing in self._dismissing:
            dismissing.cancel()
        for trainer in self:
            self._unwatch(trainer)
        self._by_process.clear()


def other_version(text: str = "") -> Refused:
    """Return the answer to a process of another version of Holdfast."""
    detail = f": {text}" if text else ""
    return Refused(OTHER_VERSION, f"this keeper speaks version {VERSION}{detail}")


def refusal_of(hello: Hello, run: str) -> Refused | None:
    """Return the answer to a trainer that a keeper of ``run`` cannot serve; None otherwise."""
    if hello.version != VERSION:
        return other_version()
    if hello.run != run:
        return Refused("run", f"this keeper belongs to the run {run}")
    if not 0 <= hello.rank < hello.world:
        return Refused("rank", f"rank {hello.rank} of {hello.world}")
    return None


async def _dismissed(line: Line) -> None:
    """Close a connection. Notify the other end, unless that has closed it, too."""
    try:
        with contextlib.suppress(OSError):
            async with asyncio.timeout(TELL_S):
                await line.send(encode(0, Replaced()))
    finally:
        line.close()
