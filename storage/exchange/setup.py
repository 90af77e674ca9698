"""Sets up an exchange: ranks announce which bytes they want, decide whether sharing pays, and
connect."""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from ...core.pool import is_exiting
from ...planner.loading import Targets
from ...planner.sharing import Sharing, WantedRanges, share
from ..pipeline.image_reader import ImageReader, plan_reads
from ..ranks.messages import codec
from ..runtime.engine import offload
from .exchange import Exchange
from .group import ExchangeGroup
from .transport import Address, open_listener

LEAST_NBYTES = 32 << 20
"""Minimum of shared bytes. Reading less several times takes no longer than connecting."""
UNIT_GAPS = 64
"""Minimum length of a read, as a multiple of the bytes that the storage transfers within the
latency of a request."""

_log = logging.getLogger(__name__)


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
