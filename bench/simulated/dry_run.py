"""Dry runs: the phases of a measurement with their bytes, requests and times, without running
any."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ...core.units import ceil_div, round_up
from ...drivers.contract import Traits
from ...errors import UsageError
from ...planner.image import PAGE_NBYTES
from ..alone.transfer import preferred
from ..measured.plan import Plan, check_here, check_runs
from ..measured.result import DELETING, LIMITS, PHASES, READ_LIMIT, WRITE_LIMIT
from ..prices import Requests
from ..traits import traits_of
from .fleet import RankPlan, planned_fleet
from .forecast import Rates, UploadShape, upload_shape

__all__ = ["dry_run"]

VERSION = 1


def dry_run(plan: Plan, rates: Rates) -> dict[str, Any]:
    """Return a description of the measurement of ``plan`` by one process
    (``docs/reference/bench.md``), without touching its storage. Raises UriError, and UsageError if
    there is no state or no round."""
    check_runs(plan.runs)
    uri = plan.parsed
    traits = traits_of(uri)
    fleet = planned_fleet(plan.saved, 1, 1, traits.piece_nbytes)
    (rank,) = fleet.ranks
    shape = upload_shape(uri, traits)
    phases: list[dict[str, Any]] = []
    repeated = [name for name in PHASES if name not in (*DELETING, "reshard")]
    # The loads read the checkpoint of the first save. A later step is saved before the prune.
    entries = [
        ("first save", "save", 1),
        *[(name, name, plan.runs) for name in repeated],
        ("last save", "save", 1),
        *[(name, name, 1) for name in DELETING],
    ]
    for title, name, times in entries:
        limit = LIMITS.get(name, name)
        writes, reads = limit == WRITE_LIMIT, limit == READ_LIMIT
        move = rates.save if writes else rates.load
        seconds = move.seconds([rank.image_nbytes], 1) if writes or reads else None
        phases.append(
            {
                "name": title,
                "times": times,
                "nbytes": rank.state_nbytes,
                "written_nbytes": rank.image_nbytes * times * writes,
                "read_nbytes": rank.image_nbytes * times * reads,
                "requests": asdict(_requests(name, rank, shape, traits).times(times)),
                "seconds": None if seconds is None else seconds * times,
            }
        )
    totals = {
        name: sum(phase[name] for phase in phases) for name in ("written_nbytes", "read_nbytes")
    }
    requests = Requests(
        sum(phase["requests"]["puts"] for phase in phases),
        sum(phase["requests"]["gets"] for phase in phases),
    )
    known_s = [phase["seconds"] for phase in phases if phase["seconds"] is not None]
    rest_s = plan.settle_s * plan.runs * len(repeated)
    return {
        "version": VERSION,
        "uri": uri.redacted,
        "workload": plan.saved.name,
        "content": plan.content.name,
        "runs": plan.runs,
        "state_nbytes": rank.state_nbytes,
        "tensors": fleet.tensors,
        "phases": phases,
        "memory_nbytes": plan.memory_nbytes,
        "stored_nbytes": plan.stored_nbytes,
        "rest_s": rest_s,
        "refusal": _refusal(plan),
        "cost_usd": None if plan.prices is None else plan.prices.cost_usd(requests),
        **totals,
        "requests": asdict(requests),
        "seconds": sum(known_s) + rest_s if known_s else None,
    }


def _refusal(plan: Plan) -> str | None:
    """Return the reason why this host would refuse the measurement, or None."""
    try:
        check_here(plan)
    except UsageError as error:
        return str(error)
    return None


def _requests(name: str, rank: RankPlan, shape: UploadShape, traits: Traits) -> Requests:
    """Return the requests of one round. Deletes are free wherever requests cost money. The client
    of the limit is assumed to use the driver's part size."""
    alone_nbytes = round_up(rank.state_nbytes, PAGE_NBYTES)
    if name == WRITE_LIMIT:
        # No leader checks the size before a commit.
        return Requests(shape.puts(alone_nbytes), max(0, shape.looks(alone_nbytes) - 1))
    if name == READ_LIMIT:
        return Requests(0, ceil_div(alone_nbytes, preferred(traits).part_nbytes))
    if LIMITS.get(name) == WRITE_LIMIT:
        return Requests(shape.puts(rank.image_nbytes) + 1, shape.looks(rank.image_nbytes))
    if LIMITS.get(name) == READ_LIMIT:
        return Requests(0, rank.reads + 1)
    return Requests(0, 0)
