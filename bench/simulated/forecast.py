"""Forecasts of a save and a load of a whole job: bytes, balance, requests and memory.

Object stores charge for requests and limit their rate. Requests for images and manifests are
counted. The save protocol adds about twenty at any size. No storage is touched.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median

from ...core.units import ceil_div
from ...drivers.contract import Traits
from ...drivers.objects.driver import ObjectDriver
from ...drivers.objects.uploads import part_nbytes_for
from ...drivers.registry import driver_class, serving
from ...drivers.uri import Uri
from ...errors import UsageError
from ...planner.image import CHUNK_NBYTES
from ...storage.operations.options import BUDGET_NBYTES
from ...storage.pipeline.image_writer import chunks_nbytes
from ..place import traits_of
from ..workloads.mlperf import Mlperf, subset_note
from ..workloads.spec import Workload
from .fleet import RankPlan, planned_fleet

VERSION = 1


@dataclass(frozen=True)
class Requests:
    """Numbers of requests. ``puts`` write, begin and end uploads; ``gets`` read, or query a
    size."""

    puts: int
    gets: int


def image_requests(nbytes: int, part_nbytes: int) -> Requests:
    """Return the requests to save an image of ``nbytes``; none for an empty one.

    An object store takes one, or, for more than ``part_nbytes``, the parts plus the start and the
    end of the upload. The leader queries the size before it commits, and the sender after a
    multipart upload. A storage without such requests, with ``part_nbytes`` of 0, is written chunk
    by chunk.
    """
    if not nbytes:
        return Requests(0, 0)
    if not part_nbytes:
        return Requests(ceil_div(nbytes, CHUNK_NBYTES), 0)
    if nbytes <= part_nbytes:
        return Requests(1, 1)
    return Requests(ceil_div(nbytes, part_nbytes_for(nbytes, part_nbytes)) + 2, 2)


@dataclass(frozen=True)
class Spread:
    """Distribution of a figure over all ranks."""

    least: int
    median: float
    most: int
    total: int

    @classmethod
    def of(cls, values: Sequence[int]) -> Spread:
        """Return the distribution of at least one value."""
        return cls(min(values), median(values), max(values), sum(values))


@dataclass(frozen=True)
class Forecast:
    """Forecast for a job. ``uri`` has no secrets.

    ``balance`` is the bytes of the largest rank divided by the mean; 1 is perfect.
    ``save_memory_nbytes`` is the host memory of ``holdfast.save`` on the rank that needs most, in
    addition to its state; ``capture_memory_nbytes`` is for an ``async_save`` that copies the
    state at once. ``plan_s`` is the processor time of the slowest rank's plan, and ``merge_s`` that
    of the leader's merge. On a storage without requests, writes and reads are counted. ``notes``
    lists limits of comparison.
    """

    uri: str
    workload: str
    world: int
    host_ranks: int
    state_nbytes: Spread
    image_nbytes: Spread
    balance: float
    tensors: int
    shards: int
    chunks: int
    manifest_nbytes: int
    save_requests: Requests
    load_requests: Requests
    save_memory_nbytes: int
    capture_memory_nbytes: int
    plan_s: float
    merge_s: float
    notes: tuple[str, ...]


def forecast(workload: Workload, uri: Uri, world: int, host_ranks: int) -> Forecast:
    """Forecast a save and a load. Nothing at ``uri`` is read or written; only its driver's traits
    matter. Raises UriError, and UsageError for no ranks and as :func:`.fleet.planned_fleet`."""
    if world < 1 or host_ranks < 1:
        raise UsageError(f"{world} ranks, {host_ranks} on each host", advice="Give 1 or more.")
    traits = traits_of(uri)
    fleet = planned_fleet(workload, world, host_ranks, traits.piece_nbytes)
    # A load into the same layout. Each host reads the manifest once.
    loads = Requests(0, fleet.reads + ceil_div(len(fleet.ranks), host_ranks))
    sizes = [rank.image_nbytes for rank in fleet.ranks]
    part_nbytes = 0
    cls: object = driver_class(serving(uri))
    if isinstance(cls, type) and issubclass(cls, ObjectDriver):
        part_nbytes = traits.part_nbytes
    images = [image_requests(nbytes, part_nbytes) for nbytes in sizes]
    puts = sum(image.puts for image in images) + 1  # the manifest takes one put
    subset = subset_note(workload, world) if isinstance(workload, Mlperf) else None
    return Forecast(
        uri=uri.redacted,
        workload=workload.name,
        world=world,
        host_ranks=host_ranks,
        state_nbytes=Spread.of([rank.state_nbytes for rank in fleet.ranks]),
        image_nbytes=Spread.of(sizes),
        balance=max(sizes) / mean(sizes),
        tensors=fleet.tensors,
        shards=fleet.shards,
        chunks=fleet.chunks,
        manifest_nbytes=fleet.manifest_nbytes,
        save_requests=Requests(puts, sum(image.gets for image in images)),
        load_requests=loads,
        save_memory_nbytes=_memory_nbytes(fleet.ranks, traits, BUDGET_NBYTES),
        capture_memory_nbytes=_memory_nbytes(fleet.ranks, traits, None),
        plan_s=max(rank.plan_s for rank in fleet.ranks),
        merge_s=fleet.merge_s,
        notes=() if subset is None else (subset,),
    )


def _memory_nbytes(ranks: Sequence[RankPlan], traits: Traits, budget_nbytes: int | None) -> int:
    chunks = max(rank.chunks for rank in ranks)
    most = chunks_nbytes(chunks, CHUNK_NBYTES, traits, budget_nbytes)
    return min(most, chunks * CHUNK_NBYTES) + traits.upload_nbytes


def encoded(found: Forecast) -> str:
    """Return a forecast as JSON (``docs/reference/bench.md``)."""
    return json.dumps({"version": VERSION, **asdict(found)}, indent=1)
