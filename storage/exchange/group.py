"""The group of ranks in an exchange: its messages, limits, and the handling of lost connections."""

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

T = TypeVar("T")

REPORT_PAUSE_S = 0.05

HANDOVER = struct.Struct(f"<QQ{DIGEST_NBYTES}s")
"""Sent by the rank that has read a unit: number of the unit; position in the arena; over a network,
the digest of the bytes that follow."""
RECEIPT = struct.Struct("<Q")
"""The answer: number of a unit that has arrived."""
NO_DIGEST = bytes(DIGEST_NBYTES)


class _ConnectionLost(Exception):
    """A thread has lost the connection to ``member``."""

    def __init__(self, member: int, error: OSError) -> None:
        self.member = member
        self.error = error


@dataclass(frozen=True, slots=True)
class ExchangeLimits:
    """Limits of an exchange."""

    slots: int = 2
    """Units in shared memory at a time. Shared memory is expensive: the system maps, clears and
    frees each page separately."""
    unit_nbytes: int = 8 << 20
    """Minimum length of a unit, the bytes that one rank reads and hands on at a time."""
    connect_all_timeout_s: float = 30.0
    failure_report_s: float = 5.0
    """Time that a rank has to report its failure after its connection is lost."""


@dataclass(frozen=True)
class ExchangeGroup:
    """Ranks of a team that exchange loaded bytes, the *members*. ``name``: unique in the team's
    life; ``host_ranks``: number of ranks on this host; ``job_host``: as for a Listener;
    ``least_nbytes``: minimum of shared bytes for which an exchange pays."""

    team: Team
    name: str
    ranks: Sequence[int]
    host_ranks: int
    job_host: str
    least_nbytes: int
    limits: ExchangeLimits

    @property
    def me(self) -> int:
        """Index of this rank among the members."""
        return self.ranks.index(self.team.rank)

    async def all_gather(self, what: str, kind: Codec[T], message: T) -> list[T]:
        """Exchange messages, and return those of all members."""
        return await self.team.all_gather(f"{self.name}/{what}", kind, self.ranks, message)

    @contextlib.asynccontextmanager
    async def blaming(self, member: int) -> AsyncIterator[None]:
        """If the connection to ``member`` is lost in the body, raise the failure that this rank has
        reported, or reports within a moment."""
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
                f"rank {rank} left in the middle of the load without reporting an error",
                rank=rank,
                advice="Look at that rank's log; it was probably killed.",
            ) from error

    @contextlib.asynccontextmanager
    async def blaming_named(self) -> AsyncIterator[None]:
        """Do the same as :meth:`blaming` for a member named by a thread (:func:`naming_member`)."""
        try:
            yield
        except _ConnectionLost as lost:
            async with self.blaming(lost.member):
                raise lost.error from None

    def protocol_error(self, member: int) -> CoordinationError:
        """Return the error for a member that violates the protocol."""
        rank = self.ranks[member]
        return CoordinationError(
            f"rank {rank} sent something outside the agreed exchange",
            rank=rank,
            advice="Do all ranks run the same version?",
        )


@contextlib.contextmanager
def naming_member(member: int) -> Iterator[None]:
    """In a thread, raise an error that names ``member`` if its connection is lost in the body."""
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
    """Call ``serve`` with each member that has sent a message, until it has returned True for all
    of them. Runs in a thread: an event loop iteration per message takes as long as copying the
    unit."""
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
        # Retrieve its error: it saw the shutdown, or failed after the cause of the cancellation.
        serving.exception()
        raise


def _serve(connections: Mapping[int, Connection], serve: Callable[[int], bool]) -> None:
    """Poll without a deadline: if a rank falls silent, the watching task fails, and shuts down the
    connections."""
    poll = select.poll()
    waiting = {connection.register(poll): member for member, connection in connections.items()}
    while waiting:
        for number, _ in poll.poll():
            with naming_member(waiting[number]):
                ended = serve(waiting[number])
            if ended:
                poll.unregister(number)
                del waiting[number]
