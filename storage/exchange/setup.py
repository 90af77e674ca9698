"""How an exchange begins: ranks that may want the same bytes tell each other what they want, find
out alike whether reading it once pays, and meet.
"""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from ...planner.loading import Targets
from ...planner.sharing import Sharing, Wish, share
from ..pipeline.image_reader import ImageReader, plan_reads
from ..ranks.messages import codec
from ..runtime.engine import offload
from .exchange import Circle, Exchange
from .transport import Address, open_door

__all__ = ["LEAST_NBYTES", "begin_exchange"]

LEAST_NBYTES = 32 << 20
"""With less to be shared than this, reading it several times takes no longer than meeting each
other."""
SLOTS = 2
"""Units that others have yet to take. Shared memory is dear: each page of it is mapped, cleared and
given back by itself."""
UNIT_NBYTES = 8 << 20
UNIT_GAPS = 64
"""A read is to be so many times longer than what could be read besides it in the time that it takes
to ask."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Request:
    """What a rank wants to have read: a compressed ``planner.sharing.Wish``, in units of
    ``unit_nbytes``; and where others find the rank, if they can."""

    address: Address | None
    wish: bytes
    unit_nbytes: int


@dataclass(frozen=True, slots=True)
class Connected:
    """Whether a rank is connected with all that it exchanges with."""

    connected: bool


async def begin_exchange(circle: Circle, reader: ImageReader, targets: Targets) -> Exchange | None:
    """Meet the other members, who all call this, each with what it wants. None, for all alike,
    where little would be shared, or somebody cannot be reached."""
    unit_nbytes = _unit_nbytes(reader)
    with contextlib.ExitStack() as mine:
        jobs = _jobs(circle, reader, unit_nbytes)
        arena, door = open_door(mine, unit_nbytes, min(SLOTS, jobs), circle.near)
        plan = await offload(plan_reads, reader.driver, reader.manifest, targets, unit_nbytes)
        wish = zlib.compress(await offload(Wish.of(plan).to_bytes), 1)
        request = Request(door.address if door else None, wish, unit_nbytes)
        requests = await circle.all_gather("wishes", codec(Request), request)
        sharing = await offload(_shared, [r.wish for r in requests], unit_nbytes)
        if sharing.shared_nbytes < circle.least_nbytes:
            return None
        if any(r.unit_nbytes != unit_nbytes for r in requests):
            return None
        joined = False
        addresses = [r.address for r in requests if r.address is not None]
        if arena and door and len(addresses) == len(requests):
            exchange = Exchange(circle, reader, arena, sharing, plan, jobs)
            mine.callback(exchange.close)
            joined = await exchange.join(door, addresses)
        answers = await circle.all_gather("joined", codec(Connected), Connected(joined))
        if not all(answer.connected for answer in answers):
            _log.warning(
                "ranks that want the same bytes cannot reach each other: each reads them for itself"
            )
            return None
        mine.pop_all()
        if door:
            door.close()
        return exchange


def _unit_nbytes(reader: ImageReader) -> int:
    """The length of a read: fresh shared memory is dear, so there is to be little of it; yet each
    read is to take much longer than to ask for it."""
    unit_nbytes, manifest = reader.manifest.chunk_nbytes, reader.manifest
    least_nbytes = max(UNIT_NBYTES, UNIT_GAPS * reader.driver.traits.coalesce_nbytes)
    while unit_nbytes // 2 >= least_nbytes and unit_nbytes % (2 * manifest.block_nbytes) == 0:
        unit_nbytes //= 2
    return unit_nbytes


def _jobs(circle: Circle, reader: ImageReader, unit_nbytes: int) -> int:
    """How many units are read, verified or handed on at a time. Ranks of a host share what it can
    read at a time, unless each has connections of its own; a disk of the host's own is asked for
    half of that, since it serves a long queue in its own order, and all wait for the rank that it
    serves last."""
    traits = reader.driver.traits
    share = circle.here if traits.shared else 2 * circle.here
    reads = traits.concurrency if reader.driver.remote else max(2, traits.concurrency // share)
    return reader.jobs(reads, unit_nbytes)  # each has a buffer, and at most one slot


def _shared(wishes: Sequence[bytes], unit_nbytes: int) -> Sharing:
    return share([Wish.from_bytes(zlib.decompress(wish)) for wish in wishes], unit_nbytes)
