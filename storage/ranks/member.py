"""One process as a rank of its job, for the lifetime of its process group.

The *generation* of a job is the nonce of its leader's process. All keys of calls are below it, so
keys that an earlier job left in the same store are never read. A rank accepts a leader only after
that leader has acknowledged the rank's own nonce. The leader acknowledges the nonce in a rank's
status record until the record says that the rank has found this leader. A restarted process has a
new nonce, so an acknowledgement of its predecessor does not count.

    lead                the leader's nonce
    known/<block>       the nonces that it has acknowledged, of 256 ranks each
    status/<rank>       the status record of a rank: see ``calls.RankStatus``
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import TypeVar, TypeVarTuple
from weakref import WeakValueDictionary

from ...core.forks.renewal import new_lock
from ...errors import CoordinationError
from ..runtime.engine import offload
from .calls import Call, CallHistory, FailedCall, RankStatus, Settled, logged
from .failures import Failure
from .hosts import host_key
from .keys import Keys
from .messages import LEADER
from .watch import Participation, Watch

BLOCK = 256
FAILURES_KEPT = 8
NAMES_KEPT = 32
ACKNOWLEDGE_PAUSE_S = 0.25

T = TypeVar("T")
V = TypeVar("V")
Ts = TypeVarTuple("Ts")


Spawned = asyncio.Future[None] | Future[None]
Spawn = Callable[[Coroutine[object, object, None]], Spawned]


class Member:
    """One process in its job. ``keys``: the keys of all ranks of the job. ``spawn`` runs work that
    continues after a call has returned. Coroutines run on one event loop at a time. ``failed`` and
    methods documented to block may be called from any thread."""

    def __init__(
        self,
        keys: Keys,
        rank: int,
        world: int,
        spawn: Spawn = asyncio.ensure_future,
        anchor: Callable[[], object] = lambda: None,
        job_host: str = "",
    ) -> None:
        """Create the member, unknown to the others yet. ``anchor()`` keeps the store's server alive
        if this process runs it. ``job_host``: the host that serves the store."""
        self.rank = rank
        self.world = world
        self.host = host_key()
        self.job_host = job_host
        self.anchor = anchor
        self.nonce = secrets.token_hex(8)
        self.leader = self.nonce if rank == LEADER else ""
        """The nonce of the leader; empty until found."""
        self.joined = [0] * world if rank == LEADER else []
        """The highest call number that the leader has taken from each rank."""
        self.store_lost = False
        """True if the store was unreachable at the last access by a call."""
        self._keys = keys
        self._spawn = spawn
        self._spawned: set[Spawned] = set()
        self._open: list[Participation] = []
        self._failed: deque[FailedCall] = deque(maxlen=FAILURES_KEPT)
        self.logs: OrderedDict[str, list[int]] = OrderedDict()
        """Failures of this rank, by name of the call; see ``calls.Log``."""
        self._settled: OrderedDict[str, Settled] = OrderedDict()
        self._heartbeats = 0
        self._heartbeat_s: dict[int, float] = {}
        self._number = 0
        self._number_lock = new_lock()
        self._publishing = asyncio.Lock()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By name of a call: held by one at a time, and gone when nobody waits for it any more."""
        self._heartbeat_task: asyncio.Task[None] | None = None
        self._acknowledging = False
        self._acknowledge_until_s = 0.0
        self._meanings: dict[str, str] = {}
        self.all_found = False
        """True once all ranks have found the leader; set on the leader only."""
        self._shown_lead = False
        self._history: OrderedDict[str, CallHistory] = OrderedDict()

    async def call_store(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run ``function`` in a thread. Raises CoordinationError if the store is unreachable."""
        try:
            return await offload(function, *args)
        except RuntimeError as error:  # torch's stores raise this for every kind of failure
            self.store_lost = True
            raise CoordinationError(
                f"the job's store cannot be reached: {str(error).splitlines()[0]}",
                rank=self.rank,
                advice="The process that serves it (the launcher, or rank 0) has probably died.",
            ) from error

    # These methods block: call them in a thread, or where the caller may wait.

    @property
    def keys(self) -> Keys:
        """The keys of this generation. Only valid once the leader is found."""
        assert self.leader
        return self._keys.below(self.leader)

    def status(self, rank: int) -> RankStatus | None:
        """Return the status record of a rank. Blocks."""
        data = self._keys.value(f"status/{rank}")
        return None if data is None else RankStatus.decode(data, rank)

    def statuses(self, ranks: Iterable[int]) -> dict[int, RankStatus | None]:
        """Return the status records of ``ranks``. Blocks."""
        return {rank: self.status(rank) for rank in ranks}

    def find_leader(self) -> bool:
        """Return whether a leader is found that has acknowledged this process. Blocks."""
        if self.leader:
            return True
        lead = self._keys.value("lead")
        if lead is None:
            return False
        known = self._keys.value(f"{lead.decode()}/known/{self.rank // BLOCK}")
        if known is None or json.loads(known)[self.rank % BLOCK] != self.nonce:
            return False
        self.leader = lead.decode()
        return True

    def publish(self, now_s: float) -> None:
        """Publish the status record of this rank. Blocks."""
        self._heartbeats += 1
        calls = tuple(participation.open_call(now_s) for participation in list(self._open))
        logs = {name: tuple(log) for name, log in self.logs.items()}
        status = RankStatus(
            self.nonce,
            self.leader,
            self._heartbeats,
            calls,
            tuple(self._failed),
            logs,
            dict(self._settled),
        )
        self._keys.set(f"status/{self.rank}", status.encode())

    def failed(self, call: Call, number: int | None, failure: Failure) -> None:
        """Record a failure of this rank in ``call``; the next :meth:`publish` shows it."""
        if number is None:
            number = self.next_number()
        self._failed.append(
            FailedCall(call.name, number, str(call), call.thread, failure.shortened())
        )
        self.log_failure(call.name, number, failure.timed_out)

    def log_failure(self, name: str, number: int, waited: bool) -> list[str]:
        """Log a failure in call ``number`` of a name. Return the names evicted from the log."""
        self.logs[name] = logged(self.logs.get(name, []), number, waited)
        self.logs.move_to_end(name)
        return _trim(self.logs, FAILURES_KEPT)

    def log(self, name: str) -> list[int]:
        """Return the failures of this rank in calls of this name."""
        return self.logs.get(name, [])

    def next_number(self) -> int:
        """Return a new number for a call of this rank."""
        with self._number_lock:
            self._number += 1
            return self._number

    def settled(self, name: str) -> Settled:
        """Return the failures in calls of this name that this rank knows to be settled."""
        return self._settled.get(name, Settled())

    def settle(self, name: str, settled: Settled) -> None:
        """Record failures in calls of this name as settled with the leader."""
        self._settled[name] = settled
        self._settled.move_to_end(name)
        _trim(self._settled, NAMES_KEPT)

    # For the leader.

    def history(self, name: str) -> CallHistory:
        """Return the leader's history of calls of this name."""
        found = self._history.setdefault(name, CallHistory([0] * self.world))
        self._history.move_to_end(name)
        for old in list(self._history)[:-NAMES_KEPT]:
            if old not in self.logs:
                del self._history[old]
        return found

    def all_met(self, name: str) -> None:
        """Record that all ranks met in a call of this name, which settles all earlier failures."""
        self.logs.pop(name, None)
        self.history(name).settled.clear()

    @property
    def open_names(self) -> set[str]:
        """The names of the calls that this rank is in."""
        return {participation.name for participation in self._open}

    def spawn(self, coroutine: Coroutine[object, object, None]) -> None:
        """Run a coroutine in the background, beyond the end of the call."""
        task = self._spawn(coroutine)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)

    def announce(self, for_s: float) -> None:
        """Publish this process to the others, outside any call, for ``for_s`` seconds."""
        self.spawn(self.acknowledge_ranks(for_s) if self.rank == LEADER else self.publish_status())

    def is_same_run(self, theirs: str, ours: str) -> bool:
        """Return whether the leader's loop ``theirs`` is ``ours``; a new one is bound to it."""
        return bool(theirs) and self._meanings.setdefault(theirs, ours) == ours

    async def acknowledge_ranks(self, for_s: float) -> None:
        """On the leader, acknowledge ranks until all have found it, or in time."""
        if self.all_found or self.rank != LEADER:
            return
        self._acknowledge_until_s = max(
            self._acknowledge_until_s, asyncio.get_running_loop().time() + for_s
        )
        if self._acknowledging:
            return
        self._acknowledging = True
        try:
            # If the store is gone, the calls waiting for the ranks will raise.
            with contextlib.suppress(RuntimeError):
                await self._acknowledge_all()
        finally:
            self._acknowledging = False

    async def _acknowledge_all(self) -> None:
        loop = asyncio.get_running_loop()
        async with self._publishing:
            await offload(self._claim_leadership, loop.time())
        missing = set(range(1, self.world))
        known: dict[int, str] = {}
        pause_s = 0.001
        while missing and (self._open or loop.time() < self._acknowledge_until_s):
            if await offload(self._acknowledge_new, missing, known):
                pause_s = 0.001
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, ACKNOWLEDGE_PAUSE_S)
        self.all_found = not missing

    def _claim_leadership(self, now_s: float) -> None:
        """Let ranks find this leader, whose status is already published."""
        self.publish(now_s)
        self._keys.set("lead", self.nonce)

    def _acknowledge_new(self, missing: set[int], known: dict[int, str]) -> bool:
        """Acknowledge new nonces; return whether there are any, and trim ``missing``."""
        new = set[int]()
        for rank in sorted(missing):
            status = self.status(rank)
            if status is None:
                continue
            if status.leader == self.nonce:
                missing.discard(rank)
            elif known.get(rank) != status.nonce:
                known[rank] = status.nonce
                new.add(rank // BLOCK)
        for block in new:
            ranks = range(block * BLOCK, min(self.world, (block + 1) * BLOCK))
            self._keys.set(
                f"{self.nonce}/known/{block}", json.dumps([known.get(rank, "") for rank in ranks])
            )
        return bool(new)

    # For the event loop.

    @contextlib.asynccontextmanager
    async def participating(self, call: Call, heartbeat_s: float) -> AsyncIterator[Participation]:
        """Enter ``call`` with heartbeats, once another of the same name has ended."""
        turn = self._turns.setdefault(call.name, asyncio.Lock())
        async with turn, self._entered(call, heartbeat_s) as participation:
            yield participation

    @contextlib.asynccontextmanager
    async def _entered(self, call: Call, heartbeat_s: float) -> AsyncIterator[Participation]:
        now_s = asyncio.get_running_loop().time()
        number = self.next_number()
        participation = Participation(call.name, str(call), call.thread, number, now_s)
        self._open.append(participation)
        self._heartbeat_s[participation.number] = heartbeat_s
        if self._heartbeat_task is not None:
            self._heartbeat_task.cancel()  # its interval may be too long for this call
        self._heartbeat_task = asyncio.ensure_future(self._send_heartbeats())
        if self.rank == LEADER:
            self.spawn(self.acknowledge_ranks(0.0))
        try:
            yield participation
        finally:
            self._open.remove(participation)
            del self._heartbeat_s[participation.number]
            if not self._open and self._heartbeat_task is not None:
                self._heartbeat_task.cancel()
                await asyncio.wait([self._heartbeat_task])
                self._heartbeat_task = None
                await self.publish_status()

    async def _send_heartbeats(self) -> None:
        while True:
            await self.publish_status()
            await asyncio.sleep(min(self._heartbeat_s.values()))

    async def publish_status(self) -> None:
        """Publish the status record. Errors of the store are left to calls that wait."""
        async with self._publishing:
            with contextlib.suppress(RuntimeError):
                await offload(self.publish, asyncio.get_running_loop().time())

    def progress_of_others(self, but: Participation) -> int:
        """Return the progress of all other calls of this process, as a growing number."""
        return sum(
            participation.progress for participation in list(self._open) if participation is not but
        )

    async def try_to_find_leader(self, for_s: float) -> None:
        """Look for the leader for ``for_s`` seconds: it ignores ranks that have not found it."""
        with contextlib.suppress(CoordinationError):  # DeadlineError included
            await self.wait_for_leader(for_s, "the leader")

    async def wait_for_leader(self, silence_s: float, what: str) -> None:
        """Wait until the leader is found. Raises DeadlineError, CoordinationError."""
        loop = asyncio.get_running_loop()
        watch = Watch(self.rank, "", "", silence_s)
        pause_s = 0.001
        while not await self.call_store(self.find_leader):
            watch.look({LEADER: None}, what, loop.time())
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.05)
        if not self._shown_lead:
            self._shown_lead = True
            await self.publish_status()


def _trim(kept: OrderedDict[str, V], most: int) -> list[str]:
    dropped = []
    while len(kept) > most:
        dropped.append(kept.popitem(last=False)[0])
    return dropped
