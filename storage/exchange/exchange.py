"""Zero-redundant load: bytes that several ranks want are read by one, and exchanged at once.

The ranks of a group announce which bytes they want, and all compute the same assignment of reads
(``planner.sharing``). Each rank reads as in any load. It hands on each verified unit while it reads
the next, and reuses the buffer once all ranks that want the unit have it. Receiving needs only this
host's CPU, so there is no deadlock, in whatever order units arrive.

Ranks of one host copy from shared memory (``shared_memory``), where the reader puts verified units.
It does not read into that memory directly: the pages are small and scattered, and some disks read
into such memory at a third of their rate. Bytes that crossed a network are checked against a digest
that only the two ranks can compute (``connection``).

If any rank cannot take part, all ranks read for themselves. If a rank fails later, its connections
close, and the others raise the failure that it has reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import traceback
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ...core.pool import is_exiting
from ...planner.loading import LoadPlan, Targets
from ...planner.sharing import Sharing, WantedRanges, regrouped, share
from ..pipeline.image_reader import Deliver, ImageReader, plan_reads
from ..ranks.messages import codec
from ..runtime.buffers import HostBuffer, host_pool
from ..runtime.engine import CPU_THREADS, offload
from .group import ExchangeGroup
from .handover import Receiver, Sender
from .shared_memory import Arena
from .transport import Address, Listener, connect, open_listener

LEAST_NBYTES = 32 << 20
"""Minimum of shared bytes. Reading less several times takes no longer than connecting."""
UNIT_GAPS = 64
"""Minimum length of a read, as a multiple of the bytes that the storage transfers within the
latency of a request."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Exchange:
    """One rank's side of the exchange. ``plan``: the units that it reads or receives, ``jobs`` of
    them at a time."""

    _group: ExchangeGroup
    _reader: ImageReader
    _arena: Arena
    _sharing: Sharing
    plan: LoadPlan
    _jobs: int

    def __post_init__(self) -> None:
        group = self._group
        sharing = self._sharing
        self.plan, rows = regrouped(self.plan, sharing)
        units: list[int] = rows.tolist()
        readers = sharing.reader[rows]
        self._own = np.flatnonzero(readers == group.me)
        others = np.flatnonzero(readers != group.me)
        common = (group, sharing, self.plan, units)
        self._sender = Sender(*common, self._own.tolist(), self._arena)
        read_by = zip(readers[others].tolist(), others.tolist(), strict=True)
        pool = host_pool(self._reader.manifest.chunk_nbytes)
        self._receiver = Receiver(*common, read_by, pool)
        self._copiers = max(1, min(CPU_THREADS, (os.cpu_count() or 1) // group.host_ranks))
        self._threads = ThreadPoolExecutor(
            self._copiers + 1, thread_name_prefix="holdfast-exchange"
        )

    async def join(self, listener: Listener, addresses: Sequence[Address]) -> bool:
        """Connect to the members that read for this rank, and to those it reads for. Return whether
        that worked."""
        group = self._group

        async def connect_to(member: int) -> None:
            connection = await connect(addresses[member], group.me, group.team.host)
            self._receiver.connections[member] = connection

        joined = True
        timeout_s = group.limits.connect_all_timeout_s
        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as tasks:
                tasks.create_task(listener.accept(self._sender.owed, self._sender.connections))
                for member in self._receiver.awaited:
                    tasks.create_task(connect_to(member))
        except* OSError as errors:
            joined = False
            _log.warning("another rank cannot be reached: %s", errors.exceptions[0])
            # A task group's frame and its error hold each other, and so the memory that this rank
            # shares.
            traceback.clear_frames(errors.__traceback__)
        return joined

    async def run(self, deliver: Deliver) -> None:
        """Read, hand on and receive all wanted units; ``deliver`` gets jobs of ``plan``. Raises as
        reading, and RankFailedError, DeadlineError and CoordinationError for other ranks."""
        members = self._sender.owed.keys() | self._receiver.awaited.keys()
        ranks = [self._group.ranks[member] for member in members]
        try:
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(
                    self._group.team.watch(ranks, "data that it reads for this one")
                )
                await self._exchange(deliver)
                watching.cancel()
        except BaseExceptionGroup as group:
            raise _first(group) from group
        finally:
            self.close()
        self._reader.bytes_received = self._sharing.handed_nbytes(self._group.me)

    def close(self) -> None:
        """Leave the exchange. Ranks that still wait for this one notice."""
        self._sender.close()
        self._receiver.close()
        self._arena.close()
        self._threads.shutdown(wait=False)  # they have ended

    async def _exchange(self, deliver: Deliver) -> None:
        gate = asyncio.Semaphore(self._jobs)
        async with asyncio.TaskGroup() as tasks:
            self._sender.start(tasks, self._threads)
            self._receiver.start(tasks, self._threads, deliver, self._copiers, gate)
            tasks.create_task(self._read(deliver))

    async def _read(self, deliver: Deliver) -> None:
        own: list[int] = self._own.tolist()
        columns = {name: getattr(self.plan, name)[self._own] for name in ("image", "start", "stop")}

        def offer_and_deliver(job: int, buffer: HostBuffer) -> None:
            self._sender.offer(own[job], buffer)
            deliver(own[job], buffer)

        async with self._group.blaming_named():
            await self._reader.run(
                dataclasses.replace(self.plan, **columns),
                offer_and_deliver,
                jobs=self._jobs,
                forward=lambda job, buffer: self._sender.hand_over(own[job], buffer),
            )


@dataclass(frozen=True, slots=True)
class Request:
    """The bytes that a rank wants: a compressed ``planner.sharing.WantedRanges`` in units of
    ``unit_nbytes``; and the address of the rank, if others can reach it."""

    address: Address | None
    wanted: bytes
    unit_nbytes: int


@dataclass(frozen=True, slots=True)
class Connected:
    """Tells if a rank is connected to all its partners."""

    connected: bool


async def begin_exchange(
    group: ExchangeGroup, reader: ImageReader, targets: Targets
) -> Exchange | None:
    """Connect to the other members; each calls this with its own targets. Returns None on all ranks
    if little would be shared, or some rank cannot be reached."""
    limits = group.limits
    unit_nbytes = _unit_nbytes(reader, limits.unit_nbytes)
    with contextlib.ExitStack() as resources:
        jobs = _jobs(group, reader, unit_nbytes)
        slots = min(limits.slots, jobs)
        arena, listener = open_listener(
            resources, unit_nbytes, slots, group.team.host, group.job_host
        )
        plan = await offload(plan_reads, reader.driver, reader.manifest, targets, unit_nbytes)
        wanted = await offload(lambda: zlib.compress(WantedRanges.of(plan).to_bytes(), 1))
        address = None
        if listener is not None and not is_exiting():  # an exchange needs threads
            address = listener.address
        requests = await group.all_gather(
            "wanted", codec(Request), Request(address, wanted, unit_nbytes)
        )
        sharing = await offload(_shared, [request.wanted for request in requests], unit_nbytes)
        if sharing.shared_nbytes < group.least_nbytes:
            return None
        if any(request.unit_nbytes != unit_nbytes for request in requests):
            return None
        joined = False
        addresses = [request.address for request in requests if request.address is not None]
        if arena is not None and listener is not None and len(addresses) == len(requests):
            exchange = Exchange(group, reader, arena, sharing, plan, jobs)
            resources.callback(exchange.close)
            joined = await exchange.join(listener, addresses)
        answers = await group.all_gather("joined", codec(Connected), Connected(joined))
        if not all(answer.connected for answer in answers):
            _log.warning(
                "ranks that want the same bytes cannot reach each other: each reads them for itself"
            )
            return None
        resources.pop_all()
        if listener is not None:
            listener.close()
        return exchange


def _unit_nbytes(reader: ImageReader, least_nbytes: int) -> int:
    """Return the length of a read: short, since fresh shared memory is expensive, but much longer
    than the latency of a request."""
    manifest = reader.manifest
    unit_nbytes = manifest.chunk_nbytes
    least_nbytes = max(least_nbytes, UNIT_GAPS * reader.driver.traits.coalesce_nbytes)
    while unit_nbytes // 2 >= least_nbytes and unit_nbytes % (2 * manifest.block_nbytes) == 0:
        unit_nbytes //= 2
    return unit_nbytes


def _jobs(group: ExchangeGroup, reader: ImageReader, unit_nbytes: int) -> int:
    """Return how many units are read, verified or handed on at a time.

    Ranks of a host share its concurrency, unless each has connections of its own. A disk of the
    host gets half as many: it serves a long queue in its own order, and all ranks wait for the
    last.
    """
    traits = reader.driver.traits
    if traits.shared:
        share = group.host_ranks
    else:
        share = 2 * group.host_ranks
    if reader.driver.remote:
        reads = traits.concurrency
    else:
        reads = max(2, traits.concurrency // share)
    return reader.jobs(reads, unit_nbytes)  # each has a buffer, and at most one slot


def _shared(wanted: Sequence[bytes], unit_nbytes: int) -> Sharing:
    return share(
        [WantedRanges.from_bytes(zlib.decompress(ranges)) for ranges in wanted], unit_nbytes
    )


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
