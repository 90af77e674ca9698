"""The ranks that exchange what they read, what they send each other, and what a lost connection
means."""

from __future__ import annotations

import asyncio
import contextlib
import select
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from ...core.aio import wait_out
from ...errors import CoordinationError, RankFailedError
from ..ranks.messages import Codec
from ..ranks.team import Team
from .connection import DIGEST_NBYTES, Connection

__all__ = [
    "HANDOVER",
    "NO_DIGEST",
    "RECEIPT",
    "ExchangeGroup",
    "ExchangeLimits",
    "by_path",
    "naming_member",
    "serve_in_thread",
]

T = TypeVar("T")

REPORT_PAUSE_S = 0.05

HANDOVER = struct.Struct(f"<QQ{DIGEST_NBYTES}s")
"""From the rank that has read a unit: its number; its position in the arena; over a network, the
digest of the bytes that follow."""
RECEIPT = struct.Struct("<Q")
"""The answer: the number of a unit that was received."""
NO_DIGEST = bytes(DIGEST_NBYTES)


class _ConnectionLost(Exception):
    """The connection to ``member`` was lost in a thread."""

    def __init__(self, member: int, error: OSError) -> None:
        self.member = member
        self.error = error


@dataclass(frozen=True, slots=True)
class ExchangeLimits:
    """What bounds an exchange."""

    slots: int = 2
    """Units in shared memory at a time. Shared memory is expensive: each page of it is mapped,
    cleared and given back by itself."""
    unit_nbytes: int = 8 << 20
    """The least length of a unit, which is what one rank reads, and hands on, at a time."""
    connect_all_timeout_s: float = 30.0
    failure_report_s: float = 5.0
    """How long after its connection was lost a rank may take to report its failure."""


@dataclass(frozen=True)
class ExchangeGroup:
    """Ranks of a team that exchange what they read, the *members*. ``name`` is used once in the
    team's life. ``host_ranks``: how many ranks this host has. ``job_host`` as for a Listener. To
    share fewer than ``least_nbytes`` is not worth it."""

    team: Team
    name: str
    ranks: Sequence[int]
    host_ranks: int
    job_host: str
    least_nbytes: int
    limits: ExchangeLimits

    @property
    def me(self) -> int:
        """The number of this rank among the members."""
        return self.ranks.index(self.team.rank)

    async def all_gather(self, what: str, kind: Codec[T], message: T) -> list[T]:
        """The messages of all members."""
        return await self.team.all_gather(f"{self.name}/{what}", kind, self.ranks, message)

    @contextlib.asynccontextmanager
    async def blaming(self, member: int) -> AsyncIterator[None]:
        """Where the connection to ``member`` is lost in the body, raise the failure that this rank
        reports, now or within a moment."""
        try:
            yield
        except OSError as error:
            rank = self.ranks[member]
            until_s = time.monotonic() + self.limits.failure_report_s
            while time.monotonic() < until_s:
                failure = await self.team.failure()
                if failure is not None:
                    raise failure from error
                await asyncio.sleep(REPORT_PAUSE_S)
            raise RankFailedError(
                f"rank {rank} has left in the middle of the load, and has reported no error",
                rank=rank,
                advice="Look at that rank's log; it was probably killed.",
            ) from error

    @contextlib.asynccontextmanager
    async def blaming_named(self) -> AsyncIterator[None]:
        """As :meth:`blaming`, for the member that a thread has named (:func:`naming_member`)."""
        try:
            yield
        except _ConnectionLost as lost:
            async with self.blaming(lost.member):
                raise lost.error from None

    def protocol_error(self, member: int) -> CoordinationError:
        """The error of a member that sends what was not agreed upon."""
        rank = self.ranks[member]
        return CoordinationError(
            f"rank {rank} hands on what was not agreed upon",
            rank=rank,
            advice="Do all ranks run the same version?",
        )


def by_path(
    connections: Mapping[int, Connection],
) -> tuple[dict[int, Connection], dict[int, Connection]]:
    """The connections to members of this host, and those to members of other hosts."""
    local: dict[int, Connection] = {}
    remote: dict[int, Connection] = {}
    for member, connection in connections.items():
        (remote if connection.over_network else local)[member] = connection
    return local, remote


@contextlib.contextmanager
def naming_member(member: int) -> Iterator[None]:
    """In a thread, where the connection to ``member`` is lost: say which one it was."""
    try:
        yield
    except OSError as error:
        raise _ConnectionLost(member, error) from error


async def serve_in_thread(
    group: ExchangeGroup,
    threads: ThreadPoolExecutor,
    connections: dict[int, Connection],
    serve: Callable[[int], bool],
) -> None:
    """Call ``serve`` with each member that has sent something, until it has returned True for all
    of them. In a thread: a turn of the event loop for each message takes as long as to copy what
    the message is about."""
    if not connections:
        return
    loop = asyncio.get_running_loop()
    serving = loop.run_in_executor(threads, _serve, connections, serve)
    try:
        async with group.blaming_named():
            await asyncio.shield(serving)
    except asyncio.CancelledError:
        for connection in connections.values():
            connection.shut_down()
        await wait_out([serving])
        # It has seen the connections shut down, or something after what this was cancelled for.
        serving.exception()
        raise


def _serve(connections: Mapping[int, Connection], serve: Callable[[int], bool]) -> None:
    """Has no deadline of its own: when a rank falls silent, the task that watches the ranks fails,
    and the connections are shut down."""
    poll = select.poll()
    waiting = {connection.register(poll): member for member, connection in connections.items()}
    while waiting:
        for number, _ in poll.poll():
            with naming_member(waiting[number]):
                ended = serve(waiting[number])
            if ended:
                poll.unregister(number)
                del waiting[number]
