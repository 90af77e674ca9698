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
from .fleet import Fleet, RankPlan, planned_fleet

VERSION = 1


@dataclass(frozen=True)
class Requests:
    """Numbers of requests. ``puts`` write, begin and end uploads; ``gets`` read, or query a
    size."""

    puts: int
    gets: int


@dataclass(frozen=True)
class UploadShape:
    """Parameters of a driver's uploads.

    ``part_nbytes`` is the part size of an object store's uploads; smaller objects take one request.
    It is 0 for a storage without such requests, which is written chunk by chunk.
    """

    part_nbytes: int = 0

    def puts(self, nbytes: int) -> int:
        """Return the requests that write an object of ``nbytes``: one, or its parts plus the start
        and the end of the upload. For a storage without parts, return the writes."""
        if not nbytes:
            return 0
        if not self.part_nbytes:
            return ceil_div(nbytes, CHUNK_NBYTES)
        if nbytes <= self.part_nbytes:
            return 1
        return ceil_div(nbytes, part_nbytes_for(nbytes, self.part_nbytes)) + 2

    def looks(self, nbytes: int) -> int:
        """Return the requests for the size of an image in an object store: one by the leader before
        it commits, and one by the sender after a multipart upload."""
        if not nbytes or not self.part_nbytes:
            return 0
        return 2 if nbytes > self.part_nbytes else 1


def _upload_shape(uri: Uri, traits: Traits) -> UploadShape:
    """Return how the driver of ``uri``, with these traits, sends objects."""
    cls: object = driver_class(serving(uri))
    if isinstance(cls, type) and issubclass(cls, ObjectDriver):
        return UploadShape(traits.part_nbytes)
    return UploadShape()


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
    shape = _upload_shape(uri, traits)
    saves = _save_requests(fleet, shape)
    # A load into the same layout. Each host reads the manifest once.
    loads = Requests(0, fleet.reads + ceil_div(len(fleet.ranks), host_ranks))
    sizes = [rank.image_nbytes for rank in fleet.ranks]
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
        save_requests=saves,
        load_requests=loads,
        save_memory_nbytes=_memory_nbytes(fleet.ranks, traits, BUDGET_NBYTES),
        capture_memory_nbytes=_memory_nbytes(fleet.ranks, traits, None),
        plan_s=max(rank.plan_s for rank in fleet.ranks),
        merge_s=fleet.merge_s,
        notes=() if subset is None else (subset,),
    )


def _save_requests(fleet: Fleet, shape: UploadShape) -> Requests:
    sizes = [rank.image_nbytes for rank in fleet.ranks]
    puts = sum(map(shape.puts, sizes)) + 1  # the manifest takes one put
    return Requests(puts, sum(map(shape.looks, sizes)))


def _memory_nbytes(ranks: Sequence[RankPlan], traits: Traits, budget_nbytes: int | None) -> int:
    chunks = max(rank.chunks for rank in ranks)
    most = chunks_nbytes(chunks, CHUNK_NBYTES, traits, budget_nbytes)
    return min(most, chunks * CHUNK_NBYTES) + traits.upload_nbytes


def encoded(found: Forecast) -> str:
    """Return a forecast as JSON (``docs/reference/bench.md``)."""
    return json.dumps({"version": VERSION, **asdict(found)}, indent=1)
