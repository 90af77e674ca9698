"""Dry runs: the phases of a measurement with their bytes, requests and times, without running
any."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from ...core.units import ceil_div, round_up
from ...drivers.contract import Traits
from ...errors import UsageError
from ...planner.image import PAGE_NBYTES
from ..alone.transfer import preferred
from ..measured.plan import Plan, check_here
from ..measured.result import READ_LIMIT, WRITE_LIMIT
from ..prices import Prices, Requests
from ..traits import traits_of
from .fleet import RankPlan, planned_fleet
from .rates import Rates
from .requests import UploadShape, upload_shape

__all__ = ["MOVES", "DryRun", "PhasePlan", "dry_run", "encoded"]

VERSION = 1
MOVES = {
    WRITE_LIMIT: "write",
    "save": "write",
    "async save": "write",
    "overwrite": "write",
    READ_LIMIT: "read",
    "load": "read",
    "verify": "read",
    "prune": "neither",
    "delete": "neither",
}
"""Direction of each phase's transfers in a measurement by one process."""


@dataclass(frozen=True)
class PhasePlan:
    """A phase that runs ``times`` times and moves ``nbytes`` each time. ``seconds`` covers all
    times; None if no rate is known."""

    name: str
    times: int
    nbytes: int
    written_nbytes: int
    read_nbytes: int
    requests: Requests
    seconds: float | None


@dataclass(frozen=True)
class DryRun:
    """A planned measurement.

    ``refusal`` is the reason why this host would refuse it, or None. ``memory_nbytes`` is the host
    memory that it needs, ``stored_nbytes`` the greatest storage space, and ``rest_s`` the total
    rest of the storage.
    """

    uri: str
    workload: str
    content: str
    runs: int
    state_nbytes: int
    tensors: int
    phases: tuple[PhasePlan, ...]
    memory_nbytes: int
    stored_nbytes: int
    rest_s: float
    refusal: str | None
    cost_usd: float | None

    @property
    def written_nbytes(self) -> int:
        """Total bytes written."""
        return sum(phase.written_nbytes for phase in self.phases)

    @property
    def read_nbytes(self) -> int:
        """Total bytes read."""
        return sum(phase.read_nbytes for phase in self.phases)

    @property
    def requests(self) -> Requests:
        """Total requests."""
        return sum((phase.requests for phase in self.phases), Requests(0, 0))

    @property
    def seconds(self) -> float | None:
        """Total time of phases and rests, without building the state; None if no rate is known."""
        known = [phase.seconds for phase in self.phases if phase.seconds is not None]
        if not known:
            return None
        return sum(known) + self.rest_s


def dry_run(plan: Plan, rates: Rates, prices: Prices | None) -> DryRun:
    """Describe the measurement of ``plan`` without touching its storage. Raises UriError, and
    UsageError if there is no state or no round."""
    if plan.runs < 1:
        raise UsageError(f"{plan.runs} rounds measure nothing", advice="Give --runs 5.")
    uri = plan.parsed
    traits = traits_of(uri)
    fleet = planned_fleet(plan.saved, 1, 1, traits.piece_nbytes)
    moves = _Moves(fleet.ranks[0], traits, upload_shape(uri, traits), rates)
    phases = tuple(_phases(plan.runs, moves))
    requests = sum((phase.requests for phase in phases), Requests(0, 0))
    return DryRun(
        uri=uri.redacted,
        workload=plan.saved.name,
        content=plan.content.name,
        runs=plan.runs,
        state_nbytes=fleet.ranks[0].state_nbytes,
        tensors=fleet.tensors,
        phases=phases,
        memory_nbytes=plan.memory_nbytes,
        stored_nbytes=plan.stored_nbytes,
        rest_s=plan.settle_s * plan.runs * sum(move != "neither" for move in MOVES.values()),
        refusal=_refusal(plan),
        cost_usd=None if prices is None else prices.cost_usd(requests),
    )


def _refusal(plan: Plan) -> str | None:
    try:
        check_here(plan)
    except UsageError as error:
        return str(error)
    return None


def _phases(runs: int, moves: _Moves) -> Iterator[PhasePlan]:
    """Yield the first save, whose checkpoint the loads read, and then the phases in order. A later
    step is saved before the prune."""
    yield replace(moves.phase("save", 1), name="first save")
    for name, move in MOVES.items():
        if name == "prune":
            yield replace(moves.phase("save", 1), name="last save")
        yield moves.phase(name, 1 if move == "neither" else runs)


@dataclass(frozen=True)
class _Moves:
    """Costs of one round of a phase."""

    rank: RankPlan
    traits: Traits
    shape: UploadShape
    rates: Rates

    def phase(self, name: str, times: int) -> PhasePlan:
        """Return the plan of a phase that runs ``times`` times."""
        move = MOVES[name]
        nbytes = self.rank.image_nbytes
        seconds = None
        if move == "write":
            seconds = self.rates.save.seconds([nbytes], 1)
        elif move == "read":
            seconds = self.rates.load.seconds([nbytes], 1)
        return PhasePlan(
            name=name,
            times=times,
            nbytes=self.rank.state_nbytes,
            written_nbytes=nbytes * times * (move == "write"),
            read_nbytes=nbytes * times * (move == "read"),
            requests=self._requests(name).times(times),
            seconds=None if seconds is None else seconds * times,
        )

    def _requests(self, name: str) -> Requests:
        """Return the requests of one round. Deletes are free wherever requests cost money. The
        client of the limit is assumed to use the driver's part size."""
        image_nbytes = self.rank.image_nbytes
        alone_nbytes = round_up(self.rank.state_nbytes, PAGE_NBYTES)
        if name == WRITE_LIMIT:
            # No leader checks the size before a commit.
            looks = max(0, self.shape.looks(alone_nbytes) - 1)
            return Requests(self.shape.puts(alone_nbytes), looks)
        if name == READ_LIMIT:
            return Requests(0, ceil_div(alone_nbytes, preferred(self.traits).part_nbytes))
        if MOVES[name] == "write":
            return Requests(self.shape.puts(image_nbytes) + 1, self.shape.looks(image_nbytes))
        if MOVES[name] == "read":
            return Requests(0, self.rank.reads + 1)
        return Requests(0, 0)


def encoded(found: DryRun) -> str:
    """Return a dry run as JSON (``docs/reference/bench.md``)."""
    fields = asdict(found)
    totals = {
        "written_nbytes": found.written_nbytes,
        "read_nbytes": found.read_nbytes,
        "requests": asdict(found.requests),
        "seconds": found.seconds,
    }
    return json.dumps({"version": VERSION, **fields, **totals}, indent=1)
