"""Calls that ranks make together, and a rank's *status record*: its open calls and their progress.
A call is identified by its subject, never by a count of earlier calls. So ranks that got out of
step meet again in the next call."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection
from dataclasses import dataclass, field

from ..format.digest import digest
from .failures import Failure
from .messages import codec
from .pairing import Settled

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


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The status record of a rank. ``nonce``: of its process. ``leader``: the nonce of the leader
    it has found. ``heartbeats`` grows with each record. ``logs``: by name, the calls that failed
    before the leader took them. ``settled``: by name, see ``pairing.Settled``."""

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
