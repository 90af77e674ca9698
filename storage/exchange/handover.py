"""Hands units from the rank that reads them to the ranks that want them.

The sender offers each unit once it is verified, and retains it until all takers have confirmed it.
The receiver copies units from shared memory, or receives them over a network and checks their
digests.
"""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ...core.spans import Where, counting, span
from ...errors import CoordinationError
from ...planner.loading import LoadPlan
from ...planner.sharing import Sharing
from ..pipeline.image_reader import Deliver
from ..runtime.buffers import HostBuffer, HostPool
from ..runtime.engine import offload
from .connection import Connection
from .group import HANDOVER, NO_DIGEST, RECEIPT, ExchangeGroup, naming_member, serve_in_thread
from .shared_memory import Arena


@dataclass(eq=False)
class _Side:
    """One end of a handover.

    A job is an index into the reads of ``plan``; each job reads one unit. ``units``: by job, the
    index of its unit in ``sharing``. ``connections``: by member.
    """

    _group: ExchangeGroup
    _sharing: Sharing
    _plan: LoadPlan
    _units: Sequence[int]
    connections: dict[int, Connection] = field(default_factory=dict, init=False)

    def _by_path(self) -> tuple[dict[int, Connection], dict[int, Connection]]:
        """Return the connections to members of this host, and those to other hosts."""
        local: dict[int, Connection] = {}
        remote: dict[int, Connection] = {}
        for member, connection in self.connections.items():
            (remote if connection.over_network else local)[member] = connection
        return local, remote

    def close(self) -> None:
        """Close the connections, which tells the members that this rank has left."""
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()


@dataclass
class _Pending:
    """A unit that other members want.

    ``members``: those that have yet to confirm it. ``local``: those on this host, which read it
    from the arena. ``start``: its offset there; None while the arena has no room. ``confirmed``:
    done when all members have confirmed it.
    """

    members: set[int]
    local: list[int]
    confirmed: asyncio.Future[None]
    start: int | None = None


@dataclass(eq=False)
class Sender(_Side):
    """Sends the units of ``jobs``, which this rank reads, by way of the arena on this host."""

    _jobs: Sequence[int]
    _arena: Arena

    def __post_init__(self) -> None:
        units = [self._units[job] for job in self._jobs]
        self.owed = Counter(member for unit in units for member, *_ in self._sharing.takers(unit))
        """Number of units that each member has yet to confirm."""
        self._pending: dict[int, _Pending] = {}  # by unit
        self._slot_freed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def start(self, tasks: asyncio.TaskGroup, threads: ThreadPoolExecutor) -> None:
        """Start to receive the confirmations of all members. Set ``connections`` first."""
        local, remote = self._by_path()
        tasks.create_task(serve_in_thread(self._group, threads, local, self._confirmed_locally))
        for member, connection in remote.items():
            tasks.create_task(self._receive_confirmations(member, connection))

    def offer(self, job: int, buffer: HostBuffer) -> None:
        """Publish the unit of ``job``, read into ``buffer``, to the members of this host that want
        it, if the arena has room now. Never blocks for room.

        Called in the thread that has verified it, before this rank copies it for itself, so that no
        member waits longer than necessary.
        """
        unit = self._units[job]
        members = {member for member, *_ in self._sharing.takers(unit)}
        if not members:
            return
        local = [m for m in sorted(members) if not self.connections[m].over_network]
        self._pending[unit] = _Pending(members, local, self._loop.create_future())
        if not local:
            return
        start = self._arena.take()
        if start is not None:
            self._publish(job, buffer, start)

    async def hand_over(self, job: int, buffer: HostBuffer) -> None:
        """Send the unit of ``job``, read into ``buffer``, to the members that :meth:`offer` has not
        sent it to. Returns when all have confirmed it; the caller may then reuse ``buffer``.

        Call :meth:`offer` first. Waits for room in the arena. Raises the failure of a member whose
        connection is lost.
        """
        unit = self._units[job]
        start = int(self._plan.start[job])
        pending = self._pending.get(unit)
        if pending is None:  # no other member wants it
            return
        if pending.local and pending.start is None:
            await offload(self._publish, job, buffer, await self._free_slot())
        async with asyncio.TaskGroup() as tasks:
            for member, low, high in self._sharing.takers(unit):
                if self.connections[member].over_network:
                    part = buffer.view[low - start : high - start]
                    tasks.create_task(self._send(member, unit, part))
        await pending.confirmed
        del self._pending[unit]
        if pending.start is not None:
            self._arena.free(pending.start)
            self._slot_freed.set()

    def _publish(self, job: int, buffer: HostBuffer, start: int) -> None:
        unit = self._units[job]
        self._arena.fill(start, buffer, int(self._plan.stop[job] - self._plan.start[job]))
        pending = self._pending[unit]
        pending.start = start
        for member in pending.local:
            with naming_member(member):
                self.connections[member].send_now(HANDOVER.pack(unit, start, NO_DIGEST))

    async def _free_slot(self) -> int:
        while (start := self._arena.take()) is None:
            self._slot_freed.clear()  # safe: slots are freed in this thread
            await self._slot_freed.wait()
        return start

    async def _send(self, member: int, unit: int, part: memoryview) -> None:
        async with self._group.blaming(member):
            connection = self.connections[member]
            digest = await offload(connection.digest, RECEIPT.pack(unit), part)
            await connection.send(HANDOVER.pack(unit, 0, digest), part)

    async def _receive_confirmations(self, member: int, connection: Connection) -> None:
        async with self._group.blaming(member):
            while self.owed[member]:
                self._confirm(member, await connection.receive(RECEIPT.size))

    def _confirmed_locally(self, member: int) -> bool:
        """Receive the next confirmation of a member of this host. Return whether it was the
        last."""
        self._confirm(member, self.connections[member].receive_now(RECEIPT.size))
        return not self.owed[member]

    def _confirm(self, member: int, receipt: bytes) -> None:
        (unit,) = RECEIPT.unpack(receipt)
        pending = self._pending.get(unit)
        if pending is None or member not in pending.members:
            raise self._group.protocol_error(member)
        pending.members.remove(member)
        self.owed[member] -= 1
        if not pending.members:
            self._loop.call_soon_threadsafe(_set_done, pending.confirmed)


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():  # cancelled, if this rank is failing
        future.set_result(None)


@dataclass(eq=False)
class Receiver(_Side):
    """Receives one rank's units. ``jobs``: (member, job) for each job of ``plan`` that another
    member reads; ``pool``: buffers for units from a network."""

    _jobs: Iterable[tuple[int, int]]
    _pool: HostPool

    def __post_init__(self) -> None:
        self.awaited: dict[int, dict[int, int]] = {}
        """For each member that reads for this rank: its jobs, by unit."""
        for member, job in self._jobs:
            self.awaited.setdefault(member, {})[self._units[job]] = job
        self._receiving = counting("receive")

    def start(
        self,
        tasks: asyncio.TaskGroup,
        threads: ThreadPoolExecutor,
        deliver: Deliver,
        copiers: int,
        gate: asyncio.Semaphore,
    ) -> None:
        """Start to receive: from members of this host in ``copiers`` threads; from other hosts, as
        many units at a time as ``gate`` admits."""
        local, remote = self._by_path()

        def copy(member: int) -> bool:
            return self._copy(member, deliver)

        for i in range(copiers):
            share = dict(list(local.items())[i::copiers])
            tasks.create_task(serve_in_thread(self._group, threads, share, copy))
        for member, connection in remote.items():
            tasks.create_task(self._fetch(member, connection, deliver, gate))

    def _copy(self, member: int, deliver: Deliver) -> bool:
        """Deliver the next unit that ``member`` has read. Return whether it was the last."""
        connection = self.connections[member]
        awaited = self.awaited[member]
        unit, position, _ = HANDOVER.unpack(connection.receive_now(HANDOVER.size))
        job = awaited.pop(unit, None)
        if job is None or connection.window is None:
            raise self._group.protocol_error(member)
        try:
            nbytes = int(self._plan.stop[job] - self._plan.start[job])
            buffer = connection.window.buffer(position, nbytes)
        except ValueError:
            raise self._group.protocol_error(member) from None
        with self._receiving(Where(nbytes=nbytes)):
            deliver(job, buffer)
        connection.send_now(RECEIPT.pack(unit))
        return not awaited

    async def _fetch(
        self, member: int, connection: Connection, deliver: Deliver, gate: asyncio.Semaphore
    ) -> None:
        awaited = self.awaited[member]
        async with asyncio.TaskGroup() as tasks, self._group.blaming(member):
            while awaited:
                unit, _, digest = HANDOVER.unpack(await connection.receive(HANDOVER.size))
                job = awaited.pop(unit, None)
                if job is None:
                    raise self._group.protocol_error(member)
                await gate.acquire()
                buffer = self._pool.take()
                await connection.receive_into(buffer.view[self._wanted_part(job)])
                tasks.create_task(self._finish(member, job, buffer, digest, deliver, gate))

    async def _finish(
        self,
        member: int,
        job: int,
        buffer: HostBuffer,
        digest: bytes,
        deliver: Deliver,
        gate: asyncio.Semaphore,
    ) -> None:
        connection = self.connections[member]
        receipt = RECEIPT.pack(self._units[job])

        def check_and_deliver() -> None:
            found = connection.digest(receipt, buffer.view[self._wanted_part(job)])
            if not hmac.compare_digest(found, digest):
                raise CoordinationError(
                    f"data from rank {self._group.ranks[member]} has changed in transit",
                    rank=self._group.team.rank,
                    advice=(
                        "The network or the memory of one of the two hosts is faulty, or somebody "
                        "tampers with the data."
                    ),
                )
            deliver(job, buffer)

        part = self._wanted_part(job)
        with span("receive", Where(nbytes=part.stop - part.start)):
            await offload(check_and_deliver)
        async with self._group.blaming(member):
            await connection.send(receipt)
        self._pool.give(buffer)
        gate.release()

    def _wanted_part(self, job: int) -> slice:
        """Return the part of a unit that this rank wants, relative to the start of the unit."""
        low, high = self._sharing.hull(self._units[job], self._group.me)
        start = int(self._plan.start[job])
        return slice(low - start, high - start)
