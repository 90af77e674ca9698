"""Receives units that other ranks read: copies them from shared memory, or receives them over a
network and checks their digests."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from ...core.spans import Where, counting, span
from ...errors import CoordinationError
from ...planner.loading import LoadPlan
from ...planner.sharing import Sharing
from ..pipeline.image_reader import Deliver
from ..runtime.buffers import HostBuffer, HostPool
from ..runtime.engine import offload
from .connection import Connection
from .group import HANDOVER, RECEIPT, ExchangeGroup, by_path, serve_in_thread


class Receiver:
    """Receives one rank's units. ``jobs``: (member, job) for each job of ``plan`` that another
    member reads; ``units``: number of each job's unit in ``sharing``; ``pool``: buffers for units
    from a network."""

    def __init__(
        self,
        group: ExchangeGroup,
        sharing: Sharing,
        plan: LoadPlan,
        units: Sequence[int],
        jobs: Iterable[tuple[int, int]],
        pool: HostPool,
    ) -> None:
        self._group = group
        self._sharing = sharing
        self._plan = plan
        self._units = units
        self._pool = pool
        self.awaited: dict[int, dict[int, int]] = {}
        """For each member that reads for this rank: its jobs, by unit."""
        for member, job in jobs:
            self.awaited.setdefault(member, {})[units[job]] = job
        self.connections: dict[int, Connection] = {}
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
        local, remote = by_path(self.connections)

        def copy(member: int) -> bool:
            return self._copy(member, deliver)

        for i in range(copiers):
            share = dict(list(local.items())[i::copiers])
            tasks.create_task(serve_in_thread(self._group, threads, share, copy))
        for member, connection in remote.items():
            tasks.create_task(self._fetch(member, connection, deliver, gate))

    def close(self) -> None:
        """Close the connections, which tells the members that this rank has left."""
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()

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
            buffer = connection.window.at(position, nbytes)
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
