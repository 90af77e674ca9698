"""A team: ranks that act together without collectives, in rounds whose waits all have deadlines.

In a *round* every rank states something, the leader (rank 0) decides, and all receive its verdict.
A save or a load has a few rounds: see ``operations.rounds``.

Scope: no membership, no election. If the leader dies, the launcher restarts the job.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn, TypeVar

from ...errors import CoordinationError
from .messages import Codec, Round

T = TypeVar("T")
S = TypeVar("S")
V = TypeVar("V")
Decide = Callable[[Sequence[S]], Awaitable[V]]
"""Computes the leader's decision from the statements of all ranks, in rank order."""


class Team:
    """The ranks of one save or load. Used by one task at a time. This class is the team of a single
    rank; :class:`~.store_team.StoreTeam` implements the same methods for several."""

    rank: int = 0
    world: int = 1
    host: str | None = None
    """The host of this rank, see :func:`.hosts.host_key`."""
    job_host: str = ""
    """The host that serves the job's store over TCP; "" for other stores."""

    async def round(
        self,
        round: Round[S, V],
        statement: S,
        decide: Decide[S, V],
        speakers: Sequence[int] | None = None,
    ) -> V:
        """Send ``statement``; return the decision that the leader's ``decide`` made from all
        statements.

        ``speakers``: the ranks that send a statement, the leader first; None: all ranks. The other
        ranks only receive the verdict. An error raised by ``decide`` is raised on every rank.
        Raises DeadlineError and RankFailedError.
        """
        return await decide([statement])

    async def gather(self, name: str, kind: Codec[T], ranks: Sequence[int], message: T) -> list[T]:
        """Send ``message`` to the first of ``ranks``. That rank receives the messages of all of
        ``ranks``, in order; the others get an empty list. All of ``ranks`` call this. Raises
        DeadlineError and RankFailedError."""
        return [message]

    async def all_gather(
        self, name: str, kind: Codec[T], ranks: Sequence[int], message: T
    ) -> list[T]:
        """Send ``message`` to ``ranks``, which include this one; return all their messages, in
        order. All of ``ranks`` call this, and no other rank takes part. Raises DeadlineError and
        RankFailedError."""
        return [message]

    async def watch(self, ranks: Sequence[int], what: str) -> NoReturn:
        """Watch ``ranks`` while waiting for ``what`` from them; never returns. Raises
        RankFailedError if any rank of the team reports a failure, DeadlineError if one of ``ranks``
        falls silent."""
        await asyncio.Event().wait()
        raise AssertionError  # the event is never set

    async def fail(self, error: BaseException) -> None:
        """Report the failure of this rank to the others. Never raises."""

    async def failure(self) -> CoordinationError | None:
        """Return the failure that another rank has reported, if any."""
        return None

    @property
    def store_is_lost(self) -> bool:
        """Return whether the job's store could not be reached."""
        return False

    def report_progress(self) -> None:
        """Report progress on this rank: bytes moved, or a storage operation done. Thread-safe."""

    async def progress_with(self, other: asyncio.Future[None]) -> None:
        """Wait for another call of this process, whose progress counts as this rank's."""
        await asyncio.wait([other])

    def session(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Return a context manager that encloses the rounds, and reports an error of its body."""
        return contextlib.nullcontext()
