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
                self._written += await self._put(f"{name}/{self.rank}", payload)
            (verdict,) = await self._gather(f"{name}/verdict", [LEADER], f"the verdict of round {name!r}")
            return _opened(verdict)
        payloads = [payload, *await self._gather(name, tellers[1:], f"round {name!r}")]
        try:
            verdict = b"+" + await decide(payloads)
        except Exception as error:
            await self._put(f"{name}/verdict/{LEADER}", b"-" + _packed(error, self.rank))
            raise
        await self._put(f"{name}/verdict/{LEADER}", verdict)
        return verdict[1:]

    async def tell(self, name: str, ranks: Sequence[int], payload: bytes) -> list[bytes]:
        if self.rank != ranks[0]:
            self._written += await self._put(f"{name}/{self.rank}", payload)
            return []
        return [payload, *await self._gather(name, ranks[1:], name)]

    async def among(self, name: str, ranks: Sequence[int], payload: bytes) -> list[bytes]:
        self._written += await self._put(f"{name}/{self.rank}", payload)
        others = [rank for rank in ranks if rank != self.rank]
        told = dict(zip(others, await self._gather(name, others, name), strict=True))
        return [told.get(rank, payload) for rank in ranks]

    async def watch(self, ranks: Sequence[int], what: str) -> NoReturn:
        silence = _Silence(self._silence_s)
        while True:
            if await self._call(self._store.check, [f"{self._prefix}/failed"]):
                await self._raise_failure()
            silence.look({rank: await self._beats(rank) for rank in ranks}, what)
            await asyncio.sleep(self._beat_s)

    async def fail(self, error: BaseException) -> None:
        key = f"{self._prefix}/failed"
        with contextlib.suppress(CoordinationError):
            if not isinstance(error, RankFailedError) and not await self._call(self._store.check, [key]):
                await self._call(self._store.set, key, _packed(error, self.rank))

    async def failure(self) -> CoordinationError | None:
        try:
            if await self._call(self._store.check, [f"{self._prefix}/failed"]):
                await self._raise_failure()
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
            await self._leave()

    async def _beat(self) -> None:
        beats = 0
        while True:
            beats += 1
            with contextlib.suppress(CoordinationError):  # others will see the silence; the rounds raise here
                await self._call(self._store.set, f"{self._prefix}/beat/{self.rank}", str(beats))
            await asyncio.sleep(self._beat_s)

    async def _leave(self) -> None:
        """Remove this rank's keys; the last to leave removes what others may have looked at until then: who found a key a
        moment ago is about to get it, and would wait for one that is gone. Where a rank never leaves, a few keys stay in
        the job's store, and do no harm: no other team has this prefix."""
        with contextlib.suppress(CoordinationError):
            await self._delete(self._written)
            if self._kept:
                await self._call(self._store.set, f"{self._prefix}/kept/{self.rank}", json.dumps(self._kept))
            if await self._call(self._store.add, f"{self._prefix}/left", 1) == self.world:
                await self._delete(await self._remains())

    async def _remains(self) -> list[str]:
        """The keys that are there when all have left."""
        keys = ["left", *(f"beat/{rank}" for rank in range(self.world))]
        for verdict in (f"{name}/verdict/{LEADER}" for name in self._rounds):
            keys += [verdict, *(f"{verdict}/{i}" for i in range(await self._parts(verdict)))]
        if await self._call(self._store.check, [f"{self._prefix}/failed"]):
            keys.append("failed")
            for kept in [f"kept/{rank}" for rank in range(1, self.world)]:
                if await self._call(self._store.check, [f"{self._prefix}/{kept}"]):
                    keys += [kept, *json.loads(await self._call(self._store.get, f"{self._prefix}/{kept}"))]
        return keys

    async def _delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            await self._call(self._store.delete_key, f"{self._prefix}/{key}")

    async def _put(self, key: str, value: bytes) -> list[str]:
        """Store a value of any size; return the keys that it took. The key itself comes last: it says that all is there."""
        parts = [value[i : i + PART_NBYTES] for i in range(0, len(value), PART_NBYTES)] or [b""]
        for i, part in enumerate(parts):
            await self._call(self._store.set, f"{self._prefix}/{key}/{i}", part)
        await self._call(self._store.set, f"{self._prefix}/{key}", str(len(parts)))
        return [key, *(f"{key}/{i}" for i in range(len(parts)))]

    async def _gather(self, name: str, ranks: Sequence[int], what: str) -> list[bytes]:
        """The values that ``ranks`` put under ``name``, in that order."""
        found: dict[int, bytes] = {}
        watch = _Silence(self._silence_s)
        pause_s = 0.001
        while len(found) < len(ranks):
            before = len(found)
            # Asked first: who fails has said before what it had to say, and that goes before its failure.
            failed = await self._call(self._store.check, [f"{self._prefix}/failed"])
            for rank in [r for r in ranks if r not in found]:
                if await self._call(self._store.check, [f"{self._prefix}/{name}/{rank}"]):
                    found[rank] = await self._take(f"{name}/{rank}")
            missing = [r for r in ranks if r not in found]
            if missing:
                if failed:
                    await self._raise_failure()
                watch.look({r: await self._beats(r) for r in missing}, what)
                pause_s = 0.001 if len(found) > before else min(pause_s * 2, 0.05)
                await asyncio.sleep(pause_s)
        return [found[r] for r in ranks]

    async def _parts(self, key: str) -> int:
        whole = f"{self._prefix}/{key}"
        return int(await self._call(self._store.get, whole)) if await self._call(self._store.check, [whole]) else 0

    async def _take(self, key: str) -> bytes:
        parts = await self._parts(key)
        return b"".join([await self._call(self._store.get, f"{self._prefix}/{key}/{i}") for i in range(parts)])

    async def _beats(self, rank: int) -> bytes:
        key = f"{self._prefix}/beat/{rank}"
        return await self._call(self._store.get, key) if await self._call(self._store.check, [key]) else b""

    async def _raise_failure(self) -> None:
        told = json.loads(await self._call(self._store.get, f"{self._prefix}/failed"))
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
