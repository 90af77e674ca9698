"""What all ranks of a job do alike, though each decides for itself when: the leader's word, in the trainer's own thread.

Ranks come to the same points of their loops, one sooner and one later. At such a point the leader (rank 0) decides, and
the others do as it did. It costs a few calls to the job's store, and the time until the leader has come that far; so it is
asked rarely: where a save is due, and now and then to learn whether it is.

Scope: small decisions. Saves and loads have a :class:`Team`, with heartbeats and failures.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TypeVar

from ...errors import CoordinationError, DeadlineError
from ..frameworks.process_group import shared_store
from ..ranks.team import StoreLike

__all__ = ["Agreement"]

T = TypeVar("T", bound=bool | int)
LEADER = 0


class Agreement:
    """The ranks of a job, or a process that is alone. Every rank asks the same questions in the same order.

    Joins the job at the first question, so it may be made before torch.distributed is initialised.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._asked = 0
        self._joined = False
        self._store: StoreLike | None = None
        self._rank, self._world, self._prefix = LEADER, 1, ""

    @property
    def leads(self) -> bool:
        """Whether this rank decides."""
        self._join()
        return self._rank == LEADER

    def ask(self, decide: Callable[[], T]) -> T:
        """What ``decide()`` returned on the leader; nowhere else is it called. Raises DeadlineError, CoordinationError."""
        self._join()
        self._asked += 1
        key = f"{self._prefix}/{self._asked}"
        if self._store is None:
            return decide()
        try:
            if self._rank == LEADER:
                decision = decide()
                self._store.set(key, json.dumps(decision))
                return decision
            self._await([LEADER], lambda _: key, time.monotonic() + self._deadline_s)
            told: T = json.loads(self._store.get(key))
            if self._store.add(f"{key}/seen", 1) == self._world - 1:
                self._store.delete_key(key)
                self._store.delete_key(f"{key}/seen")
            return told
        except RuntimeError as error:  # what torch's stores raise, whatever went wrong
            raise CoordinationError(
                f"the job's store cannot be reached: {str(error).splitlines()[0]}", rank=self._rank
            ) from error

    def highest(self, name: str, value: int, timeout_s: float) -> int | None:
        """The highest ``value`` of all ranks, once every one has told its own under ``name``; None if within ``timeout_s``
        they have not, or the store is gone. A name serves once."""
        self._join()
        if self._store is None:
            return value
        try:
            self._store.set(f"{self._prefix}/{name}/{self._rank}", str(value))
            ranks = list(range(self._world))
            self._await(ranks, lambda rank: f"{self._prefix}/{name}/{rank}", time.monotonic() + timeout_s)
            return max(int(self._store.get(f"{self._prefix}/{name}/{rank}")) for rank in ranks)
        except (RuntimeError, DeadlineError):
            return None

    def _await(self, ranks: list[int], key: Callable[[int], str], until_s: float) -> None:
        assert self._store is not None
        pause_s = 0.0005
        for rank in ranks:
            # Asked again and again: a call that blocks would hold up the saves that use the same connection.
            while not self._store.check([key(rank)]):
                if time.monotonic() > until_s:
                    raise DeadlineError(
                        f"rank {rank} has not come to where the others are",
                        rank=rank,
                        advice="Look at its log: it died, hangs, or its loop has other steps.",
                    )
                time.sleep(pause_s)
                pause_s = min(pause_s * 2, 0.02)

    def _join(self) -> None:
        if self._joined:
            return
        self._joined = True
        shared = shared_store(self._deadline_s)
        if shared is not None:
            self._store, self._rank, self._world, self._prefix = shared
