"""Ranks acting together, without a collective: rounds over a key-value store, each with a deadline.

In a *round* every rank states something, the leader (rank 0) decides, and all learn the verdict. A
save has two rounds (who writes what; commit), a load has two (does it fit; did all arrive). Nothing
blocks the trainer's process group: keys in the store of torch.distributed are all that is used,
polled, so that no connection is held waiting.

In the first round of a call the ranks find each other (``rendezvous``). Its answer names the
*session*, under which the keys of later rounds lie. A rank that waits looks at the boards of those
it waits for (``member``, ``watch``): where nothing has moved for longer than the deadline, that is
an error that names the rank. A rank that fails says so at once, and every other rank raises at its
next look.

Scope: no membership, no election. A job whose leader died is restarted by its launcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ...errors import CoordinationError, RankFailedError
from .calls import Board, Call
from .keys import Keys, StoreLike
from .member import LEADER, Member
from .rendezvous import (
    PAUSE_MAX_S,
    PAUSE_S,
    Answer,
    Arrival,
    Assembly,
    opened,
    packed,
    raised_failure,
)
from .watch import Attendance, Watch

__all__ = ["Decide", "Solo", "StoreLike", "StoreTeam", "Team"]

Decide = Callable[[Sequence[bytes]], Awaitable[bytes]]
LINGER_S = 5.0
"""How long the leader stays at most until all have read its last verdict: its process may serve the
store."""
SEEK_S = 1.0


class Team(ABC):
    """The ranks of one save or load. Used by one task at a time."""

    rank: int
    world: int

    @abstractmethod
    async def round(
        self, name: str, payload: bytes, decide: Decide, tellers: Sequence[int] | None = None
    ) -> bytes:
        """State ``payload``; return what the leader's ``decide`` made of all ranks' payloads (in
        order of rank).

        ``tellers``: the ranks that state something, the leader first; None: all of them. The others
        learn the verdict. An error raised by ``decide`` is raised on every rank. Raises
        DeadlineError and RankFailedError.
        """

    @abstractmethod
    async def tell(self, name: str, ranks: Sequence[int], payload: bytes) -> list[bytes]:
        """State ``payload`` to the first of ``ranks``. That one gets what each has stated, in
        order, the others nothing. All of them call this alike. Raises DeadlineError and
        RankFailedError."""

    @abstractmethod
    async def among(self, name: str, ranks: Sequence[int], payload: bytes) -> list[bytes]:
        """State ``payload``; return what each of ``ranks``, this one among them, has stated. All of
        them call this alike. Nobody decides, and no other rank hears of it. Raises DeadlineError
        and RankFailedError."""

    @abstractmethod
    async def watch(self, ranks: Sequence[int], what: str) -> NoReturn:
        """Look after ``ranks`` that ``what`` is awaited from. Raises RankFailedError when any rank
        of the team tells that it failed, DeadlineError when one of these falls silent. Ends in no
        other way."""

    @abstractmethod
    async def fail(self, error: BaseException) -> None:
        """Tell the others that this rank gives up. Does not raise: the error at hand is the one to
        be seen."""

    @abstractmethod
    async def failure(self) -> CoordinationError | None:
        """What another rank has told of its failure, if any has."""

    @property
    @abstractmethod
    def store_is_lost(self) -> bool:
        """Whether the job's store could not be reached."""

    @abstractmethod
    def worked(self) -> None:
        """Something has moved on this rank: bytes, or an operation of the storage. Thread-safe."""

    @abstractmethod
    async def moves_with(self, other: asyncio.Future[None]) -> None:
        """Wait until another call of this process has ended, well or not. What moves there is this
        rank's progress."""

    @abstractmethod
    def session(self) -> contextlib.AbstractAsyncContextManager[None]:
        """The time in which rounds are held."""


class Solo(Team):
    """A team of one."""

    rank = 0
    world = 1

    async def round(
        self, name: str, payload: bytes, decide: Decide, tellers: Sequence[int] | None = None
    ) -> bytes:
        return await decide([payload])

    async def tell(self, name: str, ranks: Sequence[int], payload: bytes) -> list[bytes]:
        return [payload]

    async def among(self, name: str, ranks: Sequence[int], payload: bytes) -> list[bytes]:
        return [payload]

    async def watch(self, ranks: Sequence[int], what: str) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError  # nobody sets it

    async def fail(self, error: BaseException) -> None:
        return None

    async def failure(self) -> CoordinationError | None:
        return None

    store_is_lost = False

    def worked(self) -> None:
        return None

    async def moves_with(self, other: asyncio.Future[None]) -> None:
        await asyncio.wait([other])

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        yield


class StoreTeam(Team):
    """Rounds over a store. ``prefix`` is the same on all ranks; below it, ranks find each other by
    their ``call``.

    ``silence_s`` is how long nothing may move at another rank while it is waited for.
    """

    def __init__(
        self,
        store: StoreLike,
        rank: int,
        world: int,
        prefix: str,
        silence_s: float,
        call: Call | None = None,
        member: Member | None = None,
    ) -> None:
        """``member``: this process in its job; None makes one."""
        self.rank = rank
        self.world = world
        self._member = Member(Keys(store, prefix), rank, world) if member is None else member
        self._call = Call("call") if call is None else call
        self._silence_s = silence_s
        self._beat_s = max(0.02, min(5.0, silence_s / 5))
        self._attendance: Attendance | None = None
        self._assembly: Assembly | None = None
        self._answer: Answer | None = None
        self._over = False  # all have heard of the failure
        self._stated = (
            False  # to the leader, perhaps: where this rank fails, that has to be taken back
        )
        self._written: list[str] = []  # of this rank, for the leader alone
        self._kept: list[str] = []
        self._rounds: list[str] = []

    @property
    def store_is_lost(self) -> bool:
        """See :class:`Team`."""
        return self._member.lost

    def worked(self) -> None:
        """See :class:`Team`."""
        if self._attendance is not None:
            self._attendance.worked()

    async def moves_with(self, other: asyncio.Future[None]) -> None:
        """See :class:`Team`."""
        attendance = self._attendance
        assert attendance is not None
        moved = -1
        while not other.done():
            await asyncio.wait([other], timeout=self._beat_s)
            if moved != (moved := self._member.others_moved(attendance)):
                attendance.worked()

    async def round(
        self, name: str, payload: bytes, decide: Decide, tellers: Sequence[int] | None = None
    ) -> bytes:
        """See :class:`Team`."""
        if self._answer is None:
            if tellers is None:
                return await self._first(name, payload, decide)
            await self._first("meet", b"", _agreed)
        self._rounds.append(name)
        tellers = range(self.world) if tellers is None else tellers
        if self.rank != LEADER:
            if self.rank in tellers:
                await self._state(name, payload)
            (verdict,) = await self._gather(
                f"{name}/verdict", [LEADER], f"the verdict of round {name!r}"
            )
            return opened(verdict)
        payloads = [payload, *await self._gather(name, tellers[1:], f"round {name!r}")]
        try:
            verdict = b"+" + await decide(payloads)
        except Exception as error:
            await self._ask(
                self._keys.put, f"{name}/verdict/{LEADER}", b"-" + packed(error, self.rank)
            )
            raise
        await self._ask(self._keys.put, f"{name}/verdict/{LEADER}", verdict)
        return verdict[1:]

    async def tell(self, name: str, ranks: Sequence[int], payload: bytes) -> list[bytes]:
        """See :class:`Team`."""
        await self._meet()
        if self.rank != ranks[0]:
            await self._state(name, payload)
            return []
        return [payload, *await self._gather(name, ranks[1:], name)]

    async def among(self, name: str, ranks: Sequence[int], payload: bytes) -> list[bytes]:
        """See :class:`Team`."""
        await self._meet()
        await self._state(name, payload)
        others = [rank for rank in ranks if rank != self.rank]
        told = dict(zip(others, await self._gather(name, others, name), strict=True))
        return [told.get(rank, payload) for rank in ranks]

    async def watch(self, ranks: Sequence[int], what: str) -> NoReturn:
        """See :class:`Team`."""
        await self._meet()
        watch = self._watch()
        while True:
            seen = await self._ask(self._look, None, ranks)
            self._look_after(seen, watch, what)
            await asyncio.sleep(self._beat_s)

    async def fail(self, error: BaseException) -> None:
        """See :class:`Team`. Where this rank has no session yet, whoever comes to this call learns
        it."""
        if self._over or (isinstance(error, RankFailedError) and self.rank != LEADER):
            return
        with contextlib.suppress(CoordinationError):
            if self._answer is not None:
                await self._ask(self._fail_in_session, packed(error, self.rank))
            elif self.rank == LEADER:
                await self._refuse(error)
            else:
                number = None if self._attendance is None else self._attendance.number
                self._member.failed(self._call, number, packed(error, self.rank))
                await self._member.show()
                await self._make_it_count()
                if self._stated:
                    gone = f"gone/{self._call.name}"
                    await self._ask(self._member.keys.set, gone, f"{self.rank} {number}")

    async def _make_it_count(self) -> None:
        """The leader heeds only ranks that have found it. That takes a moment; where it takes
        longer, this goes on later."""
        if not self._member.lead:
            await self._member.seek_leader(min(SEEK_S, self._silence_s / 4))
        if not self._member.lead:
            self._member.spawn(self._member.seek_leader(self._silence_s))

    async def failure(self) -> CoordinationError | None:
        """See :class:`Team`."""
        told = None if self._answer is None else await self._ask(self._keys.value, "failed")
        return None if told is None else raised_failure(told)

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        """See :class:`Team`."""
        async with self._member.attending(self._call, self._beat_s) as self._attendance:
            try:
                yield
            except BaseException:
                # The leader may be about to take what this rank has said: the last to leave removes
                # it.
                self._kept, self._written = self._written, []
                raise
            finally:
                with contextlib.suppress(CoordinationError):
                    await self._ask(self._leave)
        if self.rank == LEADER and self._answer is not None and not self._kept:
            self._member.spawn(self._linger(self._member.anchor()))

    # The first round: ranks find each other.

    async def _meet(self) -> None:
        if self._answer is None:
            await self._first("meet", b"", _agreed)

    async def _first(self, name: str, payload: bytes, decide: Decide) -> bytes:
        assert self._attendance is not None
        what = f"round {name!r}"
        if self.rank != LEADER:
            arrival = Arrival(self._member, self._call, self._attendance, self._silence_s)
            await arrival.found_leader(what)
            self._stated = True
            answer = await arrival.answer(payload, what)
            self._over = answer.failed
            verdict = opened(answer.verdict)
            self._enter(answer)
            return verdict
        self._assembly = Assembly(self._member, self._call, self._attendance, self._silence_s)
        payloads = await self._assembly.gather(payload, what)
        try:
            verdict = await decide(payloads)
        except Exception as error:
            self._over = True
            await self._ask(self._assembly.post, b"-" + packed(error, self.rank))
            raise
        await self._ask(self._assembly.post, b"+" + verdict)
        self._enter(self._assembly.answer(b""))
        return verdict

    def _enter(self, answer: Answer) -> None:
        """From here on all ranks have a session."""
        assert self._attendance is not None
        self._attendance.met = True
        self._answer = answer

    async def _refuse(self, error: BaseException) -> None:
        """The leader has failed before all have come: those who are there, and those who come late,
        learn it at once."""
        self._over = True
        assembly = self._assembly or Assembly(
            self._member, self._call, self._attendance, self._silence_s
        )
        told = error
        if not isinstance(error, CoordinationError) and error is not assembly.refused:
            told = RankFailedError(
                f"rank {self.rank} failed: {json.loads(packed(error, 0))['message']}",
                rank=self.rank,
            )
        await self._ask(assembly.post, b"-" + packed(told, self.rank))
        self._member.spawn(self._member.greet(self._silence_s))

    # Later rounds.

    @property
    def _keys(self) -> Keys:
        """Of the session that all have entered."""
        assert self._answer is not None
        return self._member.keys.below(str(self._answer.number))

    async def _ask(self, function: Callable[..., Any], *args: Any) -> Any:
        return await self._member.ask(function, *args)

    async def _state(self, name: str, payload: bytes) -> None:
        self._written += await self._ask(self._keys.put, f"{name}/{self.rank}", payload)

    def _watch(self) -> Watch:
        return Watch(self.rank, self._call.name, str(self._call), self._silence_s)

    async def _gather(self, name: str, ranks: Sequence[int], what: str) -> list[bytes]:
        """The values that ``ranks`` put under ``name``, in that order."""
        found: dict[int, bytes] = {}
        watch = self._watch()
        pause_s = PAUSE_S
        while missing := [rank for rank in ranks if rank not in found]:
            seen = await self._ask(self._look, name, missing)
            found |= seen.told
            if len(found) < len(ranks):
                self._look_after(seen, watch, what)
                pause_s = PAUSE_S if seen.told else min(pause_s * 1.5, PAUSE_MAX_S)
                await asyncio.sleep(pause_s)
        if self._attendance is not None:
            self._attendance.waited()
        return [found[rank] for rank in ranks]

    def _look_after(self, seen: _Seen, watch: Watch, what: str) -> None:
        """Raise what a rank has told of its failure, or DeadlineError where nothing moves at one."""
        assert self._answer is not None
        if seen.failure is not None:
            raise raised_failure(seen.failure)
        for rank, board in seen.boards.items():
            # It left before it could know of the session.
            left = board and board.failure(self._call.name, self._answer.roster[rank] - 1)
            if left and left.number == self._answer.roster[rank]:
                raise raised_failure(left.error.encode())
        if not seen.boards:  # nobody is waited for
            return
        now_s = asyncio.get_running_loop().time()
        last, idle_s = watch.look(seen.boards, what, now_s)
        if self._attendance is not None:
            self._attendance.waits(last, what, idle_s, now_s)

    async def _linger(self, anchor: object) -> None:
        """Stay until all have left. ``anchor`` is held meanwhile."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + LINGER_S
        with contextlib.suppress(CoordinationError):
            while loop.time() < until_s:
                left = await self._ask(self._keys.value, "left")
                if left is None or int(left) >= self.world:
                    return
                await asyncio.sleep(0.01)

    # What follows asks the store, and waits for its answers: it is run in a thread, as much of it
    # at a time as can be.

    def _look(self, name: str | None, ranks: Sequence[int]) -> _Seen:
        """What some ranks have told under ``name``, and how the others do."""
        # Asked first: who fails has said before what it had to say, and that goes before its
        # failure.
        failure = self._keys.value("failed")
        told = {} if name is None else {rank: self._keys.told(f"{name}/{rank}") for rank in ranks}
        there = {rank: value for rank, value in told.items() if value is not None}
        return _Seen(
            failure, there, self._member.boards(rank for rank in ranks if rank not in there)
        )

    def _fail_in_session(self, failure: bytes) -> None:
        self._keys.swap("failed", None, failure)

    def _leave(self) -> None:
        """Remove this rank's keys; the last to leave removes what others may have looked at until
        then. Where a rank never leaves, a few keys stay in the job's store, and do no harm: no
        other session has their prefix."""
        if self.rank != LEADER and self._member.lead:
            join = f"join/{self._call.name}/{self.rank}"
            self._member.keys.delete(self._member.keys.taken_by(join))
        if self._answer is None:
            return
        keys = self._keys
        keys.delete(self._written)
        if self._kept:
            keys.set(f"kept/{self.rank}", json.dumps(self._kept))
        if keys.add("left", 1) == self.world:
            keys.delete(self._remains())
            self._delete_answer()

    def _remains(self) -> list[str]:
        """The keys that are there when all have left."""
        keys, found = self._keys, ["left"]
        for name in self._rounds:
            found += keys.taken_by(f"{name}/verdict/{LEADER}")
        if keys.value("failed") is not None:
            found.append("failed")
            for kept in [f"kept/{rank}" for rank in range(1, self.world)]:
                if (told := keys.value(kept)) is not None:
                    found += [kept, *json.loads(told)]
        return found

    def _delete_answer(self) -> None:
        """The answer to this call, unless there is a later one."""
        assert self._answer is not None
        keys, key = self._member.keys, f"answer/{self._call.name}"
        told = keys.told(key)
        if told is not None and Answer.decode(told, self.world).number == self._answer.number:
            keys.delete(keys.taken_by(key))


@dataclass(frozen=True, slots=True)
class _Seen:
    """At one look at the store: the failure of a rank, if there is one; what ranks have told; the
    boards of the others."""

    failure: bytes | None
    told: dict[int, bytes]
    boards: dict[int, Board | None]


async def _agreed(statements: Sequence[bytes]) -> bytes:
    """All have come; there is nothing to be decided."""
    return b""
