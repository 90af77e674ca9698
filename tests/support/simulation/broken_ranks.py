"""Engines whose ranks do not find each other as they should: wrong on purpose, each in one way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

from holdfast.storage.ranks import following, member, rendezvous, store_team
from holdfast.storage.ranks.calls import Call

from .breaking import Patch, broken

__all__: list[str] = []


@broken("ranks count their calls", 3)
def _counted_calls() -> Iterator[Patch]:
    real = store_team.StoreTeam.session

    @contextlib.asynccontextmanager
    async def session(self: Any) -> AsyncIterator[None]:
        self._member.calls = getattr(self._member, "calls", 0) + 1
        self._call = Call("call", step=self._member.calls)
        async with real(self):
            yield

    yield store_team.StoreTeam, "session", session


@broken("a rank that fails before its call begins tells nobody", 9)
def _untold() -> Iterator[Patch]:
    real = store_team.StoreTeam.fail

    async def fail(self: Any, error: BaseException) -> None:
        if self._participation is not None:
            await real(self, error)

    yield store_team.StoreTeam, "fail", fail


@broken("a rank takes whatever answer is there for its call's", 5)
def _any_answer() -> Iterator[Patch]:
    yield following.FollowerRendezvous, "_is_mine", lambda self, answer, status, now_s: True


@broken("a rank follows a leader that has not acknowledged it", 227)
def _any_leader() -> Iterator[Patch]:
    def find_leader(self: Any) -> bool:
        lead = self._keys.value("lead")
        self.leader = self.leader or (lead or b"").decode()
        return bool(self.leader)

    yield member.Member, "find_leader", find_leader


@broken("a leader can be found before its status is there", 4647)
def _found_too_early() -> Iterator[Patch]:
    def lead(self: Any, now_s: float) -> None:
        self._keys.set("lead", self.nonce)

    async def publish_status(self: Any) -> None:
        with contextlib.suppress(RuntimeError):
            await member.offload(self.publish, asyncio.get_running_loop().time())

    yield member.Member, "_claim_leadership", lead
    yield member.Member, "publish_status", publish_status


@broken("all failures of a rank belong to the last one of the leader", 41)
def _all_belong_together() -> Iterator[Patch]:
    real = rendezvous.paired

    def paired(settled: Any, leaders: Any, others: Any) -> Any:
        settled, theirs, ours = real(settled, leaders, others)
        last = max(map(abs, others), default=0)
        return (
            (rendezvous.Settled(settled.leader, last), theirs, [])
            if ours and leaders
            else (settled, theirs, ours)
        )

    yield rendezvous, "paired", paired
    yield following, "paired", paired


@broken("the leader heeds what a dead process has shown that never found it", 949)
def _heeds_strangers() -> Iterator[Patch]:
    real = rendezvous.LeaderRendezvous._check

    async def check(self: Any, statuses: Any, now_s: float) -> None:
        lead = self._member.nonce
        heeded = {
            rank: status and replace(status, leader=status.leader or lead)
            for rank, status in statuses.items()
        }
        await real(self, heeded, now_s)

    yield rendezvous.LeaderRendezvous, "_check", check


@broken("the leader does not look for ranks that are in another call", 3)
def _other_calls_unseen() -> Iterator[Patch]:
    yield rendezvous.LeaderRendezvous, "_other_call", lambda self, rank, status: None
