"""What all ranks of a host want whole, such as a manifest, one of them reads, and hands it to the
others in shared memory.

Where that cannot be, each reads for itself: nobody depends on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from ..format.digest import digest
from ..ranks.messages import Nothing, codec
from ..ranks.team import Team
from ..runtime.buffers import HostBuffer
from ..runtime.engine import offload
from .transport import Address, Door, Line, knock, open_door

__all__ = ["read_once"]

JOIN_S = 30.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SharedObject:
    """Where the other ranks of the host find what one of them has read."""

    address: Address
    nbytes: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Offer:
    """What the reading rank announces; ``shared`` None: each rank reads for itself."""

    shared: SharedObject | None = None


async def read_once(
    team: Team, name: str, ranks: Sequence[int], read: Callable[[], Awaitable[bytes]]
) -> bytes | memoryview:
    """What ``read`` returns: here, or on the first of ``ranks``, which are those of this host; all
    of them call this alike. What was handed on is a view of the memory that it lies in. ``name`` is
    used once in the team's life. Raises what ``read`` raises, DeadlineError and RankFailedError."""
    if len(ranks) == 1:
        return await read()
    if team.rank != ranks[0]:
        offers = await team.all_gather(name, codec(Offer), ranks, Offer())
        shared = offers[0].shared
        if shared is None:
            return await read()
        handed = await _taken(shared, team.rank)
        await team.gather(f"{name}/taken", codec(Nothing), ranks, Nothing())
        return await read() if handed is None else handed
    try:
        data = await read()
    except BaseException:
        await team.all_gather(name, codec(Offer), ranks, Offer())  # each of the others reads
        raise
    with contextlib.ExitStack() as mine:
        arena, door = open_door(mine, len(data), 1)
        if arena:
            arena.fill(0, HostBuffer.over(memoryview(data)), len(data))
        checksum = await offload(digest, data)
        offer = Offer(SharedObject(door.address, len(data), checksum)) if door else Offer()
        await team.all_gather(name, codec(Offer), ranks, offer)
        if door:
            admitting = asyncio.ensure_future(_admit(door, ranks[1:]))
            try:
                # Also from ranks that could not connect.
                await team.gather(f"{name}/taken", codec(Nothing), ranks, Nothing())
            finally:
                admitting.cancel()
                await asyncio.wait([admitting])
                if not admitting.cancelled() and admitting.exception() is not None:
                    _log.warning("what was read could not be handed on: %s", admitting.exception())
    return data


async def _admit(door: Door, ranks: Sequence[int]) -> None:
    lines: dict[int, Line] = {}
    try:
        await door.admit(ranks, lines)
    finally:
        for line in lines.values():
            line.close()


async def _taken(shared: SharedObject, me: int) -> memoryview | None:
    """What is behind a door; None where it cannot be reached, or is not what was told over the
    job's store."""
    try:
        async with asyncio.timeout(JOIN_S):
            line = await knock(shared.address, me)
    except (OSError, TimeoutError) as error:
        _log.warning("what another rank has read is read again: %s", error)
        return None
    try:
        if line.window is None:
            return None
        data = line.window.first(shared.nbytes)
    finally:
        line.close()
    if await offload(digest, data) != shared.digest:
        _log.warning(
            "what another rank has read is read again: it is not what that rank has told of it"
        )
        return None
    return data
