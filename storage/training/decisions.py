"""Decisions by the leader that all ranks of a job share, made in the trainer's own thread.

Ranks reach the same points of their loops at different times. The leader (rank 0) decides there,
and the others follow. That costs a call to the job's store, and a wait until the leader has
arrived. So questions are rare: whether to skip a save that is due, and now and then whether one is
due.

A *question* is asked at step after step. All its decisions are stored under one key, by step. The
same record holds the last step at which other ranks gave up on the leader: steps up to that one
without a decision are *void*. An atomic compare-and-swap of the value ensures that the first writer
wins. So a leader that arrives late sees that the others have moved on, and follows them; all ranks
decide together again at the next step.

Scope: small decisions. Saves and loads use a :class:`Team`, with heartbeats and failures.
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
from ..ranks.member import Member
from ..ranks.messages import LEADER, codec
from ..ranks.process_group import current_member

DECISIONS_KEPT = 16
PAUSE_S = 0.0005
PAUSE_MAX_S = 0.02

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Decision:
    """The leader's decision at ``step``. The question is asked again at step ``again_at``."""

    step: int
    value: int
    again_at: int


@dataclass(frozen=True, slots=True)
class QuestionRecord:
    """The stored record of one question. ``run`` identifies the leader's loop; steps ascend within
    it. ``leader_at``: the step of the leader's last question. ``void``: steps up to this one that
    have no decision never get one. ``void_next``: the same for the loop that follows."""

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
        """Return this record, or an empty one if another loop has begun."""
        if self.run == run:
            return self
        return QuestionRecord(run, void=self.void_next)

    def at(self, step: int) -> Decision | None:
        """Return the decision for ``step``: made there, or implied by an earlier one."""
        for decision in reversed(self.decisions):
            if decision.step == step:
                return decision
            if decision.step < step < decision.again_at:
                return Decision(step, 0, decision.again_at)
        return None

    def voided(self, step: int, *, in_next_run: bool) -> QuestionRecord:
        """Return this record with ``step`` made void, in this loop or in the next."""
        if in_next_run:
            return replace(self, void_next=max(step, self.void_next))
        return replace(self, void=max(step, self.void))


class Decisions:
    """The shared decisions of a job's ranks, or of a single process. ``about`` distinguishes
    several instances of one job, and is the same on all ranks. Joins the job at the first question,
    so it may be created before torch.distributed is initialised."""

    def __init__(self, deadline_s: float, about: str = "") -> None:
        self._deadline_s = deadline_s
        self._about = digest(about.encode("utf-8", "surrogatepass")).hex()
        self._joined = False
        self._member: Member | None = None
        self._records: dict[str, bytes | None] = {}
        """The value of each question's key as this rank last saw it."""
        self._left_at: dict[str, tuple[str, int]] = {}
        """The leader's position, by question, when this rank gave up on it."""
        self.begin_run()

    def begin_run(self) -> None:
        """Begin a loop on every rank; decisions about an earlier loop's steps do not count."""
        self._run = secrets.token_hex(8)

    @property
    def leads(self) -> bool:
        """Return whether this rank decides."""
        member = self._join()
        return member is None or member.rank == LEADER

    def ask(self, question: str, step: int, decide: Callable[[], Decision]) -> Decision | None:
        """Return the leader's decision on ``question`` at ``step``; ``decide()`` runs on the leader
        only.

        None if the leader passed this step without asking.

        Raises DeadlineError if the leader does not arrive in time, or arrives after others have
        given up: then no rank has a decision at this step. Raises CoordinationError if the store
        cannot be reached.
        """
        member = self._join()
        if member is None:
            return decide()
        try:
            if self.leads:
                return self._decide(member, question, step, decide)
            return self._follow(member, question, step)
        except RuntimeError as error:  # torch's stores raise this for every kind of failure
            raise CoordinationError(
                f"the job's store cannot be reached: {str(error).splitlines()[0]}", rank=member.rank
            ) from error

    def highest(self, name: str, value: int, timeout_s: float) -> int | None:
        """Return the maximum of ``value`` over all ranks; None after ``timeout_s``. Blocks."""
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
        """On the leader, publish a decision, unless other ranks have given up on this step."""
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
                f"rank {member.rank} reached step {step} after others had given up waiting for it",
                rank=member.rank,
                advice="The ranks decide again at the next step.",
            )
        return decision

    def _follow(self, member: Member, question: str, step: int) -> Decision | None:
        """On other ranks, wait for the leader's decision, or give up on behalf of all."""
        until_s = time.monotonic() + self._deadline_s
        self._find_leader(member, until_s)
        key = self._key(question)
        pause_s = PAUSE_S
        while True:
            data = self._records[question] = member.keys.value(key)
            record = QuestionRecord.decode(data)
            # Otherwise the leader has not reached this loop.
            in_this_run = member.is_same_run(record.run, self._run)
            if in_this_run:
                decision = record.at(step)
                if decision is not None:
                    self._left_at.pop(question, None)
                    return decision
                if record.leader_at > step:
                    return None
            void = record.void if in_this_run else record.void_next
            is_absent = self._left_at.get(question) == (record.run, record.leader_at)
            if step <= void or is_absent or time.monotonic() > until_s:
                self._give_up(member, question, step, data, in_this_run)
            # Poll: a blocking call would hold up saves that use the same connection.
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, PAUSE_MAX_S)

    def _give_up(
        self, member: Member, question: str, step: int, known: bytes | None, in_this_run: bool
    ) -> None:
        """Make ``step`` void for all ranks and raise DeadlineError, unless another rank wrote."""
        record = QuestionRecord.decode(known)
        after = record.voided(step, in_next_run=not in_this_run)
        if after != record:
            encoded = after.encode()
            if member.keys.swap(self._key(question), known, encoded) != encoded:
                return
        self._left_at[question] = (record.run, record.leader_at)
        raise DeadlineError(
            f"rank {LEADER} has not reached step {step}, where the others wait",
            rank=LEADER,
            advice="Look at its log: it died, hangs, or counts steps differently.",
        )

    def _find_leader(self, member: Member, until_s: float) -> None:
        if not member.leader:
            self._await(lambda: member.find_leader() or None, LEADER, until_s)
            member.announce(0.0)

    def _await(self, look: Callable[[], T | None], rank: int, until_s: float) -> T:
        pause_s = PAUSE_S
        while (found := look()) is None:
            if time.monotonic() > until_s:
                raise DeadlineError(
                    f"rank {rank} has not reached the step where the others wait",
                    rank=rank,
                    advice="Look at its log: it died, hangs, or counts steps differently.",
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
