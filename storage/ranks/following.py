"""Entering a call as a follower: see ``rendezvous``."""

from __future__ import annotations

import asyncio

from ...core.spans import waited_for
from ...errors import CoordinationError, RankFailedError
from .calls import Call, RankStatus
from .member import LEADER, Member
from .pairing import Settled, paired
from .rendezvous import GRACE_S, NOT_ADDRESSED, PAUSE_MAX_S, PAUSE_S, Answer
from .watch import Participation, Watch


class FollowerRendezvous:
    """A follower's part: send a statement, and wait for the leader's answer."""

    def __init__(
        self, member: Member, call: Call, participation: Participation, silence_s: float
    ) -> None:
        self._member = member
        self._call = call
        self._participation = participation
        self._silence_s = silence_s
        self._grace_s = min(GRACE_S, silence_s / 4)
        self._watch = Watch(member.rank, call.name, str(call), silence_s)
        self._status: RankStatus | None = None  # the leader's, as last seen
        self._passed_s: dict[int, float] = {}  # by number of a failure: when it was first seen

    async def wait_for_leader(self, what: str) -> None:
        """Wait until the leader is found. Raises DeadlineError, CoordinationError."""
        await self._member.wait_for_leader(self._silence_s, f"{what} of the {self._call}")

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
