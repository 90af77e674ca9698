"""Ranks acting together, without a collective: rounds, each of whose waits has a deadline.

In a *round* every rank states something, the leader (rank 0) decides, and all get its verdict. A
save has a few rounds, and so has a load: see ``operations.rounds``.

Scope: no membership, no election. A job whose leader died is restarted by its launcher.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import NoReturn, TypeVar

from ...errors import CoordinationError
from .messages import Codec, Round

__all__ = ["Decide", "Solo", "Team"]

T = TypeVar("T")
S = TypeVar("S")
V = TypeVar("V")
Decide = Callable[[Sequence[S]], Awaitable[V]]
"""Makes the leader's decision of the statements of all ranks, in order of rank."""


class Team(ABC):
    """The ranks of one save or load. Used by one task at a time."""

    rank: int
    world: int
    host: str | None
    """The host of this rank, see :func:`.hosts.host_key`."""
    job_host: str
    """The host that serves the job's store over TCP; "" where there is none."""

    @abstractmethod
    async def round(
        self,
        round: Round[S, V],
        statement: S,
        decide: Decide[S, V],
        speakers: Sequence[int] | None = None,
    ) -> V:
        """State ``statement``; return what the leader's ``decide`` made of the statements of all
        ranks.

        ``speakers``: the ranks that state something, the leader first; None: all ranks. The other
        ranks only get the verdict. An error raised by ``decide`` is raised on every rank. Raises
        DeadlineError and RankFailedError.
        """

    @abstractmethod
    async def gather(self, name: str, kind: Codec[T], ranks: Sequence[int], message: T) -> list[T]:
        """Send ``message`` to the first of ``ranks``. That rank gets the messages of all of them,
        in order; the others get nothing. All of ``ranks`` call this. Raises DeadlineError and
        RankFailedError."""

    @abstractmethod
    async def all_gather(
        self, name: str, kind: Codec[T], ranks: Sequence[int], message: T
    ) -> list[T]:
        """Send ``message`` to ``ranks``, which include this one; return the messages of all of
        them, in order. All of ``ranks`` call this, and no other rank takes part. Raises
        DeadlineError and RankFailedError."""

    @abstractmethod
    async def watch(self, ranks: Sequence[int], what: str) -> NoReturn:
        """Look after ``ranks`` that ``what`` is awaited from. Raises RankFailedError when any rank
        of the team reports a failure, DeadlineError when one of these falls silent. Ends in no
        other way."""

    @abstractmethod
    async def fail(self, error: BaseException) -> None:
        """Tell the others that this rank gives up. Does not raise: the error at hand is the one to
        be seen."""

    @abstractmethod
    async def failure(self) -> CoordinationError | None:
        """The failure that another rank has reported, if any has."""

    @property
    @abstractmethod
    def store_is_lost(self) -> bool:
        """Whether the job's store could not be reached."""

    @abstractmethod
    def report_progress(self) -> None:
        """Something has moved on this rank: bytes, or an operation of the storage. Thread-safe."""

    @abstractmethod
    async def progress_with(self, other: asyncio.Future[None]) -> None:
        """Wait until another call of this process has ended, well or not. What moves there is this
        rank's progress."""

    @abstractmethod
    def session(self) -> contextlib.AbstractAsyncContextManager[None]:
        """The time in which rounds are held."""


class Solo(Team):
    """A team of one rank, which hands its messages to itself as they are."""

    rank = 0
    world = 1
    host = None
    job_host = ""

    async def round(
        self,
        round: Round[S, V],
        statement: S,
        decide: Decide[S, V],
        speakers: Sequence[int] | None = None,
    ) -> V:
        return await decide([statement])

    async def gather(self, name: str, kind: Codec[T], ranks: Sequence[int], message: T) -> list[T]:
        return [message]

    async def all_gather(
        self, name: str, kind: Codec[T], ranks: Sequence[int], message: T
    ) -> list[T]:
        return [message]

    async def watch(self, ranks: Sequence[int], what: str) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError  # the event is never set

    async def fail(self, error: BaseException) -> None:
        return None

    async def failure(self) -> CoordinationError | None:
        return None

    store_is_lost = False

    def report_progress(self) -> None:
        return None

    async def progress_with(self, other: asyncio.Future[None]) -> None:
        await asyncio.wait([other])

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        yield
