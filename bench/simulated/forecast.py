"""What a save and a load of a whole job are and take: bytes, balance, requests, memory, time and
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
    """Of a figure of all ranks."""

    least: int
    median: float
    most: int
    total: int

    @classmethod
    def of(cls, values: Sequence[int]) -> Spread:
        """Of these, at least one."""
        return cls(min(values), median(values), max(values), sum(values))


@dataclass(frozen=True)
class Forecast:
    """``uri`` without secrets. ``balance``: the bytes of the rank that has most, by the mean; 1
    where all have the same. ``save_memory_nbytes``: host memory of the rank that needs most, beside
    its state, in ``holdfast.save``; ``capture_memory_nbytes``: in an ``async_save`` that copies the
    state at once. ``save_s`` and ``load_s`` are None where no rate is known, costs where no price
    is. Of a storage without requests, they count writes and reads.
    ``notes``: what it is not to be compared with."""

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
    """Plan all of it; nothing is read or written at ``uri``, whose driver alone is asked what it is
    good at. Raises UsageError as :func:`.fleet.planned_fleet` does, and for no ranks; UriError."""
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
    """What the job is not to be compared with."""
    if not isinstance(workload, Mlperf):
        return ()
    subset = subset_note(workload, world)
    return () if subset is None else (subset,)


def _save_requests(fleet: Fleet, shape: UploadShape) -> Requests:
    sizes = [rank.image_nbytes for rank in fleet.ranks]
    puts = sum(map(shape.puts, sizes)) + 1  # the manifest is put whole
    return Requests(puts, sum(map(shape.looks, sizes)))


def _load_requests(fleet: Fleet, host_ranks: int) -> Requests:
    """Of a load into the same layout; the manifest is read once per host."""
    hosts = ceil_div(len(fleet.ranks), host_ranks)
    return Requests(0, fleet.reads + hosts)


def _memory_nbytes(ranks: Sequence[RankPlan], traits: Traits, budget_nbytes: int | None) -> int:
    chunks = max(rank.chunks for rank in ranks)
    most = chunks_nbytes(chunks, CHUNK_NBYTES, traits, budget_nbytes)
    return min(most, chunks * CHUNK_NBYTES) + traits.upload_nbytes


def encoded(found: Forecast) -> str:
    """As JSON (``docs/reference/bench.md``)."""
    return json.dumps({"version": VERSION, **asdict(found)}, indent=1)
