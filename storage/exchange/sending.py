"""Sends the units that a rank reads to the other ranks: offers each one once it is verified, and
retains it until all of them have confirmed it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ...planner.loading import LoadPlan
from ...planner.sharing import Sharing
from ..runtime.buffers import HostBuffer
from ..runtime.engine import offload
from .connection import Connection
from .group import (
    HANDOVER,
    NO_DIGEST,
    RECEIPT,
    ExchangeGroup,
    by_path,
    naming_member,
    serve_in_thread,
)
from .shared_memory import Arena


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


class Sender:
    """Sends the units that this rank reads.

    A job is an index into the reads of ``plan``; each job reads one unit. ``jobs``: those of this
    rank. ``units``: by job, the index of its unit in ``sharing``.
    """

    def __init__(
        self,
        group: ExchangeGroup,
        arena: Arena,
        sharing: Sharing,
        plan: LoadPlan,
        units: Sequence[int],
        jobs: Sequence[int],
    ) -> None:
        self._group = group
        self._arena = arena
        self._sharing = sharing
        self._plan = plan
        self._units = units
        self.owed = Counter(member for job in jobs for member, *_ in sharing.takers(units[job]))
        """Number of units that each member has yet to confirm."""
        self.connections: dict[int, Connection] = {}
        self._pending: dict[int, _Pending] = {}  # by unit
        self._slot_freed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def start(self, tasks: asyncio.TaskGroup, threads: ThreadPoolExecutor) -> None:
        """Start to receive the confirmations of all members. Set ``connections`` first."""
        local, remote = by_path(self.connections)
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

    def close(self) -> None:
        """Close the connections, which tells the members that this rank has left."""
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()

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
