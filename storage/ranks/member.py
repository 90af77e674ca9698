"""One process as a rank of its job, for as long as its process group lives.

The *generation* of a job is the nonce of its leader's process. Keys of all calls lie below it, so
nothing that a former job has left in the same store is ever read. A rank accepts a leader only
after that leader has acknowledged the rank's own nonce; the leader acknowledges whatever nonce a
rank's status record has, until the record says that its rank has found this leader. A process that
was restarted has a new nonce, so what was acknowledged to its predecessor is not for it.

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

from ...core.forks.renewal import new_lock
from ...errors import CoordinationError
from ..runtime.engine import offload
from .calls import Call, FailedCall, RankStatus
from .failures import Failure
from .hosts import host_key
from .keys import Keys
from .pairing import CallHistory, Settled, logged
from .watch import Participation, Watch

__all__ = ["LEADER", "Member"]

LEADER = 0
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
    """``keys`` are those of all ranks of the job; ``spawn`` runs what goes on after a call has
    returned.

    Its coroutines run on one event loop at a time. ``fail`` and what is said to block may be called
    from any thread.
    """

    def __init__(
        self,
        keys: Keys,
        rank: int,
        world: int,
        spawn: Spawn = asyncio.ensure_future,
        anchor: Callable[[], object] = lambda: None,
        job_host: str = "",
    ) -> None:
        """``anchor()`` keeps alive what serves the store, if that is this process; ``job_host``:
        the host that serves it."""
        self.rank = rank
        self.world = world
        self.host = host_key()
        self.job_host = job_host
        self.anchor = anchor
        self.nonce = secrets.token_hex(8)
        if rank == LEADER:
            self.leader = self.nonce
        else:
            self.leader = ""
        """The nonce of the leader; empty until it is found."""
        if rank == LEADER:
            self.joined = [0] * world
        else:
            self.joined = []
        """On the leader: the highest number that each rank has taken part with."""
        self.store_lost = False
        """Whether the store could not be reached, the last time it was asked by a call."""
        self._keys = keys
        self._spawn = spawn
        self._spawned: set[Spawned] = set()
        self._open: list[Participation] = []
        self._failed: deque[FailedCall] = deque(maxlen=FAILURES_KEPT)
        self.logs: OrderedDict[str, list[int]] = OrderedDict()
        """By name of a call: the failures of this rank, see ``pairing.Log``."""
        self._settled: OrderedDict[str, Settled] = OrderedDict()
        self._heartbeats = 0
        self._heartbeat_s: dict[int, float] = {}
        self._number = 0
        self._number_lock = new_lock()
        self._publishing = asyncio.Lock()
        self._turns: dict[str, list[asyncio.Future[None]]] = {}
        self._heartbeat_task: asyncio.Task[None] | None = None
        self._acknowledging = False
        self._acknowledge_until_s = 0.0
        self._meanings: dict[str, str] = {}
        self.all_found = False
        """On the leader: whether all ranks have found it."""
        self._shown_lead = False
        self._history: OrderedDict[str, CallHistory] = OrderedDict()

    async def call_store(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """What ``function`` returns, run in a thread. Raises CoordinationError where the store
        cannot be reached."""
        try:
            return await offload(function, *args)
        except RuntimeError as error:  # what torch's stores raise, whatever went wrong
            self.store_lost = True
            raise CoordinationError(
                f"the job's store cannot be reached: {str(error).splitlines()[0]}",
                rank=self.rank,
                advice="The process that serves it (the launcher, or rank 0) has probably died.",
            ) from error

    # These methods block: they run in a thread, or where the caller may wait.

    @property
    def keys(self) -> Keys:
        """The keys of this generation. To be used only when the leader is found."""
        assert self.leader
        return self._keys.below(self.leader)

    def status(self, rank: int) -> RankStatus | None:
        """What another rank shows. Blocks."""
        data = self._keys.value(f"status/{rank}")
        if data is None:
            return None
        return RankStatus.decode(data, rank)

    def statuses(self, ranks: Iterable[int]) -> dict[int, RankStatus | None]:
        """What they show. Blocks."""
        return {rank: self.status(rank) for rank in ranks}

    def find_leader(self) -> bool:
        """Whether the leader is found, which has acknowledged this process. Blocks."""
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
        """Show what this rank is in. Blocks."""
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
        """Note that this rank has failed in ``call``, for the next :meth:`publish` to show."""
        if number is None:
            number = self.next_number()
        self._failed.append(
            FailedCall(call.name, number, str(call), call.thread, failure.shortened())
        )
        self.log_failure(call.name, number, failure.timed_out)

    def log_failure(self, name: str, number: int, waited: bool) -> list[str]:
        """This rank has failed in its call ``number`` of that name. Return the names that are
        forgotten now."""
        self.logs[name] = logged(self.logs.get(name, []), number, waited)
        self.logs.move_to_end(name)
        return _trim(self.logs, FAILURES_KEPT)

    def log(self, name: str) -> list[int]:
        """The failures of this rank in calls of that name."""
        return self.logs.get(name, [])

    def next_number(self) -> int:
        """Of a call of this rank."""
        with self._number_lock:
            self._number += 1
            return self._number

    def settled(self, name: str) -> Settled:
        """What is settled with the leader in calls of that name, as far as this rank has seen."""
        return self._settled.get(name, Settled())

    def settle(self, name: str, settled: Settled) -> None:
        """All up to there is settled with the leader."""
        self._settled[name] = settled
        self._settled.move_to_end(name)
        _trim(self._settled, NAMES_KEPT)

    # On the leader.

    def history(self, name: str) -> CallHistory:
        """What this leader has seen of the calls of that name."""
        found = self._history.setdefault(name, CallHistory([0] * self.world))
        self._history.move_to_end(name)
        for old in list(self._history)[:-NAMES_KEPT]:
            if old not in self.logs:
                del self._history[old]
        return found

    def all_met(self, name: str) -> None:
        """All ranks have come to a call of that name, which settles all failures before it."""
        self.logs.pop(name, None)
        self.history(name).settled.clear()

    @property
    def open_names(self) -> set[str]:
        """Of the calls that this rank is in."""
        return {participation.name for participation in self._open}

    def spawn(self, coroutine: Coroutine[object, object, None]) -> None:
        """Run it after the call has returned."""
        task = self._spawn(coroutine)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)

    def announce(self, for_s: float) -> None:
        """Show this process to the others, apart from any call; the leader acknowledges them for so
        many seconds. Does not wait. Thread-safe."""
        self.spawn(self.acknowledge_ranks(for_s) if self.rank == LEADER else self.publish_status())

    def is_same_run(self, theirs: str, ours: str) -> bool:
        """Whether ``theirs``, a name that the leader gave, means what this rank calls ``ours``:
        that is settled at the first sight of it, and each has one meaning."""
        return bool(theirs) and self._meanings.setdefault(theirs, ours) == ours

    async def acknowledge_ranks(self, for_s: float) -> None:
        """On the leader: acknowledge ranks, as long as it is in a call, or for so many seconds,
        until all have found it."""
        if self.all_found or self.rank != LEADER:
            return
        self._acknowledge_until_s = max(
            self._acknowledge_until_s, asyncio.get_running_loop().time() + for_s
        )
        if self._acknowledging:
            return
        self._acknowledging = True
        try:
            # Calls that wait for the ranks will see that the store is gone.
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
        """Let ranks find this leader. They read its status record next, so that one is published
        first: it must not be that of a predecessor."""
        self.publish(now_s)
        self._keys.set("lead", self.nonce)

    def _acknowledge_new(self, missing: set[int], known: dict[int, str]) -> bool:
        """Acknowledge what statuses show. Take from ``missing`` the ranks that have found this
        leader. Whether any is new."""
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

    # On the event loop.

    @contextlib.asynccontextmanager
    async def participating(self, call: Call, heartbeat_s: float) -> AsyncIterator[Participation]:
        """Show that this rank is in ``call``, and beat. A second call of the same name waits for
        the first to end."""
        loop = asyncio.get_running_loop()
        await self._take_turn(call.name)
        participation = Participation(
            call.name, str(call), call.thread, self.next_number(), loop.time()
        )
        self._open.append(participation)
        self._heartbeat_s[participation.number] = heartbeat_s
        if self._heartbeat_task is not None:
            self._heartbeat_task.cancel()  # it may sleep for longer than this call allows
        self._heartbeat_task = asyncio.ensure_future(self._send_heartbeats())
        if self.rank == LEADER:
            self.spawn(self.acknowledge_ranks(0.0))
        try:
            yield participation
        finally:
            self._open.remove(participation)
            del self._heartbeat_s[participation.number]
            self._give_turn(call.name)
            if not self._open and self._heartbeat_task is not None:
                self._heartbeat_task.cancel()
                await asyncio.wait([self._heartbeat_task])
                self._heartbeat_task = None
                await self.publish_status()

    async def _take_turn(self, name: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        queue = self._turns.setdefault(name, [])
        queue.append(turn)
        if queue[0] is not turn:
            try:
                await turn
            except BaseException:
                self._drop_turn(name, turn)
                raise

    def _give_turn(self, name: str) -> None:
        self._drop_turn(name, self._turns[name][0])

    def _drop_turn(self, name: str, turn: asyncio.Future[None]) -> None:
        queue = self._turns[name]
        first = queue[0] is turn
        queue.remove(turn)
        if not queue:
            del self._turns[name]
        elif first and not queue[0].done():
            queue[0].set_result(None)

    async def _send_heartbeats(self) -> None:
        while True:
            await self.publish_status()
            await asyncio.sleep(min(self._heartbeat_s.values()))

    async def publish_status(self) -> None:
        """Call :meth:`publish`, and ignore what the store raises: the calls that wait for an answer
        will raise it."""
        async with self._publishing:
            with contextlib.suppress(RuntimeError):
                await offload(self.publish, asyncio.get_running_loop().time())

    def progress_of_others(self, but: Participation) -> int:
        """Grows with everything that moves in other calls of this process."""
        return sum(
            participation.progress for participation in list(self._open) if participation is not but
        )

    async def try_to_find_leader(self, for_s: float) -> None:
        """Look for the leader for so many seconds: it heeds what ranks show that have found it."""
        with contextlib.suppress(CoordinationError):  # a deadline, too
            await self.wait_for_leader(for_s, "the leader")

    async def wait_for_leader(self, silence_s: float, what: str) -> None:
        """Return when the leader is found. Raises DeadlineError, and what the store raises."""
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
    """Drop the oldest beyond ``most``; return their names."""
    dropped = []
    while len(kept) > most:
        dropped.append(kept.popitem(last=False)[0])
    return dropped
