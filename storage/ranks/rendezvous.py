"""Rendezvous: the ranks of a call find each other in its first round.

Every rank identifies its call by a name, see ``calls.Call``. It puts its first statement under that
name and its rank, with a number that is unique among its calls. The leader takes the statements
under the name of its own call, and answers under that name with a *roster*: the number it took from
each rank. So a rank sees whether an answer is for its current call, and no rank needs to count the
calls of another.

    join/<name>/<rank>    number, statement
    answer/<name>         number of the leader's call, roster, verdict or error
    gone/<name>           a rank that has failed after its statement, and its number

A positive number in a roster means that the leader has taken this call of the rank, or has seen it
fail. ``-n`` means that the rank had not arrived; n is its last call of that name that the leader
had seen by then. ``NOT_ADDRESSED``: the answer is not for any call of this rank.

A rank that fails before the leader has taken its call says so in its status record, which the
leader reads for every missing rank. An error answer lists the leader's failures in calls of that
name. From both lists, both sides derive which failures belong together: see ``calls``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from ...core.spans import arrived, waited_for
from ...errors import CoordinationError, RankFailedError, UsageError
from .calls import Call, CallHistory, OpenCall, RankStatus, Settled, paired
from .failures import Failure
from .hosts import compressed, numbers_in
from .member import Member
from .messages import LEADER, codec
from .watch import Participation, Watch

GRACE_S = 1.0
"""The time that the leader waits for a rank that is in another call or failed: it may be late."""
LEAVE_TIMEOUT_S = 2.0
NOT_ADDRESSED = -(1 << 60)
PAUSE_S = 0.001
PAUSE_MAX_S = 0.05


@dataclass(frozen=True, slots=True)
class Verdict:
    """The leader's encoded decision in a round, or the failure that ends it for all ranks."""

    decision: bytes = b""
    failure: Failure | None = None

    def opened(self) -> bytes:
        """Return the decision, or raise the failure."""
        if self.failure is not None:
            self.failure.raise_alike()
        return self.decision


@dataclass(frozen=True, slots=True)
class Answer:
    """The leader's answer. ``roster`` and ``settled`` have a number per rank, see ``hosts``.

    ``failures``: the leader's failures in calls of this name. ``settled``: the last of them that is
    settled with each rank; empty unless the answer is an error.

    ``instead`` serves late ranks and those in a different call from the leader: names and numbers
    of other calls of the leader that failed for the same reason. A rank that has seen one of these
    failures need not see the others.
    """

    number: int
    roster: bytes
    verdict: Verdict
    failures: tuple[int, ...] = ()
    settled: bytes = b""
    instead: tuple[tuple[str, int], ...] = ()

    @classmethod
    def decode(cls, data: bytes) -> Answer:
        """Decode an answer."""
        return codec(Answer).decode(data, f"the answer of rank {LEADER}")

    def taken_from(self, rank: int) -> int:
        """Return the number in the roster for ``rank``."""
        return int(numbers_in(self.roster)[rank])

    def settled_with(self, rank: int) -> Settled:
        """Return the last settled failures between the leader and ``rank``."""
        return Settled(int(numbers_in(self.settled)[rank]), max(0, -self.taken_from(rank)))


class LeaderRendezvous:
    """The leader's part: take the statements of all ranks."""

    def __init__(
        self, member: Member, call: Call, participation: Participation | None, silence_s: float
    ) -> None:
        """Prepare for one call. ``participation`` is None if this rank failed before it began."""
        self._member = member
        self._call = call
        self._participation = participation
        self._grace_s = min(GRACE_S, silence_s / 4)
        self._watch = Watch(member.rank, call.name, str(call), silence_s)
        self._history = member.history(call.name)
        self._seen_since_s: dict[tuple[int, int], float] = {}  # by rank and number of its call
        self._unknown_since_s: dict[tuple[int, str], float] = {}  # by rank and nonce
        self._silence_s = silence_s
        self.refused: UsageError | None = None
        """The error raised on all ranks if they are in different calls."""
        self.number = participation.number if participation else member.next_number()
        self.roster = [-number for number in self._history.taken]
        self.roster[LEADER] = self.number
        self._instead: list[tuple[str, int]] = []

    async def gather(self, mine: bytes, what: str) -> list[bytes]:
        """Return the statements of all ranks, in rank order. Raises CoordinationErrors."""
        assert self._participation is not None
        loop = asyncio.get_running_loop()
        found: dict[int, bytes] = {LEADER: mine}
        pause_s = PAUSE_S
        has_waited = False
        while missing := [rank for rank in range(self._member.world) if rank not in found]:
            taken, statuses = await self._member.call_store(self._look, missing)
            found |= taken
            arrived(taken)
            if statuses:
                await self._check(statuses, loop.time())
                last, idle_s = self._watch.look(statuses, what, loop.time())
                self._participation.waits_for_rank(last, what, idle_s, loop.time())
                pause_s = PAUSE_S if taken else min(pause_s * 1.5, PAUSE_MAX_S)
                await asyncio.sleep(pause_s)
                has_waited = True
        if has_waited:
            waited_for(next(reversed(found)))
        self._participation.wait_ended()
        return [found[rank] for rank in range(self._member.world)]

    def answer(self, verdict: Verdict) -> Answer:
        """Return the answer to all ranks that have arrived."""
        return Answer(self.number, compressed(self.roster), verdict)

    def publish(self, verdict: Verdict) -> None:
        """Publish the answer. Blocks."""
        keys = self._member.keys
        name = self._call.name
        forgotten: list[str] = []
        if verdict.failure is None:
            answer = self.answer(verdict)
            self._member.all_met(name)
        else:
            answer, forgotten = self._failed(
                name, self.number, self.roster, verdict.failure, self._instead
            )
        keys.put(f"answer/{name}", codec(Answer).encode(answer))
        keys.delete([f"gone/{name}"])
        for old in forgotten:
            keys.delete(keys.keys_of(f"answer/{old}"))

    def _failed(
        self,
        name: str,
        number: int,
        roster: Sequence[int],
        failure: Failure,
        instead: Sequence[tuple[str, int]],
    ) -> tuple[Answer, list[str]]:
        """Return the answer to a failed call, and the names of calls with obsolete answers."""
        member = self._member
        history = member.history(name)
        for rank, taken in enumerate(roster):
            if taken > 0 or taken == NOT_ADDRESSED:
                history.settled[rank] = number
        forgotten = member.log_failure(name, number, failure.timed_out)
        answer = Answer(
            number,
            compressed(roster),
            Verdict(failure=failure),
            tuple(member.log(name)),
            compressed([history.settled.get(rank, 0) for rank in range(member.world)]),
            tuple(instead),
        )
        return answer, forgotten

    def _look(
        self, missing: Sequence[int]
    ) -> tuple[dict[int, bytes], dict[int, RankStatus | None]]:
        keys = self._member.keys
        name = self._call.name
        taken: dict[int, bytes] = {}
        statuses: dict[int, RankStatus | None] = {}
        gone = keys.value(f"gone/{name}")
        if gone is not None:
            self._check_gone(*map(int, gone.split()))
        for rank in missing:
            joined = keys.get(f"join/{name}/{rank}")
            number, _, statement = (joined or b"0 ").partition(b" ")
            if int(number) > self._history.taken[rank]:
                self._take(rank, int(number))
                taken[rank] = statement
            else:
                statuses[rank] = self._member.status(rank)
        return taken, statuses

    def _check_gone(self, rank: int, number: int) -> None:
        status = self._member.status(rank) if self.roster[rank] == number else None
        failed = None if status is None else status.failure(self._call.name, number - 1)
        if failed is not None and failed.number == number:
            raise failed.failure.as_error()

    def _take(self, rank: int, number: int) -> None:
        self._history.taken[rank] = self.roster[rank] = number
        self._member.joined[rank] = max(self._member.joined[rank], number)

    async def _check(self, statuses: dict[int, RankStatus | None], now_s: float) -> None:
        """Raise if a rank has failed in this call, or is in another one instead."""
        elsewhere: dict[int, OpenCall] = {}
        for rank, status in statuses.items():
            if status is None:
                continue
            if status.leader != self._member.nonce:
                self._check_stranger(rank, status, now_s)
                continue
            left = self._left_over(rank, status)
            if status.open_call(self._call.name) is not None:
                continue
            other = self._other_call(rank, status)
            self._check_failures(rank, status, left, other is not None, now_s)
            self._check_other_failure(rank, status, now_s)
            if other is not None and self._has_lasted(rank, other.number, now_s):
                elsewhere[rank] = other
        if elsewhere:
            await self._refuse(elsewhere)

    def _check_stranger(self, rank: int, status: RankStatus, now_s: float) -> None:
        """Raise the failure of a rank that has not found this leader, after a delay. Its status may
        be left over from a process that died earlier, so it does not count at first. But a process
        that fails and exits at once never finds the leader."""
        failed = status.failure(self._call.name, 0)
        if status.leader or status.open or failed is None:
            return
        since_s = self._unknown_since_s.setdefault((rank, status.nonce), now_s)
        if now_s - since_s >= self._silence_s / 4:
            raise failed.failure.as_error()

    def _left_over(self, rank: int, status: RankStatus) -> list[int]:
        """Return a rank's failures in calls of this name without a partner on the leader."""
        settled, _, left = self._paired(self._history, rank, status, self._call.name)
        self._history.settle(rank, settled)
        self.roster[rank] = -settled.other
        return left

    def _check_failures(
        self, rank: int, status: RankStatus, left: list[int], is_elsewhere: bool, now_s: float
    ) -> None:
        """Raise a rank's unpaired failure; one that timed out may yet arrive."""
        number = next((number for number in left if number > 0), 0)
        if not number and left and (is_elsewhere or self._has_lasted(rank, -left[-1], now_s)):
            number = -left[-1]
        if not number:
            return
        self._take(rank, number)
        failed = next(
            (f for f in status.failed if f.name == self._call.name and f.number == number), None
        )
        if failed is None:  # so many failed that only their numbers are remembered
            raise RankFailedError(f"rank {rank} failed in an earlier {self._call}", rank=rank)
        raise failed.failure.as_error()

    def _check_other_failure(self, rank: int, status: RankStatus, now_s: float) -> None:
        """Raise if a rank failed in another call of the same thread instead of arriving here."""
        ours = self._member.open_names
        for failed in status.failed:
            last = failed.number > self._member.joined[rank] and failed.thread == self._call.thread
            if last and failed.name not in ours and self._has_lasted(rank, failed.number, now_s):
                self._member.joined[rank] = failed.number
                self._member.history(failed.name).taken[rank] = failed.number
                self.roster[rank] = NOT_ADDRESSED  # it has raised its error already
                raise RankFailedError(
                    f"rank {rank} failed in {failed.text}, while rank {LEADER} is in "
                    f"{self._call}: {failed.failure.message}",
                    rank=rank,
                )

    def _other_call(self, rank: int, status: RankStatus) -> OpenCall | None:
        """Return a rank's open call of the same thread that the leader is not in. None if the
        leader was in that call and failed: the rank is late, and finds the leader's answer
        there."""
        open_call = status.other_call(self._call.thread, self._member.open_names)
        if open_call is None or open_call.name not in self._member.logs:
            return open_call
        history = self._member.history(open_call.name)
        _, left, _ = self._paired(history, rank, status, open_call.name)
        return None if left else open_call

    def _paired(
        self, history: CallHistory, rank: int, status: RankStatus, name: str
    ) -> tuple[Settled, list[int], list[int]]:
        """Pair the failures of the leader and of ``rank`` in calls of this name."""
        settled = history.of(rank).joined(status.settled.get(name, Settled()))
        return paired(settled, self._member.log(name), status.logs.get(name, ()))

    def _has_lasted(self, rank: int, number: int, now_s: float) -> bool:
        return now_s - self._seen_since_s.setdefault((rank, number), now_s) >= self._grace_s

    async def _refuse(self, elsewhere: dict[int, OpenCall]) -> None:
        """Answer the ranks that are in other calls, and raise UsageError."""
        by_name: dict[str, list[int]] = {}
        for rank, other in elsewhere.items():
            by_name.setdefault(other.name, []).append(rank)
        rank, other = next(iter(elsewhere.items()))
        error = UsageError(
            f"ranks are in different calls: rank {rank} is in {other.text}, rank {LEADER} in "
            f"{self._call}",
            rank=rank,
            advice=(
                "Make the same calls on every rank, with the same URI and step, in the same order."
            ),
        )
        self.refused = error
        failure = Failure.of(error, LEADER)
        self._instead = [(name, self._member.next_number()) for name in by_name]
        here = (self._call.name, self.number)
        for name, number in self._instead:
            taken = self._member.history(name).taken
            roster = [-last for last in taken]
            for rank, ours in enumerate(self.roster):
                if ours > 0:
                    roster[rank] = NOT_ADDRESSED
            for stray in by_name[name]:
                roster[stray] = taken[stray] = elsewhere[stray].number
                self.roster[stray] = NOT_ADDRESSED
            others = [other for other in self._instead if other[0] != name]
            answer, _ = self._failed(name, number, roster, failure, [here, *others])
            encoded = codec(Answer).encode(answer)
            await self._member.call_store(self._member.keys.put, f"answer/{name}", encoded)
        await self._wait_until_left(elsewhere)
        raise error

    async def _wait_until_left(self, waiting: dict[int, OpenCall]) -> None:
        """Wait until ranks have left their calls: this process may serve the store."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + LEAVE_TIMEOUT_S
        while waiting and loop.time() < until_s:
            statuses = await self._member.call_store(self._member.statuses, list(waiting))
            waiting = {
                rank: other for rank, other in waiting.items() if _is_in(statuses[rank], other)
            }
            await asyncio.sleep(PAUSE_MAX_S)


def _is_in(status: RankStatus | None, call: OpenCall) -> bool:
    return status is not None and status.open_call(call.name) is not None


class FollowerRendezvous:
    """A follower's part: send a statement, and wait for the leader's answer."""

    def __init__(
        self, member: Member, call: Call, participation: Participation, silence_s: float
    ) -> None:
        self._member = member
        self._call = call
        self._participation = participation
        self._grace_s = min(GRACE_S, silence_s / 4)
        self._watch = Watch(member.rank, call.name, str(call), silence_s)
        self._status: RankStatus | None = None  # the leader's, as last seen
        self._passed_s: dict[int, float] = {}  # by number of a failure: when it was first seen

    async def answer(self, statement: bytes, what: str) -> Answer:
        """Send ``statement``, and return the leader's answer. Raises CoordinationErrors."""
        member = self._member
        loop = asyncio.get_running_loop()
        key = f"join/{self._call.name}/{member.rank}"
        await member.call_store(
            member.keys.put, key, f"{self._participation.number} ".encode() + statement
        )
        pause_s = PAUSE_S
        while True:
            answer, status = await self._observe()
            if answer is not None and self._is_mine(answer, status, loop.time()):
                waited_for(LEADER)
                self._participation.wait_ended()
                for name, number in answer.instead:
                    member.settle(name, member.settled(name).joined(Settled(number)))
                return answer
            if status is not None and status.nonce != member.leader:
                raise RankFailedError(f"rank {LEADER} was restarted", rank=LEADER)
            last, idle_s = self._watch.look({LEADER: status}, what, loop.time())
            self._participation.waits_for_rank(last, what, idle_s, loop.time())
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, PAUSE_MAX_S)

    async def _observe(self) -> tuple[Answer | None, RankStatus | None]:
        """Read the leader's answer and status. An error of the store names its last call."""
        try:
            answer, self._status = await self._member.call_store(self._look)
        except CoordinationError as error:
            other = self._status and next(iter(self._status.open), None)
            if other and other.name != self._call.name:
                error.message += f"; this rank was in {self._call}, rank {LEADER} in {other.text}"
            raise
        return answer, self._status

    def _look(self) -> tuple[Answer | None, RankStatus | None]:
        # The status first: a leader publishes its answer before it leaves.
        status = self._member.status(LEADER)
        data = self._member.keys.get(f"answer/{self._call.name}")
        return None if data is None else Answer.decode(data), status

    def _is_mine(self, answer: Answer, status: RankStatus | None, now_s: float) -> bool:
        """Return whether an answer is for this call: taken, or failed before."""
        member = self._member
        name = self._call.name
        mine = self._participation.number
        known = answer.taken_from(member.rank)
        if known == mine:
            member.settle(name, Settled(answer.number, mine))
            return True
        if answer.verdict.failure is None or known == NOT_ADDRESSED or known > 0:
            return False
        if -known == mine:  # the leader took it, failed, and failed again since
            return True
        settled = member.settled(name).joined(answer.settled_with(member.rank))
        settled, left, _ = paired(settled, answer.failures, member.log(name))
        member.settle(name, settled)
        in_next_call = status is not None and status.open_call(name)
        if not left or in_next_call:
            return False
        number = next((number for number in left if number > 0), 0)
        if not number:  # a timeout only: the leader may be about to arrive
            since_s = self._passed_s.setdefault(answer.number, now_s)
            is_elsewhere = (
                status is not None
                and status.other_call(self._call.thread, member.open_names) is not None
            )
            if not is_elsewhere and now_s - since_s < self._grace_s:
                return False
            number = -left[-1]
        member.settle(name, Settled(number, settled.other))
        return True
