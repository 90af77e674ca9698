"""What all ranks of a job do alike, though each decides for itself when: the leader's word, in the
trainer's own thread.

Ranks come to the same points of their loops, one sooner and one later. At such a point the leader
(rank 0) decides, and the others do as it did. It costs a call to the job's store, and the time
until the leader has come that far; so it is asked rarely: where a save is due, and now and then to
learn whether it is.

A *question* is asked step after step. Its words are kept by step in one key, which also says up to
which step others have given up on the leader: such a step is *void*. Whoever writes first wins, by
an atomic exchange of the key's value. So a leader that comes late finds that the others have gone
on, and does as they did; what was missed is asked anew at the next step, by all.

Scope: small decisions. Saves and loads have a :class:`Team`, with heartbeats and failures.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...errors import CoordinationError, DeadlineError
from ..format.digest import digest
from ..ranks.member import LEADER, Member
from ..ranks.process_group import current_member

__all__ = ["Agreement", "Word"]

WORDS_KEPT = 16
PAUSE_S = 0.0005
PAUSE_MAX_S = 0.02


@dataclass(frozen=True, slots=True)
class Word:
    """What the leader has decided at ``step``; it is asked again at step ``again_at``, and at none
    between."""

    step: int
    decision: int
    again_at: int


@dataclass(frozen=True, slots=True)
class _Page:
    """All that is known of one question. ``run`` names the leader's loop: steps grow within it.
    ``leader_at``: the step of the leader's last question. ``void``: up to this step, what has no
    word has none; ``void_next``: likewise in the loop after this one."""

    run: str = ""
    words: tuple[Word, ...] = ()
    leader_at: int = -1
    void: int = -1
    void_next: int = -1

    def encode(self) -> bytes:
        words = [[w.step, w.decision, w.again_at] for w in self.words]
        return json.dumps([self.run, words, self.leader_at, self.void, self.void_next]).encode()

    @classmethod
    def decode(cls, data: bytes | None) -> _Page:
        if data is None:
            return cls()
        run, words, *numbers = json.loads(data)
        return cls(run, tuple(Word(*word) for word in words), *numbers)

    def in_run(self, run: str) -> _Page:
        """This page, or an empty one where another loop has begun."""
        return self if self.run == run else _Page(run, void=self.void_next)

    def word(self, step: int) -> Word | None:
        """The word that holds at ``step``: said there; or before, and none is due between."""
        for word in reversed(self.words):
            if word.step == step:
                return word
            if word.step < step < word.again_at:
                return Word(step, 0, word.again_at)
        return None


class Agreement:
    """The ranks of a job, or a process that is alone. ``about`` tells one agreement of a job from
    others: it is the same on all ranks.

    Joins the job at the first question, so it may be made before torch.distributed is initialised.
    """

    def __init__(self, deadline_s: float, about: str = "") -> None:
        self._deadline_s = deadline_s
        self._about = digest(about.encode("utf-8", "surrogatepass")).hex()
        self._joined = False
        self._member: Member | None = None
        self._pages: dict[str, bytes | None] = {}
        """By question: the value of its key as this rank saw it last."""
        self._left_at: dict[str, tuple[str, int]] = {}
        """By question: where the leader was when this rank gave up on it."""
        self.begin_run()

    def begin_run(self) -> None:
        """Steps begin anew from here, perhaps at one that was before. All ranks call this alike."""
        self._run = secrets.token_hex(8)

    @property
    def leads(self) -> bool:
        """Whether this rank decides."""
        member = self._join()
        return member is None or member.rank == LEADER

    def ask(self, question: str, step: int, decide: Callable[[], Word]) -> Word | None:
        """The leader's word on ``question`` at ``step``; ``decide()`` is called on the leader only.
        None where the leader has passed this step without a word.

        Raises DeadlineError where the leader does not come in time, or came when others had given
        up: then no rank has a word at this step. Raises CoordinationError where the store cannot be
        reached.
        """
        member = self._join()
        if member is None:
            return decide()
        try:
            return (
                self._say(member, question, step, decide)
                if self.leads
                else self._hear(member, question, step)
            )
        except RuntimeError as error:  # what torch's stores raise, whatever went wrong
            raise CoordinationError(
                f"the job's store cannot be reached: {str(error).splitlines()[0]}", rank=member.rank
            ) from error

    def highest(self, name: str, value: int, timeout_s: float) -> int | None:
        """The highest ``value`` of all ranks, once every one has told its own under ``name``; None
        if within ``timeout_s`` they have not, or the store is gone. A name serves once."""
        member = self._join()
        if member is None:
            return value
        until_s = time.monotonic() + timeout_s
        try:
            self._find_leader(member, until_s)
            keys = member.keys.below(f"{self._key(name)}")
            keys.set(str(member.rank), str(value))
            told = [
                self._await(partial(keys.value, str(rank)), rank, until_s)
                for rank in range(member.world)
            ]
            return max(map(int, told))
        except (RuntimeError, DeadlineError):
            return None

    def _say(self, member: Member, question: str, step: int, decide: Callable[[], Word]) -> Word:
        """The leader's part: say a word, unless others have given up on it."""
        key = self._key(question)
        if not member.all_found:
            member.introduce(self._deadline_s)
        known = self._pages.get(question)
        word: Word | None = None
        while True:
            page = _Page.decode(known).in_run(self._run)
            void = step <= page.void
            if void:
                after = replace(page, leader_at=step)
            else:
                word = word or decide()
                after = replace(page, words=(*page.words, word)[-WORDS_KEPT:], leader_at=step)
            found = member.keys.swap(key, known, after.encode())
            if found == after.encode():
                self._pages[question] = found
                break
            known = found
        if void or word is None:
            raise DeadlineError(
                f"rank {member.rank} came to step {step} when others had given up waiting for it",
                rank=member.rank,
                advice="It is asked anew at the next step.",
            )
        return word

    def _hear(self, member: Member, question: str, step: int) -> Word | None:
        """Any other rank's part: wait for the leader's word, or give up for all."""
        until_s = time.monotonic() + self._deadline_s
        self._find_leader(member, until_s)
        key = self._key(question)
        pause_s = PAUSE_S
        while True:
            data = self._pages[question] = member.keys.value(key)
            page = _Page.decode(data)
            ours = member.follows(page.run, self._run)  # else the leader has not come to this loop
            if ours and (word := page.word(step)) is not None:
                self._left_at.pop(question, None)
                return word
            if ours and page.leader_at > step:
                return None
            void = page.void if ours else page.void_next
            absent = self._left_at.get(question) == (page.run, page.leader_at)
            if step <= void or absent or time.monotonic() > until_s:
                self._give_up(member, question, step, data, ours)
            # Asked again and again: a call that blocks would hold up the saves that use the same
            # connection.
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, PAUSE_MAX_S)

    def _give_up(
        self, member: Member, question: str, step: int, known: bytes | None, ours: bool
    ) -> None:
        """Make ``step`` void for all, and raise DeadlineError; or return, since something was
        written meanwhile."""
        page = _Page.decode(known)
        after = (
            replace(page, void=max(step, page.void))
            if ours
            else replace(page, void_next=max(step, page.void_next))
        )
        if (
            after != page
            and member.keys.swap(self._key(question), known, after.encode()) != after.encode()
        ):
            return
        self._left_at[question] = (page.run, page.leader_at)
        raise DeadlineError(
            f"rank {LEADER} has not come to step {step}, where the others are",
            rank=LEADER,
            advice="Look at its log: it died, hangs, or its loop has other steps.",
        )

    def _find_leader(self, member: Member, until_s: float) -> None:
        if not member.lead:
            self._await(lambda: member.find_leader() or None, LEADER, until_s)
            member.introduce(0.0)

    def _await(self, look: Callable[[], Any], rank: int, until_s: float) -> Any:
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
                self._member.introduce(self._deadline_s)
        return self._member
