"""Ranks acting together, without a collective: rounds over a key-value store, each with a deadline.

In a *round* every rank states something, the leader (rank 0) decides, and all learn the verdict. A save has two rounds (who
writes what; commit), a load has two (does it fit; did all arrive). Nothing blocks the trainer's process group: keys in the
store of torch.distributed are all that is used, polled, so that no connection is held waiting.

A rank shows that it lives by a heartbeat. Silence longer than the deadline, of whoever is waited for, is an error that
names the rank. A rank that fails says so at once, and every other rank raises at its next look.

Scope: no membership, no election. A job whose leader died is restarted by its launcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from ... import errors
from ...errors import CoordinationError, DeadlineError, HoldfastError, RankFailedError
from ..pipeline.engine import offload

__all__ = ["Decide", "Solo", "StoreLike", "StoreTeam", "Team"]

Decide = Callable[[Sequence[bytes]], Awaitable[bytes]]
LEADER = 0
PART_NBYTES = 4 << 20  # torch's TCPStore refuses values of 8 MiB and more


class Team(ABC):
    """The ranks of one save or load. Used by one task at a time."""

    rank: int
    world: int

    @abstractmethod
    async def round(self, name: str, payload: bytes, decide: Decide, tellers: Sequence[int] | None = None) -> bytes:
        """State ``payload``; return what the leader's ``decide`` made of all ranks' payloads (in order of rank).

        ``tellers``: the ranks that state something, the leader first; None: all of them. The others learn the verdict.
        An error raised by ``decide`` is raised on every rank. Raises DeadlineError and RankFailedError.
        """

    @abstractmethod
    async def tell(self, name: str, ranks: Sequence[int], payload: bytes) -> list[bytes]:
        """State ``payload`` to the first of ``ranks``. That one gets what each has stated, in order, the others nothing.
        All of them call this alike. Raises DeadlineError and RankFailedError."""

    @abstractmethod
    async def among(self, name: str, ranks: Sequence[int], payload: bytes) -> list[bytes]:
        """State ``payload``; return what each of ``ranks``, this one among them, has stated. All of them call this alike.
        Nobody decides, and no other rank hears of it. Raises DeadlineError and RankFailedError."""

    @abstractmethod
    async def watch(self, ranks: Sequence[int], what: str) -> NoReturn:
        """Look after ``ranks`` that ``what`` is awaited from. Raises RankFailedError when any rank of the team tells that it
        failed, DeadlineError when one of these falls silent. Ends in no other way."""

    @abstractmethod
    async def fail(self, error: BaseException) -> None:
        """Tell the others that this rank gives up. Does not raise: the error at hand is the one to be seen."""

    @abstractmethod
    async def failure(self) -> CoordinationError | None:
        """What another rank has told of its failure, if any has."""

    @abstractmethod
    def session(self) -> contextlib.AbstractAsyncContextManager[None]:
        """The time in which rounds are held."""


class Solo(Team):
    """A team of one."""

    rank = 0
    world = 1

    async def round(self, name: str, payload: bytes, decide: Decide, tellers: Sequence[int] | None = None) -> bytes:
        return await decide([payload])

    async def tell(self, name: str, ranks: Sequence[int], payload: bytes) -> list[bytes]:
        return [payload]

    async def among(self, name: str, ranks: Sequence[int], payload: bytes) -> list[bytes]:
        return [payload]

    async def watch(self, ranks: Sequence[int], what: str) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError  # nobody sets it

    async def fail(self, error: BaseException) -> None:
        return None

    async def failure(self) -> CoordinationError | None:
        return None

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        yield


class StoreLike(Protocol):
    """What is used of a torch.distributed Store."""

    def set(self, key: str, value: bytes | str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def delete_key(self, key: str, /) -> bool: ...


class StoreTeam(Team):
    """Rounds over a store. ``prefix`` is the same on all ranks, and used by no other team.

    ``silence_s`` is how long another rank may show no sign of life while it is waited for.
    """

    def __init__(self, store: StoreLike, rank: int, world: int, prefix: str, silence_s: float) -> None:
        self.rank = rank
        self.world = world
        self._store = store
        self._prefix = prefix
        self._silence_s = silence_s
        self._beat_s = max(0.02, min(5.0, silence_s / 5))
        self._written: list[str] = []  # of this rank, for the leader alone
        self._kept: list[str] = []
        self._rounds: list[str] = []

    async def round(self, name: str, payload: bytes, decide: Decide, tellers: Sequence[int] | None = None) -> bytes:
        self._rounds.append(name)
        tellers = range(self.world) if tellers is None else tellers
        if self.rank != LEADER:
            if self.rank in tellers:
                self._written += await self._call(self._put, f"{name}/{self.rank}", payload)
            (verdict,) = await self._gather(f"{name}/verdict", [LEADER], f"the verdict of round {name!r}")
            return _opened(verdict)
        payloads = [payload, *await self._gather(name, tellers[1:], f"round {name!r}")]
        try:
            verdict = b"+" + await decide(payloads)
        except Exception as error:
            await self._call(self._put, f"{name}/verdict/{LEADER}", b"-" + _packed(error, self.rank))
            raise
        await self._call(self._put, f"{name}/verdict/{LEADER}", verdict)
        return verdict[1:]

    async def tell(self, name: str, ranks: Sequence[int], payload: bytes) -> list[bytes]:
        if self.rank != ranks[0]:
            self._written += await self._call(self._put, f"{name}/{self.rank}", payload)
            return []
        return [payload, *await self._gather(name, ranks[1:], name)]

    async def among(self, name: str, ranks: Sequence[int], payload: bytes) -> list[bytes]:
        self._written += await self._call(self._put, f"{name}/{self.rank}", payload)
        others = [rank for rank in ranks if rank != self.rank]
        told = dict(zip(others, await self._gather(name, others, name), strict=True))
        return [told.get(rank, payload) for rank in ranks]

    async def watch(self, ranks: Sequence[int], what: str) -> NoReturn:
        silence = _Silence(self._silence_s)
        while True:
            seen = await self._call(self._look, None, ranks)
            self._raise_failure(seen.failure)
            silence.look(seen.beats, what)
            await asyncio.sleep(self._beat_s)

    async def fail(self, error: BaseException) -> None:
        with contextlib.suppress(CoordinationError):
            if not isinstance(error, RankFailedError) and await self._call(self._value, "failed") is None:
                await self._call(self._set, "failed", _packed(error, self.rank))

    async def failure(self) -> CoordinationError | None:
        try:
            self._raise_failure(await self._call(self._value, "failed"))
        except CoordinationError as told:
            return told
        return None

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        beating = asyncio.ensure_future(self._beat())
        try:
            yield
        except BaseException:
            # The leader may be about to take what this rank has said: the last to leave removes it.
            self._kept, self._written = self._written, []
            raise
        finally:
            beating.cancel()
            await asyncio.wait([beating])
            with contextlib.suppress(CoordinationError):
                await self._call(self._leave)

    async def _beat(self) -> None:
        beats = 0
        while True:
            beats += 1
            with contextlib.suppress(CoordinationError):  # others will see the silence; the rounds raise here
                await self._call(self._set, f"beat/{self.rank}", str(beats))
            await asyncio.sleep(self._beat_s)

    def _leave(self) -> None:
        """Remove this rank's keys; the last to leave removes what others may have looked at until then: who found a key a
        moment ago is about to get it, and would wait for one that is gone. Where a rank never leaves, a few keys stay in
        the job's store, and do no harm: no other team has this prefix."""
        self._delete(self._written)
        if self._kept:
            self._set(f"kept/{self.rank}", json.dumps(self._kept))
        if self._store.add(f"{self._prefix}/left", 1) == self.world:
            self._delete(self._remains())

    def _remains(self) -> list[str]:
        """The keys that are there when all have left."""
        keys = ["left", *(f"beat/{rank}" for rank in range(self.world))]
        for verdict in (f"{name}/verdict/{LEADER}" for name in self._rounds):
            keys += [verdict, *(f"{verdict}/{i}" for i in range(int(self._value(verdict) or 0)))]
        if self._value("failed") is not None:
            keys.append("failed")
            for kept in [f"kept/{rank}" for rank in range(1, self.world)]:
                if (told := self._value(kept)) is not None:
                    keys += [kept, *json.loads(told)]
        return keys

    async def _gather(self, name: str, ranks: Sequence[int], what: str) -> list[bytes]:
        """The values that ``ranks`` put under ``name``, in that order."""
        found: dict[int, bytes] = {}
        silence = _Silence(self._silence_s)
        pause_s = 0.001
        while missing := [rank for rank in ranks if rank not in found]:
            seen = await self._call(self._look, name, missing)
            found |= seen.told
            if len(found) < len(ranks):
                self._raise_failure(seen.failure)
                silence.look(seen.beats, what)
                pause_s = 0.001 if seen.told else min(pause_s * 1.5, 0.05)
                await asyncio.sleep(pause_s)
        return [found[rank] for rank in ranks]

    # What follows asks the store, and waits for its answers: it is run in a thread, as much of it at a time as can be.

    def _look(self, name: str | None, ranks: Sequence[int]) -> _Seen:
        """What some ranks have told under ``name``, and how the others do."""
        # Asked first: who fails has said before what it had to say, and that goes before its failure.
        failure = self._value("failed")
        told = {} if name is None else {rank: self._told(f"{name}/{rank}") for rank in ranks}
        there = {rank: value for rank, value in told.items() if value is not None}
        beats = {rank: self._value(f"beat/{rank}") or b"" for rank in ranks if rank not in there}
        return _Seen(failure, there, beats)

    def _put(self, key: str, value: bytes) -> list[str]:
        """Store a value of any size; return the keys that it took. The key itself comes last: it says that all is there."""
        parts = [value[i : i + PART_NBYTES] for i in range(0, len(value), PART_NBYTES)] or [b""]
        for i, part in enumerate(parts):
            self._set(f"{key}/{i}", part)
        self._set(key, str(len(parts)))
        return [key, *(f"{key}/{i}" for i in range(len(parts)))]

    def _told(self, key: str) -> bytes | None:
        """What was :meth:`_put` there; None where it was not, yet."""
        if (parts := self._value(key)) is None:
            return None
        return b"".join(self._store.get(f"{self._prefix}/{key}/{i}") for i in range(int(parts)))

    def _value(self, key: str) -> bytes | None:
        whole = f"{self._prefix}/{key}"
        return self._store.get(whole) if self._store.check([whole]) else None

    def _set(self, key: str, value: bytes | str) -> None:
        self._store.set(f"{self._prefix}/{key}", value)

    def _delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._store.delete_key(f"{self._prefix}/{key}")

    @staticmethod
    def _raise_failure(failure: bytes | None) -> None:
        if failure is None:
            return
        told = json.loads(failure)
        if told["type"] == DeadlineError.__name__:
            raise DeadlineError(told["message"], rank=told["rank"], advice=told["advice"])
        raise RankFailedError(f"rank {told['teller']} failed: {told['message']}", rank=told["teller"])

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return await offload(function, *args)
        except RuntimeError as error:  # what torch's stores raise, whatever went wrong
            raise CoordinationError(
                f"the job's store cannot be reached: {str(error).splitlines()[0]}",
                rank=self.rank,
                advice="The process that serves it (the launcher, or rank 0) has probably died.",
            ) from error


@dataclass(frozen=True, slots=True)
class _Seen:
    """At one look at the store: the failure of a rank, if there is one; what ranks have told; heartbeats of the others."""

    failure: bytes | None
    told: dict[int, bytes]
    beats: dict[int, bytes]


class _Silence:
    """Since when has each rank shown no new heartbeat?"""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._last: dict[int, tuple[bytes, float]] = {}

    def look(self, beats: dict[int, bytes], what: str) -> None:
        now = asyncio.get_running_loop().time()
        for rank, beat in beats.items():
            if rank not in self._last or self._last[rank][0] != beat:
                self._last[rank] = (beat, now)
        silent = [rank for rank in beats if now - self._last[rank][1] > self._silence_s]
        if silent:
            names = ", ".join(map(str, silent[:10])) + (f" and {len(silent) - 10} more" if len(silent) > 10 else "")
            raise DeadlineError(
                f"rank {names} showed no sign of life for {self._silence_s:g} s, waiting for {what}",
                rank=silent[0],
                advice="Look at that rank's log; it died, hangs, or never called the same function.",
            )


def _packed(error: BaseException, rank: int) -> bytes:
    told: dict[str, Any] = {"teller": rank, "rank": None, "type": type(error).__name__}
    told["message"] = f"{type(error).__name__}: {error}"[:10_000]
    if isinstance(error, HoldfastError):
        told |= {name: getattr(error, name) for name in ("rank", "uri", "key", "advice")}
        told |= {"message": error.message[:10_000], "differences": list(getattr(error, "differences", ()))}
    return json.dumps(told).encode()


def _opened(verdict: bytes) -> bytes:
    if verdict[:1] == b"+":
        return verdict[1:]
    told = json.loads(verdict[1:])
    kind = getattr(errors, told["type"], None)
    if kind is None:
        raise RankFailedError(f"rank {told['teller']} failed: {told['message']}", rank=told["teller"])
    where = {name: told.get(name) for name in ("rank", "uri", "key", "advice")}
    if issubclass(kind, errors.MismatchError):
        where["differences"] = tuple(told["differences"])
    raise kind(told["message"], **where)
