"""Reads an object that all ranks of a host need, such as a manifest, on one of them, and shares it
in memory.

If that fails, each rank reads for itself; no rank depends on another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from ...core.aio import wait_out
from ..format.digest import digest
from ..ranks.messages import Nothing, codec
from ..ranks.team import Team
from ..runtime.buffers import HostBuffer
from ..runtime.engine import offload
from .connection import Connection
from .transport import Address, Listener, connect, open_listener

CONNECT_ALL_TIMEOUT_S = 30.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SharedObject:
    """Location and digest of an object that one rank of the host has read."""

    address: Address
    nbytes: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Offer:
    """Announcement of the reading rank. With ``shared`` None, each rank reads for itself."""

    shared: SharedObject | None = None


async def read_once(
    team: Team, name: str, ranks: Sequence[int], read: Callable[[], Awaitable[bytes]]
) -> bytes | memoryview:
    """Return the result of ``read``, called on this rank or on the first of ``ranks``, the ranks of
    this host. All of them must call this. Other ranks get a view of shared memory. ``name`` must be
    unique in the team's life. Raises as ``read``, DeadlineError and RankFailedError."""
    if len(ranks) == 1:
        return await read()
    if team.rank == ranks[0]:
        return await _read_and_offer(team, name, ranks, read)
    offers = await team.all_gather(name, codec(Offer), ranks, Offer())
    shared = offers[0].shared
    if shared is None:
        return await read()
    received = await _received(shared, team)
    await team.gather(f"{name}/taken", codec(Nothing), ranks, Nothing())
    if received is None:
        return await read()
    return received


async def _read_and_offer(
    team: Team, name: str, ranks: Sequence[int], read: Callable[[], Awaitable[bytes]]
) -> bytes:
    try:
        data = await read()
    except BaseException:
        await team.all_gather(name, codec(Offer), ranks, Offer())  # the others read for themselves
        raise
    with contextlib.ExitStack() as resources:
        arena, listener = open_listener(resources, len(data), 1, team.host)
        if arena is not None:
            arena.fill(0, HostBuffer.over(memoryview(data)), len(data))
        checksum = await offload(digest, data)
        offer = Offer()
        if listener is not None:
            offer = Offer(SharedObject(listener.address, len(data), checksum))
        await team.all_gather(name, codec(Offer), ranks, offer)
        if listener is not None:
            await _serve(team, name, ranks, listener)
    return data


async def _serve(team: Team, name: str, ranks: Sequence[int], listener: Listener) -> None:
    """Give the other ranks access until all of them report that they are done."""
    accepting = asyncio.ensure_future(_accept(listener, ranks[1:]))
    try:
        # Ranks that could not connect report as well.
        await team.gather(f"{name}/taken", codec(Nothing), ranks, Nothing())
    finally:
        accepting.cancel()
        cancelled = await wait_out([accepting])
        if not accepting.cancelled() and accepting.exception() is not None:
            _log.warning("cannot pass data on to other ranks: %s", accepting.exception())
        if cancelled is not None:
            raise cancelled


async def _accept(listener: Listener, ranks: Sequence[int]) -> None:
    connections: dict[int, Connection] = {}
    try:
        await listener.accept(ranks, connections)
    finally:
        for connection in connections.values():
            connection.close()


async def _received(shared: SharedObject, team: Team) -> memoryview | None:
    """Return the shared object; None if it cannot be reached or does not match its announced
    digest."""
    try:
        async with asyncio.timeout(CONNECT_ALL_TIMEOUT_S):
            connection = await connect(shared.address, team.rank, team.host)
    except (OSError, TimeoutError) as error:
        _log.warning("cannot get data from another rank, reading it again: %s", error)
        return None
    try:
        if connection.window is None:
            return None
        data = connection.window.view[: shared.nbytes]
    finally:
        connection.close()
    if await offload(digest, data) != shared.digest:
        _log.warning("data from another rank does not match its digest, reading it again")
        return None
    return data
