"""Zero-redundant load: of ranks that want the same bytes one reads them, and hands them to the
others at once.

The ranks of a *circle* tell each other which bytes they want, and work out alike who reads what
(``planner.sharing``). Reads go on as in any load. What was read and verified is handed on, chunk by
chunk, while the next is read; its buffer is free when all who wanted it have taken it. Taking waits
for nobody but this host's processor: so nothing can deadlock, in whatever order chunks come.

Ranks of one host copy from memory that they share (``arena``), where the reader puts what it has
verified. It does not read into that memory: it has small pages, which lie scattered, and some disks
read into those at a third of their rate. What came over a network is compared with a digest that
was sent along, which only the two ranks can make (``wire``).

Where any rank cannot take part, all read for themselves. When a rank fails later, its lines close,
and the others raise what it has told.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import logging
import os
import select
import struct
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ...errors import CoordinationError, RankFailedError
from ...planner.loading import LoadPlan
from ...planner.sharing import Sharing, regrouped
from ..pipeline.image_reader import Deliver, ImageReader
from ..ranks.messages import Codec
from ..ranks.team import Team
from ..runtime.buffers import HostBuffer, host_pool
from ..runtime.engine import CPU_THREADS, offload
from .shared_memory import Arena
from .transport import DIGEST_NBYTES, Address, Door, Line, knock

__all__ = ["Circle", "Exchange"]

T = TypeVar("T")

JOIN_S = 30.0
TOLD_S = 5.0
"""How long after its line has closed a rank may take to tell why."""

_HANDED = struct.Struct(
    f"<QQ{DIGEST_NBYTES}s"
)  # unit; where it lies in the arena; digest, of what comes over a network
_TAKEN = struct.Struct("<Q")
_NO_DIGEST = bytes(DIGEST_NBYTES)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Circle:
    """Ranks of a team that exchange what they read. ``name`` is used once in the team's life.
    ``here``: how many ranks this host has. ``near`` as for a Door. Less than ``least_nbytes`` to be
    shared is not worth it."""

    team: Team
    name: str
    ranks: Sequence[int]
    here: int
    near: str
    least_nbytes: int

    @property
    def me(self) -> int:
        """This rank's number among the members."""
        return self.ranks.index(self.team.rank)

    async def all_gather(self, what: str, kind: Codec[T], message: T) -> list[T]:
        """The messages of all members."""
        return await self.team.all_gather(f"{self.name}/{what}", kind, self.ranks, message)


@dataclass
class _Untaken:
    """A unit that others want: ``members`` have yet to take it, ``near`` are those who see it in
    the arena, where it lies from ``start`` on since there was room for it; ``taken``: all have it.
    """

    members: set[int]
    near: list[int]
    taken: asyncio.Future[None]
    start: int | None = None


class _Gone(Exception):
    """The line to ``member`` broke in a thread."""

    def __init__(self, member: int, error: OSError) -> None:
        self.member, self.error = member, error


class Exchange:
    """One rank's part. ``plan`` is what it reads or is handed: units of the sharing; ``jobs`` of
    them at a time."""

    def __init__(
        self,
        circle: Circle,
        reader: ImageReader,
        arena: Arena,
        sharing: Sharing,
        plan: LoadPlan,
        jobs: int,
    ) -> None:
        self._circle, self._reader, self._arena, self._sharing, self._jobs = (
            circle,
            reader,
            arena,
            sharing,
            jobs,
        )
        self.plan, units = regrouped(plan, sharing)
        readers, me = sharing.reader[units], circle.me
        self._units: list[int] = units.tolist()
        self._own = np.flatnonzero(readers == me)
        self._takes = Counter(
            m for job in self._own.tolist() for m, *_ in sharing.takers(self._units[job])
        )
        self._awaited: dict[
            int, dict[int, int]
        ] = {}  # per member that reads for this one, job by unit
        for job in np.flatnonzero(readers != me).tolist():
            self._awaited.setdefault(int(readers[job]), {})[self._units[job]] = job
        self._takers: dict[int, Line] = {}
        self._sources: dict[int, Line] = {}
        self._untaken: dict[int, _Untaken] = {}  # by unit
        self._freed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._copiers = max(1, min(CPU_THREADS, (os.cpu_count() or 1) // circle.here))
        self._threads = ThreadPoolExecutor(
            self._copiers + 1, thread_name_prefix="holdfast-exchange"
        )

    async def join(self, door: Door, addresses: Sequence[Address]) -> bool:
        """Meet those that this rank reads for, and those that read for it. False where that cannot
        be."""

        async def visit(member: int) -> None:
            self._sources[member] = await knock(addresses[member], self._circle.me)

        joined = True
        try:
            async with asyncio.timeout(JOIN_S), asyncio.TaskGroup() as meeting:
                meeting.create_task(door.admit(self._takes, self._takers))
                for member in self._awaited:
                    meeting.create_task(visit(member))
        except* OSError as errors:
            joined = False
            _log.warning("another rank cannot be reached: %s", errors.exceptions[0])
            # A task group's frame holds the error that holds the frame, and with it what this rank
            # shares.
            traceback.clear_frames(errors.__traceback__)
        return joined

    async def run(self, deliver: Deliver) -> None:
        """Read, hand on and take what is wanted; ``deliver`` gets jobs of ``plan``. Raises what
        reading raises, and RankFailedError, DeadlineError and CoordinationError for the others."""
        others = [self._circle.ranks[m] for m in self._takes.keys() | self._awaited.keys()]
        try:
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(
                    self._circle.team.watch(others, "what it reads for this one")
                )
                await self._exchange(deliver)
                watching.cancel()
        except BaseExceptionGroup as group:
            raise _first(group) from group
        finally:
            self.close()
        self._reader.bytes_received = self._sharing.handed_nbytes(self._circle.me)

    def close(self) -> None:
        """Leave. Who still waits for this rank will see it."""
        for line in (*self._takers.values(), *self._sources.values()):
            line.close()
        self._takers.clear()
        self._sources.clear()
        self._arena.close()
        self._threads.shutdown(wait=False)  # they have ended

    async def _exchange(self, deliver: Deliver) -> None:
        gate = asyncio.Semaphore(self._jobs)
        here, far = _parted(self._takers)
        near, remote = _parted(self._sources)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._attend(here, self._hear))
            for member, line in far.items():
                tasks.create_task(self._listen(member, line))
            for i in range(self._copiers):
                some = dict(list(near.items())[i :: self._copiers])
                tasks.create_task(self._attend(some, lambda member: self._copy(member, deliver)))
            for member, line in remote.items():
                tasks.create_task(self._fetch(member, line, deliver, gate))
            tasks.create_task(self._read(deliver))

    async def _read(self, deliver: Deliver) -> None:
        own: list[int] = self._own.tolist()
        columns = {name: getattr(self.plan, name)[self._own] for name in ("image", "start", "stop")}

        def show_and_deliver(job: int, buffer: HostBuffer) -> None:
            self._show(own[job], buffer)
            deliver(own[job], buffer)

        async with self._named():
            await self._reader.run(
                dataclasses.replace(self.plan, **columns),
                show_and_deliver,
                jobs=self._jobs,
                hand_on=lambda job, buffer: self._hand_on(own[job], buffer),
            )

    def _show(self, job: int, buffer: HostBuffer) -> None:
        """To those of this host who want of it, if there is room for it now. In the thread that has
        verified it, and before it is copied for this rank itself: nobody waits for more than he
        must."""
        unit = self._units[job]
        if not (members := {member for member, *_ in self._sharing.takers(unit)}):
            return
        near = [member for member in sorted(members) if not self._takers[member].by_wire]
        self._untaken[unit] = _Untaken(members, near, self._loop.create_future())
        if near and (start := self._arena.take()) is not None:
            self._put(job, buffer, start)

    def _put(self, job: int, buffer: HostBuffer, start: int) -> None:
        unit = self._units[job]
        self._arena.fill(start, buffer, int(self.plan.stop[job] - self.plan.start[job]))
        untaken = self._untaken[unit]
        untaken.start = start
        for member in untaken.near:
            with _told_of(member):
                self._takers[member].send_now(_HANDED.pack(unit, start, _NO_DIGEST))

    async def _hand_on(self, job: int, buffer: HostBuffer) -> None:
        """To those who do not have it yet; back when all who want of it do."""
        unit, start = self._units[job], int(self.plan.start[job])
        if (untaken := self._untaken.get(unit)) is None:  # nobody else wants of it
            return
        if untaken.near and untaken.start is None:
            await offload(self._put, job, buffer, await self._slot())
        async with asyncio.TaskGroup() as tasks:
            for member, low, high in self._sharing.takers(unit):
                if self._takers[member].by_wire:
                    tasks.create_task(
                        self._send(member, unit, buffer.view[low - start : high - start])
                    )
        await untaken.taken
        del self._untaken[unit]
        if untaken.start is not None:
            self._arena.free(untaken.start)
            self._freed.set()

    async def _slot(self) -> int:
        """One of the arena, as soon as there is one."""
        while (start := self._arena.take()) is None:
            self._freed.clear()  # nothing was freed since: that is done in this thread
            await self._freed.wait()
        return start

    async def _send(self, member: int, unit: int, part: memoryview) -> None:
        async with self._with(member):
            line = self._takers[member]
            digest = await offload(line.digest, _TAKEN.pack(unit), part)
            await line.send(_HANDED.pack(unit, 0, digest), part)

    async def _listen(self, member: int, line: Line) -> None:
        """Until ``member``, of another host, has taken all that this rank reads for it."""
        async with self._with(member):
            while self._takes[member]:
                self._took(member, await line.receive(_TAKEN.size))

    def _hear(self, member: int) -> bool:
        """The next that ``member``, of this host, tells; whether it was the last."""
        self._took(member, self._takers[member].receive_now(_TAKEN.size))
        return not self._takes[member]

    def _took(self, member: int, told: bytes) -> None:
        (unit,) = _TAKEN.unpack(told)
        untaken = self._untaken.get(unit)
        if untaken is None or member not in untaken.members:
            raise self._confused(member)
        untaken.members.remove(member)
        self._takes[member] -= 1
        if not untaken.members:
            self._loop.call_soon_threadsafe(_settle, untaken.taken)

    async def _attend(self, lines: dict[int, Line], answer: Callable[[int], bool]) -> None:
        """Call ``answer`` with the member whose line has something to tell, until it returns True
        for each of them. In a thread: a round through the event loop for each message takes as long
        as to copy what it is about."""
        if not lines:
            return
        attending = self._loop.run_in_executor(self._threads, _answer, lines, answer)
        try:
            async with self._named():
                await asyncio.shield(attending)
        except asyncio.CancelledError:
            for line in lines.values():
                line.hang_up()
            await asyncio.wait([attending])
            # it saw them hang up, or something else that came after what this was cancelled for
            attending.exception()
            raise

    def _copy(self, member: int, deliver: Deliver) -> bool:
        """The next that ``member`` has read for this rank; whether it was the last."""
        line, awaited = self._sources[member], self._awaited[member]
        unit, offset, _ = _HANDED.unpack(line.receive_now(_HANDED.size))
        if (job := awaited.pop(unit, None)) is None or line.window is None:
            raise self._confused(member)
        try:
            buffer = line.window.at(offset, int(self.plan.stop[job] - self.plan.start[job]))
        except ValueError:
            raise self._confused(member) from None
        deliver(job, buffer)
        line.send_now(_TAKEN.pack(unit))
        return not awaited

    async def _fetch(
        self, member: int, line: Line, deliver: Deliver, gate: asyncio.Semaphore
    ) -> None:
        """All that ``member``, of another host, reads for this rank."""
        awaited = self._awaited[member]
        async with asyncio.TaskGroup() as tasks, self._with(member):
            while awaited:
                unit, _, told = _HANDED.unpack(await line.receive(_HANDED.size))
                if (job := awaited.pop(unit, None)) is None:
                    raise self._confused(member)
                buffer = await self._fetched(line, job, gate)
                tasks.create_task(self._check(member, line, job, buffer, told, deliver, gate))

    async def _fetched(self, line: Line, job: int, gate: asyncio.Semaphore) -> HostBuffer:
        """What follows on the line, where it belongs in a buffer of its unit. As many as the gate
        lets in."""
        await gate.acquire()
        buffer = host_pool(self._reader.manifest.chunk_nbytes).take()
        await line.fill(buffer.view[self._within(job)])
        return buffer

    async def _check(
        self,
        member: int,
        line: Line,
        job: int,
        buffer: HostBuffer,
        told: bytes,
        deliver: Deliver,
        gate: asyncio.Semaphore,
    ) -> None:
        def check_and_deliver() -> None:
            digest = line.digest(_TAKEN.pack(self._units[job]), buffer.view[self._within(job)])
            if not hmac.compare_digest(digest, told):
                raise CoordinationError(
                    f"what rank {self._circle.ranks[member]} read has changed on the way here",
                    rank=self._circle.team.rank,
                    advice=(
                        "The network, or the memory of one of the two hosts, is damaged; or "
                        "somebody tampers with it."
                    ),
                )
            deliver(job, buffer)

        await offload(check_and_deliver)
        async with self._with(member):
            await line.send(_TAKEN.pack(self._units[job]))
        host_pool(self._reader.manifest.chunk_nbytes).give(buffer)
        gate.release()

    def _within(self, job: int) -> slice:
        """What this rank wants of a unit, in a buffer that begins where the unit does."""
        low, high = self._sharing.hull(self._units[job], self._circle.me)
        start = int(self.plan.start[job])
        return slice(low - start, high - start)

    @contextlib.asynccontextmanager
    async def _named(self) -> AsyncIterator[None]:
        """As :meth:`_with`, of the member whose line broke in a thread."""
        try:
            yield
        except _Gone as gone:
            async with self._with(gone.member):
                raise gone.error from None

    @contextlib.asynccontextmanager
    async def _with(self, member: int) -> AsyncIterator[None]:
        """When the line to ``member`` breaks, raises what that rank has told, or will tell at once,
        of its failure."""
        try:
            yield
        except OSError as error:
            rank, team = self._circle.ranks[member], self._circle.team
            end_s = time.monotonic() + TOLD_S
            while time.monotonic() < end_s:
                if (told := await team.failure()) is not None:
                    raise told from error
                await asyncio.sleep(0.05)
            raise RankFailedError(
                f"rank {rank} has left in the middle of the load, without a word",
                rank=rank,
                advice="Look at that rank's log; it was probably killed.",
            ) from error

    def _confused(self, member: int) -> CoordinationError:
        rank = self._circle.ranks[member]
        return CoordinationError(
            f"rank {rank} hands on what was not agreed upon",
            rank=rank,
            advice="Do all ranks run the same version?",
        )


def _parted(lines: Mapping[int, Line]) -> tuple[dict[int, Line], dict[int, Line]]:
    """Those to members of this host, and those to others."""
    near = {member: line for member, line in lines.items() if not line.by_wire}
    return near, {member: line for member, line in lines.items() if line.by_wire}


def _answer(lines: Mapping[int, Line], answer: Callable[[int], bool]) -> None:
    """However long nothing comes: whoever watches the others hangs up."""
    poll = select.poll()
    waiting = {line.watched_by(poll): member for member, line in lines.items()}
    while waiting:
        for number, _ in poll.poll():
            with _told_of(waiting[number]):
                ended = answer(waiting[number])
            if ended:
                poll.unregister(number)
                del waiting[number]


@contextlib.contextmanager
def _told_of(member: int) -> Iterator[None]:
    """In a thread: raises _Gone where the line to ``member`` breaks."""
    try:
        yield
    except OSError as error:
        raise _Gone(member, error) from error


def _settle(taken: asyncio.Future[None]) -> None:
    if not taken.done():  # cancelled, where this rank is failing
        taken.set_result(None)


def _first(error: BaseException) -> BaseException:
    """What went wrong first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
