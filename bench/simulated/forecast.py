"""Forecasts of a save and a load of a whole job: bytes, balance, requests, memory, time and
money."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median

from ...core.units import ceil_div
from ...drivers.contract import Traits
from ...drivers.uri import Uri
from ...errors import UsageError
from ...planner.image import CHUNK_NBYTES
from ...storage.operations.options import BUDGET_NBYTES
from ...storage.pipeline.image_writer import chunks_nbytes
from ..prices import Prices, Requests
from ..traits import traits_of
from ..workloads.mlperf import Mlperf
from ..workloads.mlperf_rules import subset_note
from ..workloads.spec import Workload
from .fleet import Fleet, RankPlan, planned_fleet
from .rates import Rates
from .requests import UploadShape, upload_shape

__all__ = ["Forecast", "Spread", "encoded", "forecast"]

VERSION = 1


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
    addition to its state; ``capture_memory_nbytes`` is that of an ``async_save`` that copies the
    state at once. ``save_s`` and ``load_s`` are None if no rate is known, and costs are None if no
    prices are. On a storage without requests, these count writes and reads. ``notes`` lists limits
    of comparison.
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
    save_s: float | None
    load_s: float | None
    save_usd: float | None
    load_usd: float | None
    notes: tuple[str, ...]


def forecast(
    workload: Workload, uri: Uri, world: int, host_ranks: int, rates: Rates, prices: Prices | None
) -> Forecast:
    """Forecast a save and a load. Nothing at ``uri`` is read or written; only its driver's traits
    matter. Raises UriError, and UsageError for no ranks and as :func:`.fleet.planned_fleet`."""
    if world < 1 or host_ranks < 1:
        raise UsageError(f"{world} ranks, {host_ranks} on each host", advice="Give 1 or more.")
    traits = traits_of(uri)
    fleet = planned_fleet(workload, world, host_ranks, traits.piece_nbytes)
    shape = upload_shape(uri, traits)
    saves = _save_requests(fleet, shape)
    loads = _load_requests(fleet, host_ranks)
    sizes = [rank.image_nbytes for rank in fleet.ranks]
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
        save_s=rates.save.seconds(sizes, host_ranks),
        load_s=rates.load.seconds(sizes, host_ranks),
        save_usd=None if prices is None else prices.cost_usd(saves),
        load_usd=None if prices is None else prices.cost_usd(loads),
        notes=_notes(workload, world),
    )


def _notes(workload: Workload, world: int) -> tuple[str, ...]:
    """Return the limits of comparison of a job."""
    if not isinstance(workload, Mlperf):
        return ()
    subset = subset_note(workload, world)
    return () if subset is None else (subset,)


def _save_requests(fleet: Fleet, shape: UploadShape) -> Requests:
    sizes = [rank.image_nbytes for rank in fleet.ranks]
    puts = sum(map(shape.puts, sizes)) + 1  # the manifest takes one put
    return Requests(puts, sum(map(shape.looks, sizes)))


def _load_requests(fleet: Fleet, host_ranks: int) -> Requests:
    """Return the requests of a load into the same layout. Each host reads the manifest once."""
    hosts = ceil_div(len(fleet.ranks), host_ranks)
    return Requests(0, fleet.reads + hosts)


def _memory_nbytes(ranks: Sequence[RankPlan], traits: Traits, budget_nbytes: int | None) -> int:
    chunks = max(rank.chunks for rank in ranks)
    most = chunks_nbytes(chunks, CHUNK_NBYTES, traits, budget_nbytes)
    return min(most, chunks * CHUNK_NBYTES) + traits.upload_nbytes


def encoded(found: Forecast) -> str:
    """Return a forecast as JSON (``docs/reference/bench.md``)."""
    return json.dumps({"version": VERSION, **asdict(found)}, indent=1)
