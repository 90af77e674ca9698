"""Calls that ranks make together, and a rank's *status record*: its open calls and their progress.
A call is identified by its subject, never by a count of earlier calls. So ranks that got out of
step meet again in the next call.

Failures are *paired*: if two ranks failed in the same call, neither reports its failure to the
other. Two ranks make the same sequence of calls of one name. When they meet in a call, or one sees
the other's failure, that *settles* all earlier failures. Later failures are paired in order, first
with first. A failure without a partner belongs to a call that the other rank has yet to make, and
fails that call.

A rank that only timed out may have been in a call that the other rank skips. Such failures are
dropped together.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ..format.digest import digest
from .failures import Failure
from .messages import codec

MAIN = "main"


def _caller() -> str:
    thread = threading.current_thread()
    return MAIN if thread is threading.main_thread() else thread.name


@dataclass(frozen=True, slots=True)
class Call:
    """An API call, the same on every rank. Calls of one ``thread`` come in the same order."""

    kind: str
    uri: str = ""
    step: int | None = None
    thread: str = field(default_factory=_caller, compare=False)

    @property
    def name(self) -> str:
        """The identifier of the call, the same on all ranks, and different for different calls."""
        text = json.dumps([self.kind, self.uri, self.step])
        return digest(text.encode("utf-8", "surrogatepass")).hex()

    def __str__(self) -> str:
        text = f"{self.kind} {self.uri}".rstrip()
        return text if self.step is None else f"{text} (step {self.step})"


@dataclass(frozen=True, slots=True)
class OpenCall:
    """A call in progress on a rank.

    ``number`` identifies it among the calls of that rank. ``taken``: the leader has taken it.
    ``idle_s``: time since the last progress, here or at the rank that this one waits for.
    ``waits_for``: that rank, or -1; ``what``: the thing it waits for.
    """

    name: str
    number: int
    text: str
    thread: str
    taken: bool
    idle_s: float
    waits_for: int = -1
    what: str = ""


@dataclass(frozen=True, slots=True)
class FailedCall:
    """A call that failed on a rank before the leader took it."""

    name: str
    number: int
    text: str
    thread: str
    failure: Failure


LOGGED = 64
"""The number of failures of one name that a rank remembers."""

Log = Sequence[int]
"""Numbers of failed calls of one name, in order; ``-number`` if the rank had timed out."""


@dataclass(frozen=True, slots=True)
class Settled:
    """The last calls of the leader and of another rank whose failures are settled between them."""

    leader: int = 0
    other: int = 0

    def joined(self, known: Settled) -> Settled:
        """Return the later of both, on each side."""
        return Settled(max(self.leader, known.leader), max(self.other, known.other))


@dataclass(slots=True)
class CallHistory:
    """The leader's view of the calls of one name."""

    taken: list[int]
    """By rank, the number of its last call that the leader has taken, or has seen fail."""
    settled: dict[int, int] = field(default_factory=dict)
    """By rank, the leader's last failed call that is settled with it."""

    def of(self, rank: int) -> Settled:
        """Return the failures that the leader knows to be settled with a rank."""
        return Settled(self.settled.get(rank, 0), self.taken[rank])

    def settle(self, rank: int, settled: Settled) -> None:
        """Record failures as settled with a rank."""
        self.taken[rank] = settled.other
        if settled.leader:
            self.settled[rank] = settled.leader


def logged(log: Log, number: int, waited: bool) -> list[int]:
    """Append a failure to a log, and drop the oldest if it is full."""
    return [*log, -number if waited else number][-LOGGED:]


def paired(settled: Settled, leaders: Log, others: Log) -> tuple[Settled, list[int], list[int]]:
    """Pair off failures. Return the settled state and the unpaired rest of each log."""
    theirs = [number for number in leaders if abs(number) > settled.leader]
    ours = [number for number in others if abs(number) > settled.other]
    count = min(len(theirs), len(ours))
    if count:
        settled = Settled(abs(theirs[count - 1]), abs(ours[count - 1]))
    return settled, theirs[count:], ours[count:]


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The status record of a rank. ``nonce``: of its process. ``leader``: the nonce of the leader
    it has found. ``heartbeats`` grows with each record. ``logs``: by name, the calls that failed
    before the leader took them. ``settled``: by name, see :class:`Settled`."""

    nonce: str
    leader: str
    heartbeats: int
    open: tuple[OpenCall, ...] = ()
    failed: tuple[FailedCall, ...] = ()
    logs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    settled: dict[str, Settled] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Encode the message that other ranks read."""
        return codec(RankStatus).encode(self)

    @classmethod
    def decode(cls, data: bytes, rank: int) -> RankStatus:
        """Decode the status of ``rank``."""
        return codec(RankStatus).decode(data, f"the status of rank {rank}")

    def open_call(self, name: str) -> OpenCall | None:
        """Return the rank's open call of this name."""
        return next((s for s in self.open if s.name == name), None)

    def other_call(self, thread: str, names: Collection[str]) -> OpenCall | None:
        """Return an open call of a thread that is neither taken nor in ``names``."""
        for call in self.open:
            if not call.taken and call.thread == thread and call.name not in names:
                return call
        return None

    def failure(self, name: str, after: int) -> FailedCall | None:
        """Return the last failure in a call of this name with a number above ``after``."""
        return next((f for f in reversed(self.failed) if f.name == name and f.number > after), None)
