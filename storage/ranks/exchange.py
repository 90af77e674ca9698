"""Zero-redundant load: of ranks that want the same bytes one reads them, and hands them to the others at once.

The ranks of a *circle* tell each other which bytes they want, and work out alike who reads what (``planner.sharing``).
Reads go on as in any load. What was read and verified is handed on, chunk by chunk, while the next is read; its buffer
is free when all who wanted it have taken it. Taking waits for nobody but this host's processor: so nothing can deadlock,
in whatever order chunks come.

Ranks of one host copy from the memory that was read into (``arena``): the very bytes that were verified. What came over a
network is compared with the digest that was sent along.

Where any rank cannot take part, all read for themselves. When a rank fails later, its lines close, and the others raise
what it has told.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import functools
import json
import logging
import struct
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import CoordinationError, RankFailedError
from ...planner.loading import LoadPlan
from ...planner.sharing import Sharing, Wish, regrouped, share
from ..format.digest import digest
from ..pipeline.buffers import HostBuffer, host_pool
from ..pipeline.engine import offload
from ..pipeline.image_reader import Deliver, ImageReader
from .arena import Arena
from .team import Team
from .wire import Door, Line, knock

__all__ = ["Circle", "Exchange", "begin_exchange"]

LEAST_NBYTES = 32 << 20
"""With less to be shared than this, reading it several times takes no longer than meeting each other."""
JOIN_S = 30.0
TOLD_S = 5.0
"""How long after its line has closed a rank may take to tell why."""

_HANDED = struct.Struct("<QQ16s")  # unit; where it lies in the arena; digest, of what comes over a network
_TAKEN = struct.Struct("<Q")
_NO_DIGEST = bytes(16)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Circle:
    """Ranks of a team that exchange what they read. ``name`` is used once in the team's life. ``near`` as for a Door.
    Less than ``least_nbytes`` to be shared is not worth it."""

    team: Team
    name: str
    ranks: Sequence[int]
    near: str
    least_nbytes: int

    @property
    def me(self) -> int:
        """This rank's number among the members."""
        return self.ranks.index(self.team.rank)

    async def tell(self, what: str, statement: bytes) -> list[bytes]:
        """Each member's statement."""
        return await self.team.among(f"{self.name}/{what}", self.ranks, statement)


async def begin_exchange(circle: Circle, reader: ImageReader, plan: LoadPlan) -> Exchange | None:
    """Meet the other members, who all call this, each with the reads that it would have to do alone. None, for all
    alike, where little would be shared, or somebody cannot be reached."""
    with contextlib.ExitStack() as mine:
        arena, door = _opened(mine, circle, reader)
        wish = zlib.compress(await offload(Wish.of(plan).to_bytes), 1)
        said = {"door": door.address if door else "", "wish": base64.b64encode(wish).decode()}
        told = [json.loads(t) for t in await circle.tell("wishes", json.dumps(said).encode())]
        sharing = await offload(_shared, [t["wish"] for t in told], reader.manifest.chunk_nbytes)
        if sharing.shared_nbytes < circle.least_nbytes:
            return None
        joined = False
        if arena and door and all(t["door"] for t in told):
            exchange = Exchange(circle, reader, arena, sharing, plan)
            mine.callback(exchange.close)
            joined = await exchange.join(door, [t["door"] for t in told])
        if not all(await circle.tell("joined", b"yes" if joined else b"")):
            _log.warning("ranks that want the same bytes cannot reach each other: each reads them for itself")
            return None
        mine.pop_all()
        if door:
            door.close()
        return exchange


def _opened(mine: contextlib.ExitStack, circle: Circle, reader: ImageReader) -> tuple[Arena | None, Door | None]:
    try:
        arena = Arena(reader.manifest.chunk_nbytes, reader.jobs)
        mine.callback(arena.close)
        door = Door(arena.fd, circle.near)
        mine.callback(door.close)
    except OSError as error:
        _log.warning("no memory can be shared with other ranks here: %s", error)
        return None, None
    return arena, door


def _shared(wishes: Sequence[str], chunk_nbytes: int) -> Sharing:
    return share([Wish.from_bytes(zlib.decompress(base64.b64decode(wish))) for wish in wishes], chunk_nbytes)


class Exchange:
    """One rank's part. ``plan`` is what it reads or is handed: units of the sharing."""

    def __init__(self, circle: Circle, reader: ImageReader, arena: Arena, sharing: Sharing, plan: LoadPlan) -> None:
        self._circle, self._reader, self._arena, self._sharing = circle, reader, arena, sharing
        self.plan, units = regrouped(plan, sharing)
        readers, me = sharing.reader[units], circle.me
        self._units: list[int] = units.tolist()
        self._own = np.flatnonzero(readers == me)
        self._takes = Counter(m for job in self._own.tolist() for m, *_ in sharing.takers(self._units[job]))
        self._awaited: dict[int, dict[int, int]] = {}  # per member that reads for this one, job by unit
        for job in np.flatnonzero(readers != me).tolist():
            self._awaited.setdefault(int(readers[job]), {})[self._units[job]] = job
        self._takers: dict[int, Line] = {}
        self._sources: dict[int, Line] = {}
        self._taken: dict[tuple[int, int], asyncio.Future[None]] = {}

    async def join(self, door: Door, addresses: Sequence[str]) -> bool:
        """Meet those that this rank reads for, and those that read for it. False where that cannot be."""

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
        return joined

    async def run(self, deliver: Deliver) -> None:
        """Read, hand on and take what is wanted; ``deliver`` gets jobs of ``plan``. Raises what reading raises, and
        RankFailedError, DeadlineError and CoordinationError for the others."""
        others = [self._circle.ranks[m] for m in self._takes.keys() | self._awaited.keys()]
        try:
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(self._circle.team.watch(others, "what it reads for this one"))
                await self._exchange(deliver)
                watching.cancel()
        except BaseExceptionGroup as group:
            raise _first(group) from group
        finally:
            self.close()

    def close(self) -> None:
        """Leave. Who still waits for this rank will see it."""
        for line in (*self._takers.values(), *self._sources.values()):
            line.close()
        self._takers.clear()
        self._sources.clear()
        self._arena.close()

    async def _exchange(self, deliver: Deliver) -> None:
        gate = asyncio.Semaphore(self._reader.jobs)
        async with asyncio.TaskGroup() as tasks:
            for member, line in self._takers.items():
                tasks.create_task(self._listen(member, line))
            for member, line in self._sources.items():
                tasks.create_task(self._take(member, line, deliver, gate))
            tasks.create_task(self._read(deliver))

    async def _read(self, deliver: Deliver) -> None:
        own: list[int] = self._own.tolist()
        columns = {name: getattr(self.plan, name)[self._own] for name in ("image", "start", "stop")}
        await self._reader.run(
            dataclasses.replace(self.plan, **columns),
            lambda job, buffer: deliver(own[job], buffer),
            pool=self._arena,
            hand_on=lambda job, buffer: self._hand_on(own[job], buffer),
        )

    async def _hand_on(self, job: int, buffer: HostBuffer) -> None:
        """To all who want of it; back when they have it."""
        unit, start = self._units[job], int(self.plan.start[job])
        async with asyncio.TaskGroup() as tasks:
            for member, low, high in self._sharing.takers(unit):
                tasks.create_task(self._hand(member, unit, buffer, low - start, high - start))

    async def _hand(self, member: int, unit: int, buffer: HostBuffer, low: int, high: int) -> None:
        line, offset = self._takers[member], self._arena.offset_of(buffer)
        taken = self._taken[member, unit] = asyncio.get_running_loop().create_future()
        async with self._with(member):
            if line.by_wire:
                part = buffer.view[low:high]
                await line.send(_HANDED.pack(unit, offset, await offload(digest, part)), part)
            else:
                await line.send(_HANDED.pack(unit, offset, _NO_DIGEST))
        await taken

    async def _listen(self, member: int, line: Line) -> None:
        """Until ``member`` has taken all that this rank reads for it."""
        async with self._with(member):
            for _ in range(self._takes[member]):
                (unit,) = _TAKEN.unpack(await line.receive(_TAKEN.size))
                if (taken := self._taken.pop((member, unit), None)) is None:
                    raise self._confused(member)
                if not taken.done():  # cancelled, where this rank is failing
                    taken.set_result(None)

    async def _take(self, member: int, line: Line, deliver: Deliver, gate: asyncio.Semaphore) -> None:
        """All that ``member`` reads for this rank."""
        awaited = self._awaited[member]
        async with asyncio.TaskGroup() as tasks, self._with(member):
            while awaited:
                unit, offset, told = _HANDED.unpack(await line.receive(_HANDED.size))
                if (job := awaited.pop(unit, None)) is None:
                    raise self._confused(member)
                if line.window is not None:
                    try:
                        buffer = line.window.at(offset, int(self.plan.stop[job] - self.plan.start[job]))
                    except ValueError:
                        raise self._confused(member) from None
                    tasks.create_task(self._copy(member, line, unit, functools.partial(deliver, job, buffer)))
                else:
                    buffer = await self._fetched(line, job, gate)
                    tasks.create_task(self._check(member, line, job, buffer, told, deliver, gate))

    async def _fetched(self, line: Line, job: int, gate: asyncio.Semaphore) -> HostBuffer:
        """What follows on the line, where it belongs in a buffer of its unit. As many as the gate lets in."""
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
            if digest(buffer.view[self._within(job)]) != told:
                raise CoordinationError(
                    f"what rank {self._circle.ranks[member]} read has changed on the way here",
                    rank=self._circle.team.rank,
                    advice="The network, or the memory of one of the two hosts, is damaged.",
                )
            deliver(job, buffer)

        await self._copy(member, line, self._units[job], check_and_deliver)
        host_pool(self._reader.manifest.chunk_nbytes).give(buffer)
        gate.release()

    async def _copy(self, member: int, line: Line, unit: int, copy: Callable[[], None]) -> None:
        """Copy to where it is wanted, and say so."""
        await offload(copy)
        low, high = self._sharing.hull(unit, self._circle.me)
        self._reader.bytes_received += high - low
        async with self._with(member):
            await line.send(_TAKEN.pack(unit))

    def _within(self, job: int) -> slice:
        """What this rank wants of a unit, in a buffer that begins where the unit does."""
        low, high = self._sharing.hull(self._units[job], self._circle.me)
        start = int(self.plan.start[job])
        return slice(low - start, high - start)

    @contextlib.asynccontextmanager
    async def _with(self, member: int) -> AsyncIterator[None]:
        """When the line to ``member`` breaks, raises what that rank has told, or will tell at once, of its failure."""
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
            f"rank {rank} hands on what was not agreed upon", rank=rank, advice="Do all ranks run the same version?"
        )


def _first(error: BaseException) -> BaseException:
    """What went wrong first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
