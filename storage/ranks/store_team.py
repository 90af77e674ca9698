"""A team that exchanges messages through the key-value store of torch.distributed.

It never blocks the trainer's process group: it only uses keys of the store, and polls them, so that
no connection is held by a blocking read.

In the first round of a call the ranks find each other (``rendezvous``). The answer contains the key
prefix of the later rounds. While a rank waits, it reads the status records of the ranks it waits
for (``member``, ``watch``); if one makes no progress for longer than the deadline, it raises an
error that names that rank. A rank that fails reports it at once, and every other rank raises the
next time it polls.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from ...core.spans import Span, arrived, span, waited_for
from ...errors import CoordinationError, RankFailedError
from ..runtime.engine import offload
from .calls import Call, RankStatus
from .failures import Failure
from .hosts import numbers_in
from .keys import Keys, StoreLike
from .member import Member
from .messages import LEADER, Codec, Nothing, Round, codec
from .rendezvous import PAUSE_MAX_S, PAUSE_S, Answer, FollowerRendezvous, LeaderRendezvous, Verdict
from .team import Decide, Team
from .watch import Participation, Watch

T = TypeVar("T")
S = TypeVar("S")
V = TypeVar("V")
DecideEncoded = Callable[[Sequence[bytes]], Awaitable[bytes]]

_MEET = Round.of("meet", Nothing, Nothing)
"""Precedes a session whose first exchange does not involve all ranks."""
INLINE_NBYTES = 256 << 10
"""Larger messages are decoded in a thread."""
LINGER_S = 5.0
"""The longest time that the leader stays for other ranks to read its last verdict, in case its
process serves the store.
"""
SEEK_S = 1.0


class StoreTeam(Team):
    """Rounds over a store. ``prefix`` is the same on all ranks; below it, ranks find each other by
    their ``call``. ``silence_s``: how long another rank may go without progress while this one
    waits for it."""

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
        """Create the team, without I/O. ``member``: this process in its job; None creates one."""
        self.rank = rank
        self.world = world
        self._member = member or Member(Keys(store, prefix), rank, world)
        self.host = self._member.host
        self.job_host = self._member.job_host
        self._call_store = self._member.call_store
        self._call = call or Call("call")
        self._silence_s = silence_s
        self._heartbeat_s = max(0.02, min(5.0, silence_s / 5))
        self._participation: Participation | None = None
        self._rendezvous: LeaderRendezvous | None = None
        self._answer: Answer | None = None
        self._roster: list[int] = []
        self._failure_announced = False
        self._sent = False  # to the leader, perhaps; a failure must then retract it
        self._written: list[str] = []  # keys written by this rank for the leader
        self._kept: list[str] = []
        self.rounds: list[str] = []

    @property
    def store_is_lost(self) -> bool:
        return self._member.store_lost

    def report_progress(self) -> None:
        if self._participation is not None:
            self._participation.report_progress()

    async def progress_with(self, other: asyncio.Future[None]) -> None:
        participation = self._participation
        assert participation is not None
        moved = -1
        while not other.done():
            await asyncio.wait([other], timeout=self._heartbeat_s)
            if moved != (moved := self._member.progress_of_others(participation)):
                participation.report_progress()

    async def round(
        self,
        round: Round[S, V],
        statement: S,
        decide: Decide[S, V],
        speakers: Sequence[int] | None = None,
    ) -> V:
        if self._answer is None and speakers is not None:
            await self._meet()
        senders = range(self.world) if speakers is None else speakers
        what = f"round {round.name!r}"

        async def decide_encoded(statements: Sequence[bytes]) -> bytes:
            decoded = await _decoded(round.statement, statements, senders, what)
            return await _encoded(round.verdict, await decide(decoded))

        data = b""
        if self.rank in senders:
            data = await _encoded(round.statement, statement)
        with _span(round.name):
            if self._answer is None:
                decision = await self._first(round.name, data, decide_encoded)
            else:
                decision = await self._later(round.name, data, decide_encoded, senders)
        (verdict,) = await _decoded(round.verdict, [decision], [LEADER], what)
        return verdict

    async def gather(self, name: str, kind: Codec[T], ranks: Sequence[int], message: T) -> list[T]:
        await self._meet()
        with _span(name):
            if self.rank != ranks[0]:
                await self._send(name, await _encoded(kind, message))
                return []
            others = ranks[1:]
            received = await self._gather(name, others, name)
        return [message, *await _decoded(kind, received, others, f"{name!r}")]

    async def all_gather(
        self, name: str, kind: Codec[T], ranks: Sequence[int], message: T
    ) -> list[T]:
        await self._meet()
        others = [rank for rank in ranks if rank != self.rank]
        with _span(name):
            await self._send(name, await _encoded(kind, message))
            received = await self._gather(name, others, name)
        decoded = await _decoded(kind, received, others, f"{name!r}")
        by_rank = dict(zip(others, decoded, strict=True))
        return [by_rank.get(rank, message) for rank in ranks]

    async def watch(self, ranks: Sequence[int], what: str) -> NoReturn:
        await self._meet()
        watch = self._watch()
        while True:
            observed = await self._call_store(self._look, None, ranks)
            self._check(observed, watch, what)
            await asyncio.sleep(self._heartbeat_s)

    async def fail(self, error: BaseException) -> None:
        """Report a failure of this rank to the others, also to those that arrive later."""
        if self._failure_announced or (isinstance(error, RankFailedError) and self.rank != LEADER):
            return
        self._failure_announced = True
        with contextlib.suppress(CoordinationError):
            failure = Failure.of(error, self.rank)
            if self._answer is not None:
                encoded = codec(Failure).encode(failure)
                await self._call_store(self._keys.swap, "failed", None, encoded)
            elif self.rank == LEADER:
                await self._refuse(error)
            else:
                number = self._participation.number if self._participation else None
                self._member.failed(self._call, number, failure)
                await self._member.publish_status()
                await self._make_it_count()
                if self._sent:
                    gone = f"gone/{self._call.name}"
                    await self._call_store(self._member.keys.set, gone, f"{self.rank} {number}")

    async def _make_it_count(self) -> None:
        """Look for the leader, which ignores ranks that have not found it."""
        if not self._member.leader:
            await self._member.try_to_find_leader(min(SEEK_S, self._silence_s / 4))
        if not self._member.leader:
            self._member.spawn(self._member.try_to_find_leader(self._silence_s))

    async def failure(self) -> CoordinationError | None:
        if self._answer is None:
            return None
        failure = await self._call_store(self._failed_in_session)
        return None if failure is None else failure.as_error()

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        async with self._member.participating(self._call, self._heartbeat_s) as self._participation:
            try:
                yield
            except BaseException as error:
                await self.fail(error)
                # The leader may be about to read this rank's messages: the last rank to leave
                # deletes them.
                self._kept = self._written
                self._written = []
                raise
            finally:
                with contextlib.suppress(CoordinationError):
                    await self._call_store(self._leave)
        if self.rank == LEADER and self._answer is not None and not self._kept:
            self._member.spawn(self._linger(self._member.anchor()))

    # The first round: ranks find each other.

    async def _meet(self) -> None:
        if self._answer is None:
            await self.round(_MEET, Nothing(), _agreed)

    async def _first(self, name: str, payload: bytes, decide: DecideEncoded) -> bytes:
        assert self._participation is not None
        what = f"round {name!r}"
        if self.rank != LEADER:
            rendezvous = FollowerRendezvous(
                self._member, self._call, self._participation, self._silence_s
            )
            await self._member.wait_for_leader(self._silence_s, f"{what} of the {self._call}")
            self._sent = True
            answer = await rendezvous.answer(payload, what)
            self._failure_announced = answer.verdict.failure is not None
            decision = answer.verdict.opened()
            self._enter(answer)
            return decision
        self._rendezvous = LeaderRendezvous(
            self._member, self._call, self._participation, self._silence_s
        )
        payloads = await self._rendezvous.gather(payload, what)
        try:
            decision = await decide(payloads)
        except Exception as error:
            self._failure_announced = True
            failure = Failure.of(error, self.rank)
            await self._call_store(self._rendezvous.publish, Verdict(failure=failure))
            raise
        await self._call_store(self._rendezvous.publish, Verdict(decision))
        self._enter(self._rendezvous.answer(Verdict()))
        return decision

    def _enter(self, answer: Answer) -> None:
        assert self._participation is not None
        self._participation.taken = True
        self._answer = answer
        self._roster = numbers_in(answer.roster).tolist()

    async def _refuse(self, error: BaseException) -> None:
        """On the leader, fail the call before all have arrived, also for those who come late."""
        rendezvous = self._rendezvous or LeaderRendezvous(
            self._member, self._call, self._participation, self._silence_s
        )
        failure = Failure.of(error, self.rank)
        if not isinstance(error, CoordinationError) and error is not rendezvous.refused:
            failure = Failure.of(failure.as_error(), self.rank)
        await self._call_store(rendezvous.publish, Verdict(failure=failure))
        self._member.spawn(self._member.acknowledge_ranks(self._silence_s))

    # Later rounds.

    async def _later(
        self, name: str, payload: bytes, decide: DecideEncoded, senders: Sequence[int]
    ) -> bytes:
        self.rounds.append(name)
        if self.rank != LEADER:
            if self.rank in senders:
                await self._send(name, payload)
            what = f"the verdict of round {name!r}"
            (data,) = await self._gather(f"{name}/verdict", [LEADER], what)
            return codec(Verdict).decode(data, what).opened()
        payloads = [payload, *await self._gather(name, senders[1:], f"round {name!r}")]
        try:
            verdict = Verdict(await decide(payloads))
        except Exception as error:
            await self._publish(name, Verdict(failure=Failure.of(error, self.rank)))
            raise
        await self._publish(name, verdict)
        return verdict.decision

    async def _publish(self, name: str, verdict: Verdict) -> None:
        await self._call_store(
            self._keys.put, f"{name}/verdict/{LEADER}", codec(Verdict).encode(verdict)
        )

    @property
    def _keys(self) -> Keys:
        assert self._answer is not None
        return self._member.keys.below(str(self._answer.number))

    async def _send(self, name: str, payload: bytes) -> None:
        self._written += await self._call_store(self._keys.put, f"{name}/{self.rank}", payload)

    def _watch(self) -> Watch:
        return Watch(self.rank, self._call.name, str(self._call), self._silence_s)

    async def _gather(self, name: str, ranks: Sequence[int], what: str) -> list[bytes]:
        found: dict[int, bytes] = {}
        watch = self._watch()
        pause_s = PAUSE_S
        has_waited = False
        while missing := [rank for rank in ranks if rank not in found]:
            observed = await self._call_store(self._look, name, missing)
            found |= observed.values
            arrived(observed.values)
            if len(found) < len(ranks):
                self._check(observed, watch, what)
                pause_s = PAUSE_S if observed.values else min(pause_s * 1.5, PAUSE_MAX_S)
                await asyncio.sleep(pause_s)
                has_waited = True
        if has_waited:
            waited_for(next(reversed(found)))
        if self._participation is not None:
            self._participation.wait_ended()
        return [found[rank] for rank in ranks]

    def _check(self, observed: _Observed, watch: Watch, what: str) -> None:
        if observed.failure is not None:
            raise observed.failure.as_error()
        for rank, status in observed.statuses.items():
            # It failed before it could see that the leader had taken its call.
            left = status and status.failure(self._call.name, self._roster[rank] - 1)
            if left and left.number == self._roster[rank]:
                raise left.failure.as_error()
        if not observed.statuses:  # no rank to wait for
            return
        now_s = asyncio.get_running_loop().time()
        last, idle_s = watch.look(observed.statuses, what, now_s)
        if self._participation is not None:
            self._participation.waits_for_rank(last, what, idle_s, now_s)

    async def _linger(self, anchor: object) -> None:
        """Stay until all ranks have left, and keep ``anchor`` alive meanwhile."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + LINGER_S
        with contextlib.suppress(CoordinationError):
            while loop.time() < until_s:
                left = await self._call_store(self._keys.value, "left")
                if left is None or int(left) >= self.world:
                    return
                await asyncio.sleep(0.01)

    # The methods below block on the store. Each runs in a thread, and does as much as it can per
    # call.

    def _look(self, name: str | None, ranks: Sequence[int]) -> _Observed:
        # Read the failure first: a rank sends its messages before it reports a failure.
        failure = self._failed_in_session()
        there: dict[int, bytes] = {}
        for rank in ranks if name is not None else ():
            value = self._keys.get(f"{name}/{rank}")
            if value is not None:
                there[rank] = value
        return _Observed(
            failure, there, self._member.statuses(rank for rank in ranks if rank not in there)
        )

    def _failed_in_session(self) -> Failure | None:
        data = self._keys.value("failed")
        if data is None:
            return None
        return codec(Failure).decode(data, "the failure of a rank")

    def _leave(self) -> None:
        """Delete this rank's keys; the last rank to leave deletes the shared ones. If a rank never
        leaves, a few keys remain in the job's store. They are harmless: no other session uses their
        prefix."""
        if self.rank != LEADER and self._member.leader:
            join = f"join/{self._call.name}/{self.rank}"
            self._member.keys.delete(self._member.keys.keys_of(join))
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
        keys = self._keys
        found = ["left"]
        for name in self.rounds:
            found += keys.keys_of(f"{name}/verdict/{LEADER}")
        if keys.value("failed") is not None:
            found.append("failed")
            for kept in [f"kept/{rank}" for rank in range(1, self.world)]:
                names = keys.value(kept)
                if names is not None:
                    found += [kept, *json.loads(names)]
        return found

    def _delete_answer(self) -> None:
        """Delete the answer to this call, unless a later call has replaced it."""
        assert self._answer is not None
        keys = self._member.keys
        key = f"answer/{self._call.name}"
        data = keys.get(key)
        if data is not None and Answer.decode(data).number == self._answer.number:
            keys.delete(keys.keys_of(key))


@dataclass(frozen=True, slots=True)
class _Observed:
    """The store at one moment: a reported failure, messages of some ranks, statuses of others."""

    failure: Failure | None
    values: dict[int, bytes]
    statuses: dict[int, RankStatus | None]


def _span(name: str) -> Span:
    """Return the span of a round. A round held several times has its number after its name."""
    return span(f"round {name.partition('/')[0]}")


async def _agreed(statements: Sequence[Nothing]) -> Nothing:
    """All ranks have arrived, and there is nothing to decide."""
    return Nothing()


async def _encoded(kind: Codec[T], message: T) -> bytes:
    if kind.slow:
        return await offload(kind.encode, message)
    return kind.encode(message)


async def _decoded(
    kind: Codec[T], received: Sequence[bytes], ranks: Sequence[int], where: str
) -> list[T]:
    """Decode the messages of ``ranks``, in a thread if they are large."""

    def decode() -> list[T]:
        return [
            kind.decode(data, f"the message of rank {rank} in {where}")
            for rank, data in zip(ranks, received, strict=True)
        ]

    if kind.slow or sum(map(len, received)) > INLINE_NBYTES:
        return await offload(decode)
    return decode()
