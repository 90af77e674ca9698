"""Decisions that are the same on all ranks of a job, made by the leader, in the trainer's own
thread.

Ranks come to the same points of their loops, some sooner and some later. At such a point the leader
(rank 0) decides, and the others follow. That costs a call to the job's store, and the time until
the leader has come to that point; so a question is asked rarely: where a save is due, and now and
then to learn whether one is.

A *question* is asked step after step. Its decisions are kept by step in one key, which also says up
to which step other ranks have given up on the leader: such a step is *void*. The first to write
wins, by an atomic exchange of the key's value. So a leader that comes late finds that the others
have gone on, and follows them; what was missed is decided at the next step, by all.

Scope: small decisions. Saves and loads have a :class:`Team`, with heartbeats and failures.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from ...errors import CoordinationError, DeadlineError
from ..format.digest import digest
from ..ranks.member import LEADER, Member
from ..ranks.messages import codec
from ..ranks.process_group import current_member

__all__ = ["Decision", "Decisions"]

DECISIONS_KEPT = 16
PAUSE_S = 0.0005
PAUSE_MAX_S = 0.02

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Decision:
    """What the leader has decided at ``step``; the question is asked again at step ``again_at``,
    and at none between."""

    step: int
    value: int
    again_at: int


@dataclass(frozen=True, slots=True)
class QuestionRecord:
    """All that is known of one question. ``run`` names the leader's loop: steps grow within it.
    ``leader_at``: the step of the leader's last question. ``void``: up to this step, a step without
    a decision stays without one; ``void_next``: likewise in the loop after this one."""

    run: str = ""
    decisions: tuple[Decision, ...] = ()
    leader_at: int = -1
    void: int = -1
    void_next: int = -1

    def encode(self) -> bytes:
        return codec(QuestionRecord).encode(self)

    @classmethod
    def decode(cls, data: bytes | None) -> QuestionRecord:
        if data is None:
            return cls()
        return codec(QuestionRecord).decode(data, "the record of a question")

    def in_run(self, run: str) -> QuestionRecord:
        """This record, or an empty one where another loop has begun."""
        if self.run == run:
            return self
        return QuestionRecord(run, void=self.void_next)

    def at(self, step: int) -> Decision | None:
        """The decision that holds at ``step``: made there; or made before, with no other due in
        between."""
        for decision in reversed(self.decisions):
            if decision.step == step:
                return decision
            if decision.step < step < decision.again_at:
                return Decision(step, 0, decision.again_at)
        return None

    def voided(self, step: int, *, in_next_run: bool) -> QuestionRecord:
        """This record with ``step`` made void, in this loop or in the next."""
        if in_next_run:
            return replace(self, void_next=max(step, self.void_next))
        return replace(self, void=max(step, self.void))


class Decisions:
    """The decisions of a job's ranks, or of a process that is alone. ``about`` distinguishes
    several of a job, and is the same on all ranks.

    Joins the job at the first question, so it may be made before torch.distributed is initialised.
    """

    def __init__(self, deadline_s: float, about: str = "") -> None:
        self._deadline_s = deadline_s
        self._about = digest(about.encode("utf-8", "surrogatepass")).hex()
        self._joined = False
        self._member: Member | None = None
        self._records: dict[str, bytes | None] = {}
        """By question: the value of its key as this rank saw it last."""
        self._left_at: dict[str, tuple[str, int]] = {}
        """By question: where the leader was when this rank gave up on it."""
        self.begin_run()

    def begin_run(self) -> None:
        """A run begins, perhaps with steps that were asked about before: what was decided for them
        does not count. All ranks call this."""
        self._run = secrets.token_hex(8)

    @property
    def leads(self) -> bool:
        """Whether this rank decides."""
        member = self._join()
        return member is None or member.rank == LEADER

    def ask(self, question: str, step: int, decide: Callable[[], Decision]) -> Decision | None:
        """The leader's decision on ``question`` at ``step``; ``decide()`` is called on the leader
        only. None where the leader has passed this step without asking.

        Raises DeadlineError where the leader does not come in time, or came when others had given
        up: then no rank has a decision at this step. Raises CoordinationError where the store
        cannot be reached.
        """
        member = self._join()
        if member is None:
            return decide()
        try:
            if self.leads:
                return self._decide(member, question, step, decide)
            return self._follow(member, question, step)
        except RuntimeError as error:  # torch's stores raise it, whatever went wrong
            raise CoordinationError(
                f"the job's store cannot be reached: {str(error).splitlines()[0]}", rank=member.rank
            ) from error

    def highest(self, name: str, value: int, timeout_s: float) -> int | None:
        """The highest ``value`` of all ranks, once each has sent its own under ``name``; None if
        within ``timeout_s`` they have not, or the store is gone. A name can be used once."""
        member = self._join()
        if member is None:
            return value
        until_s = time.monotonic() + timeout_s
        try:
            self._find_leader(member, until_s)
            keys = member.keys.below(f"{self._key(name)}")
            keys.set(str(member.rank), str(value))
            values = [
                self._await(partial(keys.value, str(rank)), rank, until_s)
                for rank in range(member.world)
            ]
            return max(map(int, values))
        except (RuntimeError, DeadlineError):
            return None

    def _decide(
        self, member: Member, question: str, step: int, decide: Callable[[], Decision]
    ) -> Decision:
        """The leader's part: publish a decision, unless other ranks have given up on it."""
        key = self._key(question)
        if not member.all_found:
            member.announce(self._deadline_s)
        known = self._records.get(question)
        decision: Decision | None = None
        while True:
            record = QuestionRecord.decode(known).in_run(self._run)
            is_void = step <= record.void
            decisions = record.decisions
            if not is_void:
                if decision is None:
                    decision = decide()
                decisions = (*decisions, decision)[-DECISIONS_KEPT:]
            after = replace(record, decisions=decisions, leader_at=step).encode()
            found = member.keys.swap(key, known, after)
            if found == after:
                self._records[question] = found
                break
            known = found
        if is_void or decision is None:
            raise DeadlineError(
                f"rank {member.rank} came to step {step} when others had given up waiting for it",
                rank=member.rank,
                advice="It is asked anew at the next step.",
            )
        return decision

    def _follow(self, member: Member, question: str, step: int) -> Decision | None:
        """Any other rank's part: wait for the leader's decision, or give up for all."""
        until_s = time.monotonic() + self._deadline_s
        self._find_leader(member, until_s)
        key = self._key(question)
        pause_s = PAUSE_S
        while True:
            data = self._records[question] = member.keys.value(key)
            record = QuestionRecord.decode(data)
            # Otherwise the leader has not come to this loop.
            in_this_run = member.is_same_run(record.run, self._run)
            if in_this_run:
                decision = record.at(step)
                if decision is not None:
                    self._left_at.pop(question, None)
                    return decision
                if record.leader_at > step:
                    return None
            if in_this_run:
                void = record.void
            else:
                void = record.void_next
            is_absent = self._left_at.get(question) == (record.run, record.leader_at)
            if step <= void or is_absent or time.monotonic() > until_s:
                self._give_up(member, question, step, data, in_this_run)
            # Polled: a blocking call would hold up the saves that use the same connection.
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, PAUSE_MAX_S)

    def _give_up(
        self, member: Member, question: str, step: int, known: bytes | None, in_this_run: bool
    ) -> None:
        """Make ``step`` void for all, and raise DeadlineError; or return, because another rank has
        written meanwhile."""
        record = QuestionRecord.decode(known)
        after = record.voided(step, in_next_run=not in_this_run)
        if after != record:
            encoded = after.encode()
            if member.keys.swap(self._key(question), known, encoded) != encoded:
                return
        self._left_at[question] = (record.run, record.leader_at)
        raise DeadlineError(
            f"rank {LEADER} has not come to step {step}, where the others are",
            rank=LEADER,
            advice="Look at its log: it died, hangs, or its loop has other steps.",
        )

    def _find_leader(self, member: Member, until_s: float) -> None:
        if not member.leader:
            self._await(lambda: member.find_leader() or None, LEADER, until_s)
            member.announce(0.0)

    def _await(self, look: Callable[[], T | None], rank: int, until_s: float) -> T:
        """What ``look`` returns, when that is not None."""
        pause_s = PAUSE_S
        while (found := look()) is None:
            if time.monotonic() > until_s:
                raise DeadlineError(
                    f"rank {rank} has not come to where the others are",
                    rank=rank,
                    advice="Look at its log: it died, hangs, or its loop has other steps.",
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, PAUSE_MAX_S)
        return found

    def _key(self, question: str) -> str:
        return f"asked/{self._about}/{question}"

    def _join(self) -> Member | None:
        if not self._joined:
            self._joined = True
            self._member = current_member(self._deadline_s)
            if self._member is not None:
                self._member.announce(self._deadline_s)
        return self._member
