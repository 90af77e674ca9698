"""How the ranks of a call find each other: the first round of it.

Every rank names its call, see ``calls.Call``. What each states first goes to a key of that name and
its rank, with a number that this rank gives to no other call. The leader takes what it finds under
the name of its own call, and answers under that name, with a *roster*: the number that it took of
each rank. So a rank knows whether an answer is for its present call, and nobody counts what the
others have called before.

    join/<name>/<rank>    number, statement
    answer/<name>         number of the leader's call, roster, verdict or error
    gone/<name>           a rank that has stated something and failed since, and its number

In a roster a number above 0 says that the leader has taken this call of the rank, or knows that it
failed. ``-n`` says that the rank had not come; n is the last of its calls of that name that the
leader knew then. ``NOT_MEANT``: no call of this rank.

A rank that fails before the leader has taken its call says so on its board, where the leader looks
for all who are missing. An answer that is an error lists the leader's failures in calls of that
name. From both lists either side finds alike which failures belong together: see ``pairing``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import CoordinationError, RankFailedError, UsageError
from .calls import Board, Call, Shown, decoded_roster, encoded_roster
from .failures import Failure
from .member import LEADER, Member
from .messages import codec
from .pairing import Even, Log, paired
from .watch import Attendance, Watch

__all__ = ["Answer", "Arrival", "Assembly", "Verdict"]

SETTLE_S = 1.0
"""How long a rank may be seen in another call, or to have given up, before that counts: it may be
about to come."""
HEARD_S = 2.0
NOT_MEANT = -(1 << 60)
PAUSE_S = 0.001
PAUSE_MAX_S = 0.05


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the leader has decided in a round, encoded; or the failure that ends the round for all
    ranks."""

    decision: bytes = b""
    failure: Failure | None = None

    def opened(self) -> bytes:
        """The decision. Raises the failure."""
        if self.failure is not None:
            self.failure.raise_alike()
        return self.decision


@dataclass(frozen=True, slots=True)
class AnswerMessage:
    """An :class:`Answer` as it is sent: rosters as text."""

    number: int
    roster: str
    verdict: Verdict
    failures: tuple[int, ...] = ()
    even: str = ""
    instead: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What the leader has answered.

    ``failures``: the leader's in calls of this name; ``even``: by rank, up to which of those it has
    heard of.

    ``instead`` is for ranks that were in another call than the leader, and for those that come
    late: the names and the numbers of other calls of the leader, which failed of the same. Who
    knows of one of these failures knows of all.
    """

    number: int
    roster: Sequence[int]
    verdict: Verdict
    failures: Log = ()
    even: Sequence[int] = ()
    instead: Sequence[tuple[str, int]] = ()

    @property
    def failed(self) -> bool:
        """Whether it is an error."""
        return self.verdict.failure is not None

    def encode(self) -> bytes:
        """The message that other ranks read."""
        message = AnswerMessage(
            self.number,
            encoded_roster(self.roster),
            self.verdict,
            tuple(self.failures),
            encoded_roster(self.even) if self.even else "",
            tuple(self.instead),
        )
        return codec(AnswerMessage).encode(message)

    @classmethod
    def decode(cls, data: bytes, world: int) -> Answer:
        """The answer to ranks of a job of that size."""
        message = codec(AnswerMessage).decode(data, f"the answer of rank {LEADER}")
        return cls(
            message.number,
            decoded_roster(message.roster, world),
            message.verdict,
            message.failures,
            decoded_roster(message.even, world) if message.even else (),
            message.instead,
        )

    def even_with(self, rank: int) -> Even:
        """Up to where the leader and ``rank`` were even, as far as the leader knew."""
        return Even(self.even[rank], max(0, -self.roster[rank]))


class Assembly:
    """The leader's part: take what all ranks state."""

    def __init__(
        self, member: Member, call: Call, attendance: Attendance | None, silence_s: float
    ) -> None:
        """``attendance`` None: this rank has failed before it began."""
        self._member, self._call, self._attendance = member, call, attendance
        self._settle_s = min(SETTLE_S, silence_s / 4)
        self._watch = Watch(member.rank, call.name, str(call), silence_s)
        self._pairs = member.pairs(call.name)
        self._strayed: dict[
            tuple[int, int], float
        ] = {}  # by rank and number of its call: since when
        self._strangers: dict[tuple[int, str], float] = {}  # by rank and nonce: since when
        self._silence_s = silence_s
        self.refused: UsageError | None = None
        """What all ranks are told where they are in different calls."""
        self.number = member.next_number() if attendance is None else attendance.number
        self.roster = [-number for number in self._pairs.taken]
        self.roster[LEADER] = self.number
        self._instead: list[tuple[str, int]] = []

    async def gather(self, mine: bytes, what: str) -> list[bytes]:
        """The statements of all ranks, in their order. Raises RankFailedError, DeadlineError, and
        UsageError where ranks are in different calls."""
        assert self._attendance is not None
        loop = asyncio.get_running_loop()
        found: dict[int, bytes] = {LEADER: mine}
        pause_s = PAUSE_S
        while missing := [rank for rank in range(self._member.world) if rank not in found]:
            taken, boards = await self._member.ask(self._look, missing)
            found |= taken
            if boards:
                await self._check(boards, loop.time())
                last, idle_s = self._watch.look(boards, what, loop.time())
                self._attendance.waits(last, what, idle_s, loop.time())
                pause_s = PAUSE_S if taken else min(pause_s * 1.5, PAUSE_MAX_S)
                await asyncio.sleep(pause_s)
        self._attendance.waited()
        return [found[rank] for rank in range(self._member.world)]

    def answer(self, verdict: Verdict) -> Answer:
        """To all who have come."""
        return Answer(self.number, self.roster, verdict)

    def post(self, verdict: Verdict) -> None:
        """Answer. Blocks."""
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
        keys.put(f"answer/{name}", answer.encode())
        keys.delete([f"gone/{name}"])
        for old in forgotten:
            keys.delete(keys.taken_by(f"answer/{old}"))

    def _failed(
        self,
        name: str,
        number: int,
        roster: Sequence[int],
        failure: Failure,
        instead: Sequence[tuple[str, int]],
    ) -> tuple[Answer, list[str]]:
        """The answer to a call that has failed, and the names of calls whose answers are no longer
        wanted."""
        member, pairs = self._member, self._member.pairs(name)
        for rank, taken in enumerate(roster):
            if taken > 0 or taken == NOT_MEANT:
                pairs.even[rank] = number
        forgotten = member.log_failure(name, number, failure.timed_out)
        even = [pairs.even.get(rank, 0) for rank in range(member.world)]
        verdict = Verdict(failure=failure)
        return Answer(number, roster, verdict, member.log(name), even, instead), forgotten

    def _look(self, missing: Sequence[int]) -> tuple[dict[int, bytes], dict[int, Board | None]]:
        """What some ranks have stated, and the boards of the others."""
        keys, name = self._member.keys, self._call.name
        taken: dict[int, bytes] = {}
        boards: dict[int, Board | None] = {}
        gone = keys.value(f"gone/{name}")
        if gone is not None:
            self._check_gone(*map(int, gone.split()))
        for rank in missing:
            joined = keys.told(f"join/{name}/{rank}")
            number, _, statement = (joined or b"0 ").partition(b" ")
            if int(number) > self._pairs.taken[rank]:
                self._take(rank, int(number))
                taken[rank] = statement
            else:
                boards[rank] = self._member.board(rank)
        return taken, boards

    def _check_gone(self, rank: int, number: int) -> None:
        """Raise where a rank has failed whose call was taken. In the thread that has looked."""
        board = self._member.board(rank) if self.roster[rank] == number else None
        failed = None if board is None else board.failure(self._call.name, number - 1)
        if failed is not None and failed.number == number:
            raise failed.failure.as_error()

    def _take(self, rank: int, number: int) -> None:
        """Of this rank the leader has taken that call, or knows that it failed."""
        self._pairs.taken[rank] = self.roster[rank] = number
        self._member.joined[rank] = max(self._member.joined[rank], number)

    async def _check(self, boards: dict[int, Board | None], now_s: float) -> None:
        """Raise where a rank has failed in this call, or is in another one instead."""
        elsewhere: dict[int, Shown] = {}
        for rank, board in boards.items():
            if board is None:
                continue
            if board.lead != self._member.nonce:
                self._check_stranger(rank, board, now_s)
                continue
            left = self._left_over(rank, board)
            if board.shown(self._call.name) is not None:
                continue
            other = self._other_call(rank, board)
            self._check_failures(rank, board, left, other is not None, now_s)
            self._check_other_failure(rank, board, now_s)
            if other is not None and self._settled(rank, other.number, now_s):
                elsewhere[rank] = other
        if elsewhere:
            await self._refuse(elsewhere)

    def _check_stranger(self, rank: int, board: Board, now_s: float) -> None:
        """A rank that has not found this leader may be a process that died before, so what it shows
        does not count yet. But one that fails before that, and ends, will never find the leader:
        its failure is raised after a while."""
        failed = board.failure(self._call.name, 0)
        if board.lead or board.open or failed is None:
            return
        since_s = self._strangers.setdefault((rank, board.nonce), now_s)
        if now_s - since_s >= self._silence_s / 4:
            raise failed.failure.as_error()

    def _left_over(self, rank: int, board: Board) -> list[int]:
        """The failures of a rank in calls of this name that do not belong to failures of the
        leader."""
        name = self._call.name
        even = self._pairs.of(rank).joined(board.even.get(name, Even()))
        even, _, left = paired(even, self._member.log(name), board.logs.get(name, ()))
        self._pairs.settle(rank, even)
        self.roster[rank] = -even.other
        return left

    def _check_failures(
        self, rank: int, board: Board, left: list[int], is_elsewhere: bool, now_s: float
    ) -> None:
        """Raise what this rank has failed of. Where it has only waited in vain, it may be about to
        come."""
        number = next((number for number in left if number > 0), 0)
        if not number and left and (is_elsewhere or self._settled(rank, -left[-1], now_s)):
            number = -left[-1]
        if not number:
            return
        self._take(rank, number)
        failed = next(
            (f for f in board.failed if f.name == self._call.name and f.number == number), None
        )
        if failed is None:  # so many are remembered by their numbers alone
            raise RankFailedError(f"rank {rank} failed in an earlier {self._call}", rank=rank)
        raise failed.failure.as_error()

    def _check_other_failure(self, rank: int, board: Board, now_s: float) -> None:
        """Raise where a rank failed in another call of the same thread, instead of coming here."""
        ours = self._member.open_names
        for failed in board.failed:
            last = failed.number > self._member.joined[rank] and failed.thread == self._call.thread
            if last and failed.name not in ours and self._settled(rank, failed.number, now_s):
                self._member.joined[rank] = failed.number
                self._member.pairs(failed.name).taken[rank] = failed.number
                self.roster[rank] = NOT_MEANT  # it has had its error
                raise RankFailedError(
                    f"rank {rank} failed in {failed.text}, while rank {LEADER} is in "
                    f"{self._call}: {failed.failure.message}",
                    rank=rank,
                )

    def _other_call(self, rank: int, board: Board) -> Shown | None:
        """The call of the same thread that a rank is in, and the leader is not. None where the
        leader was in that one, and failed: the rank is late, and finds the leader's answer there.
        """
        shown = _stray(board, self._call, self._member)
        if shown is None or shown.name not in self._member.logs:
            return shown
        even = self._member.pairs(shown.name).of(rank).joined(board.even.get(shown.name, Even()))
        _, left, _ = paired(even, self._member.log(shown.name), board.logs.get(shown.name, ()))
        return None if left else shown

    def _settled(self, rank: int, number: int, now_s: float) -> bool:
        return now_s - self._strayed.setdefault((rank, number), now_s) >= self._settle_s

    async def _refuse(self, elsewhere: dict[int, Shown]) -> None:
        """Tell the ranks that are in other calls, and raise."""
        by_name: dict[str, list[int]] = {}
        for rank, other in elsewhere.items():
            by_name.setdefault(other.name, []).append(rank)
        rank, other = next(iter(elsewhere.items()))
        error = UsageError(
            f"ranks are in different calls: rank {rank} is in {other.text}, rank {LEADER} in "
            f"{self._call}",
            rank=rank,
            advice=(
                "Every rank makes the same calls, with the same URI and step, in the same order."
            ),
        )
        self.refused = error
        failure = Failure.of(error, LEADER)
        self._instead = [(name, self._member.next_number()) for name in by_name]
        here = (self._call.name, self.number)
        for name, number in self._instead:
            taken = self._member.pairs(name).taken
            roster = [-last for last in taken]
            for rank, ours in enumerate(self.roster):
                if ours > 0:
                    roster[rank] = NOT_MEANT
            for stray in by_name[name]:
                roster[stray] = taken[stray] = elsewhere[stray].number
                self.roster[stray] = NOT_MEANT
            others = [other for other in self._instead if other[0] != name]
            answer, _ = self._failed(name, number, roster, failure, [here, *others])
            await self._member.ask(self._member.keys.put, f"answer/{name}", answer.encode())
        await self._heard(elsewhere)
        raise error

    async def _heard(self, told: dict[int, Shown]) -> None:
        """Return when these ranks have left their calls, or after a while: this process may serve
        the store, and end."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + HEARD_S
        while told and loop.time() < until_s:
            boards = await self._member.ask(self._member.boards, list(told))
            told = {
                rank: other
                for rank, other in told.items()
                if boards[rank] and boards[rank].shown(other.name)
            }
            await asyncio.sleep(PAUSE_MAX_S)


class Arrival:
    """The part of any other rank: state something, and wait for the leader's answer."""

    def __init__(
        self, member: Member, call: Call, attendance: Attendance, silence_s: float
    ) -> None:
        self._member, self._call, self._attendance = member, call, attendance
        self._silence_s = silence_s
        self._settle_s = min(SETTLE_S, silence_s / 4)
        self._watch = Watch(member.rank, call.name, str(call), silence_s)
        self._board: Board | None = None  # the leader's, as it was seen last
        self._passed_s: dict[int, float] = {}  # by number of a failure: since when it is seen

    async def found_leader(self, what: str) -> None:
        """Return when the leader is found. Raises DeadlineError, CoordinationError."""
        await self._member.found_leader(self._silence_s, f"{what} of the {self._call}")

    async def answer(self, statement: bytes, what: str) -> Answer:
        """The leader's answer. Raises RankFailedError, DeadlineError, CoordinationError."""
        member, loop = self._member, asyncio.get_running_loop()
        key = f"join/{self._call.name}/{member.rank}"
        await member.ask(member.keys.put, key, f"{self._attendance.number} ".encode() + statement)
        pause_s = PAUSE_S
        while True:
            answer, board = await self._looked()
            if answer is not None and self._is_mine(answer, board, loop.time()):
                self._attendance.waited()
                for name, number in answer.instead:
                    member.settle(name, member.even(name).joined(Even(number)))
                return answer
            if board is not None and board.nonce != member.lead:
                raise RankFailedError(f"rank {LEADER} was started anew", rank=LEADER)
            last, idle_s = self._watch.look({LEADER: board}, what, loop.time())
            self._attendance.waits(last, what, idle_s, loop.time())
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, PAUSE_MAX_S)

    async def _looked(self) -> tuple[Answer | None, Board | None]:
        """:meth:`_look`. Where the store is gone, what the leader was in is known from the look
        before."""
        try:
            answer, self._board = await self._member.ask(self._look)
        except CoordinationError as error:
            other = self._board and next(iter(self._board.open), None)
            if other and other.name != self._call.name:
                error.message += f"; this rank was in {self._call}, rank {LEADER} in {other.text}"
            raise
        return answer, self._board

    def _look(self) -> tuple[Answer | None, Board | None]:
        board = self._member.board(LEADER)  # first: what it has answered is there before it leaves
        data = self._member.keys.told(f"answer/{self._call.name}")
        return None if data is None else Answer.decode(data, self._member.world), board

    def _is_mine(self, answer: Answer, board: Board | None, now_s: float) -> bool:
        """Whether it is for this call: either it has taken it; or the leader failed before this
        rank came."""
        member, name, mine = self._member, self._call.name, self._attendance.number
        known = answer.roster[member.rank]
        if known == mine:
            member.settle(name, Even(answer.number, mine))
            return True
        if not answer.failed or known == NOT_MEANT or known > 0:
            return False
        if -known == mine:  # the leader took it, failed, and has failed again since
            return True
        even = member.even(name).joined(answer.even_with(member.rank))
        even, left, _ = paired(even, answer.failures, member.log(name))
        member.settle(name, even)
        if not left or (
            board is not None and board.shown(name)
        ):  # the leader is in the next such call
            return False
        number = next((number for number in left if number > 0), 0)
        if not number:  # it has only waited in vain, and may be about to come
            since_s = self._passed_s.setdefault(answer.number, now_s)
            is_elsewhere = board is not None and _stray(board, self._call, member) is not None
            if not is_elsewhere and now_s - since_s < self._settle_s:
                return False
            number = -left[-1]
        member.settle(name, Even(number, even.other))
        return True


def _stray(board: Board, call: Call, member: Member) -> Shown | None:
    """The call of the same thread as ``call`` that another rank is in, and this rank is not."""
    ours = member.open_names
    return next(
        (s for s in board.open if not s.met and s.thread == call.thread and s.name not in ours),
        None,
    )
