"""The global plan of a save: which ranks hold the same tensors, and which rank writes which share.

For a DTensor on a mesh of the whole job, a rank knows which ranks hold its part. All other
tensors (plain tensors, and DTensors on a mesh of some ranks, which another mesh may hold too) have
a *label*. Ranks with the same label hold either the same tensor, or different tensors under one
name; digests of the bytes decide. The ranks make the plan in two rounds:

    agree      each rank states its labels; the leader chooses the labels to compare: those of
               plain tensors, and of parts of DTensors that several groups of ranks hold
    digests    each rank digests the compared tensors; the leader finds which ranks hold the same
               bytes, and divides the writing among them (:mod:`.plan_leader`)

The plan also routes fragments to the leader: the ranks of a host send theirs to the host's first
rank, which forwards all of them. Therefore ranks state their host in the first round.

Ranks keep the plan. At the next save of a state with the same layout, a rank only states that it
follows the plan, with one digest per group of ranks over the tensors that were identical there. If
all ranks follow it and the digests still agree, nothing is left to decide, and the verdict is a
few bytes. Otherwise the leader asks all ranks for full statements. Layouts are not sent again
either, see ``GlobalPlan.sent_layouts``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ....core.lru import LruCache
from ....planner.balance import Group
from ...format.digest import digest
from ...format.fragment import StateLayout
from ...ranks.hosts import numbers_in, ranks_with
from ...ranks.team import Team
from ...runtime.engine import offload
from ...state.divergence import warn_divergent
from ...state.fingerprint import label, unsure_rows
from ...state.flat_state import FlatState
from ...state.plan import Agreed
from ..rounds import (
    AGREE,
    DIGESTS,
    HOLDS,
    Findings,
    PlanDecision,
    PlanFollowed,
    SaveStatement,
)
from .plan_leader import ALL_RANKS, PlanLeader, label_names, row_nbytes, statement_of

Ints = npt.NDArray[np.int64]
Digest = Callable[[Sequence[int]], Mapping[int, bytes]]
"""Digests rows of the state. Not called on the event loop's thread."""


@dataclass(frozen=True)
class Route:
    """The path of a rank's fragment to the leader. Both lists are ascending.

    ``host_ranks``: the ranks of its host, the first of which forwards the fragments of all; only
    the rank itself on the leader's host. ``speakers``: the ranks that send to the leader: all of
    its own host, and the first of each other host. ``sharing``: number of ranks on its host.
    """

    host_ranks: Sequence[int]
    speakers: Sequence[int]
    sharing: int = 1

    @classmethod
    def of(cls, rank: int, hosts: Ints) -> Route:
        """Return the route of ``rank``, given each rank's host number."""
        first_of_hosts = np.unique(hosts, return_index=True)[1]
        speakers = np.union1d(ranks_with(0, hosts), first_of_hosts).tolist()
        sharing = ranks_with(rank, hosts)
        host_ranks = [rank] if hosts[rank] == hosts[0] else sharing
        return cls(host_ranks, speakers, len(sharing))


@dataclass(frozen=True, eq=False)
class GlobalPlan:
    """The global plan as kept by one rank.

    ``id`` is equal on all ranks and unique to the plan. ``identical``: rows that were equal
    wherever they are held, by group of ranks. ``divergent``: rows that differed.

    ``sent_layouts``: keys of layouts that need not be sent again. The receiver has them in its
    ``received_layouts``: a committed save under this plan sent them, and the receiver has followed
    the plan ever since; otherwise it would be a different plan.
    """

    id: bytes
    agreed: Agreed
    identical: Mapping[str, Sequence[int]]
    divergent: Mapping[str, int]
    route: Route
    received_layouts: dict[bytes, StateLayout] = field(default_factory=dict)
    sent_layouts: set[bytes] = field(default_factory=set)

    @classmethod
    def alone(cls, rank: int) -> GlobalPlan:
        """Return the plan of a rank without peers."""
        return cls(b"", Agreed({}, {}), {}, {}, Route([rank], [rank]))

    @property
    def rows(self) -> list[int]:
        """The rows to digest at each save."""
        return [
            *(row for rows in self.identical.values() for row in rows),
            *self.divergent.values(),
        ]

    def followed(self, digests: Mapping[int, bytes]) -> PlanFollowed:
        """Return the statement of a rank that follows this plan."""
        identical = {
            name: digest(b"".join(digests[row] for row in rows))
            for name, rows in self.identical.items()
        }
        divergent = {name: digests[row] for name, row in self.divergent.items()}
        return PlanFollowed(self.id, identical, divergent)


GlobalPlans = LruCache[GlobalPlan]
"""The global plans of one process, by layout, rank and world."""


async def agree(
    team: Team,
    uri: str,
    flat: FlatState,
    digests: Digest,
    plans: GlobalPlans,
    compression: str | None = None,
    overwrite: bool = True,
) -> GlobalPlan:
    """Agree with the other ranks on a global plan. Every rank of a team of several calls this.

    Does not use the storage: trainers wait for the copies that begin when this returns. Raises
    UsageError if ranks save to different URIs or with different options, StateError if the
    tensors of all ranks are placeholders, SaveError if ranks hold different values of one part of a
    DTensor.
    """
    key = (flat.layout_id, team.rank, team.world)
    plan = None if flat.layout_id is None else plans.get(key)
    held = None
    if plan is None:
        held = statement_of(flat, team.rank, team.world, team.host)
    leader = PlanLeader()
    statement = SaveStatement(
        uri,
        plan=None if plan is None else plan.followed(await offload(digests, plan.rows)),
        holdings=held,
        compression=compression,
        overwrite=overwrite,
        placeholders=dict(flat.placeholders) if flat.names else None,
    )
    verdict = await team.round(AGREE, statement, leader.agree)
    if plan is not None and verdict.plan:
        return plan
    if held is None:
        held = statement_of(flat, team.rank, team.world, team.host)
    comparison = verdict.comparison
    if comparison is None:
        comparison = await team.round(HOLDS, held, leader.choose_labels)
    plan = await _new_plan(
        team, flat, label_names(held.labels), digests, set(comparison.labels), leader
    )
    if flat.layout_id is not None:
        plans.put(key, plan)
    return plan


async def _new_plan(
    team: Team,
    flat: FlatState,
    names: Sequence[str],
    digests: Digest,
    compared: Set[str],
    leader: PlanLeader,
) -> GlobalPlan:
    """Digest the compared rows, of these labels; return the resulting plan."""
    rows = unsure_rows(flat, team.world)
    positions = [
        i for i, row in enumerate(rows) if flat.layouts[row].holders is None or names[i] in compared
    ]
    found = await offload(digests, [rows[i] for i in positions])
    findings = Findings(
        tuple(positions),
        b"".join(found[rows[i]] for i in positions),
        tuple(row_nbytes(flat, rows[i]) for i in positions),
        {names[i]: label(flat, rows[i]) for i in positions if names[i] in compared},
    )
    decision = await team.round(DIGESTS, findings, leader.decide)
    plan = _plan_of({names[i]: rows[i] for i in positions}, decision, team)
    holder_counts = {}
    for name, row in plan.divergent.items():
        first_rank, holder_count = decision.divergent[name]
        if first_rank == team.rank:
            holder_counts[row] = holder_count
    warn_divergent(flat, holder_counts, team.rank)
    return plan


def _plan_of(compared: Mapping[str, int], decision: PlanDecision, team: Team) -> GlobalPlan:
    groups = [*decision.groups, tuple(range(team.world))]  # the last one has number ALL_RANKS
    holders: dict[int, Group] = {}
    identical: defaultdict[str, list[int]] = defaultdict(list)
    divergent: dict[str, int] = {}
    # Sorted, so that all holders digest their rows in the same order.
    for name, row in sorted(compared.items()):
        number = decision.labels.get(name, ALL_RANKS)
        if number is None:
            holders[row] = ()
            divergent[name] = row
            continue
        holders[row] = groups[number]
        if len(groups[number]) > 1:
            identical[str(number)].append(row)
    route = Route.of(team.rank, numbers_in(decision.hosts))
    agreed = Agreed(holders, dict(decision.shares))
    return GlobalPlan(decision.id, agreed, identical, divergent, route)
