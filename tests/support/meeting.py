"""Ranks of a job as tasks of one process, over a store in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch.distributed as dist

import holdfast
from holdfast.storage.ranks.calls import Call
from holdfast.storage.ranks.keys import Keys
from holdfast.storage.ranks.member import Member
from holdfast.storage.ranks.messages import Round
from holdfast.storage.ranks.store_team import StoreTeam
from holdfast.storage.ranks.team import Team

Act = Callable[[Team], Awaitable[Any]]
PLAIN = Call("call")
SAVE = Call("save", "file:///a", 1)
LOAD = Call("load", "file:///b")
DEADLINE_S = 20.0


class _Raw:
    """A message codec that sends bytes unchanged."""

    slow = False

    def encode(self, message: bytes, /) -> bytes:
        return message

    def decode(self, data: bytes, what: str, /) -> bytes:
        return data


RAW = _Raw()


def raw(name: str) -> Round[bytes, bytes]:
    """Return a round whose statements and verdict are bytes."""
    return Round(name, RAW, RAW)


class _Line:
    """A rank's connection to a store, which a test may cut."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def cut(self) -> None:
        self._store = dist.HashStore()

    def __getattr__(self, name: str) -> Any:
        getattr(self._store, name)  # raises AttributeError where this store has no such method

        def call(*args: Any) -> Any:
            return getattr(self._store, name)(*args)

        return call


class Job:
    """The processes of a job over a store, as tasks of this one."""

    def __init__(self, store: Any, world: int, deadline_s: float = DEADLINE_S) -> None:
        self.store, self.world, self.deadline_s = store, world, deadline_s
        self.lines = [_Line(store) for _ in range(world)]
        self.members = [
            Member(Keys(line, "job"), rank, world) for rank, line in enumerate(self.lines)
        ]

    def silence(self, rank: int) -> None:
        """Make a rank look dead to the others, even if its tasks continue."""
        self.lines[rank].cut()

    def team(self, rank: int, call: Call) -> StoreTeam:
        """Return the team of a rank for one call."""
        return StoreTeam(
            self.store, rank, self.world, "", self.deadline_s, call, self.members[rank]
        )

    async def acts(self, rank: int, act: Act, call: Call = PLAIN) -> Any:
        """Let a rank do ``act`` with its team, as saves and loads do."""
        team = self.team(rank, call)
        async with team.session():
            return await act(team)

    async def calls(
        self, rank: int, call: Call, rounds: Sequence[str] = ("a", "b"), late_s: float = 0.0
    ) -> list[bytes]:
        """Make a call on one rank; return the verdicts of its rounds."""
        await asyncio.sleep(late_s)
        learnt: list[bytes] = await self.acts(rank, stating(*rounds), call)
        return learnt

    async def fails(self, rank: int, call: Call, error: Exception | None = None) -> None:
        """Make a call on one rank that fails before it begins."""
        raised = error or holdfast.StateError("cannot be saved")
        await self.team(rank, call).fail(raised)
        raise raised

    async def all(self, call: Call) -> None:
        """Make the call on all ranks, and check that it succeeds."""
        done = await together(*(self.calls(rank, call) for rank in range(self.world)))
        assert done == [[everybody("a", self.world), everybody("b", self.world)]] * self.world


def stating(*rounds: str) -> Act:
    """Return an act that runs these rounds in order, and returns their verdicts."""

    async def act(team: Team) -> list[bytes]:
        return [
            await team.round(raw(name), f"{name}{team.rank}".encode(), joined) for name in rounds
        ]

    return act


async def joined(statements: Sequence[bytes]) -> bytes:
    """Return a verdict that joins all statements."""
    return b"|".join(statements)


def everybody(name: str, world: int) -> bytes:
    """Return the verdict of :func:`joined` with the statements of all ranks."""
    return "|".join(f"{name}{rank}" for rank in range(world)).encode()


async def together(*works: Awaitable[Any]) -> list[Any]:
    """Return the results or errors of all, within a time limit."""
    return await asyncio.wait_for(asyncio.gather(*works, return_exceptions=True), 60)


def kinds(outcomes: Sequence[Any]) -> list[tuple[type, int | None]]:
    """Return the type of each outcome, and the rank that it names."""
    return [(type(outcome), getattr(outcome, "rank", None)) for outcome in outcomes]
