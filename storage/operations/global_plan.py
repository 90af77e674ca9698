"""The global plan of a save: which ranks hold the same tensors, and which rank writes which share.

A rank knows which ranks hold its part of a DTensor that lies on a mesh of the whole job. All other
tensors (plain tensors, and DTensors on a mesh of some ranks, which another mesh may hold too) have
a *label*. Ranks with the same label hold either the same tensor, or different tensors under one
name; digests of the bytes tell which. The ranks make the plan in two rounds:

    agree      each rank states what it holds, by labels; the leader chooses the labels to compare:
               those of plain tensors, and of parts of DTensors that several groups of ranks hold
    digests    each rank digests what is compared; the leader finds which ranks hold the same, and
               divides the writing among them (:mod:`.plan_leader`)

The plan also says how fragments get to the leader: the ranks of a host send theirs to the first of
them, which sends the leader the fragments of all of them. Therefore ranks state their host in the
first round.

A rank keeps the plan. At the next save of a state with the same layout it states only that it
follows the plan, with one digest of all tensors that were identical on each group of ranks. If all
ranks do, and what was identical still is, nothing is left to be decided: the leader looks nothing
up, and its verdict is a few bytes. Otherwise it asks all ranks to state everything. Layouts are not
sent again either, see ``GlobalPlan.sent_layouts``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ...core.lru import LruCache
from ...planner.balance import Group
from ..format.digest import digest
from ..format.fragment import StateLayout
from ..ranks.hosts import numbers_in, ranks_with
from ..ranks.team import Team
from ..runtime.engine import offload
from ..state.divergence import warn_divergent
from ..state.fingerprint import label, unsure_rows
from ..state.flat_state import FlatState
from ..state.placeholders import reported_placeholders
from ..state.plan import Agreed
from .held import Held, row_nbytes
from .plan_leader import ALL_RANKS, PlanLeader
from .rounds import AGREE, DIGESTS, HOLDS, Findings, PlanDecision, PlanFollowed, SaveStatement

__all__ = ["Digest", "GlobalPlan", "GlobalPlans", "Route", "agree"]

Ints = npt.NDArray[np.int64]
Digest = Callable[[Sequence[int]], Mapping[int, bytes]]
"""Digests rows of the state. Not called on the event loop's thread."""


@dataclass(frozen=True)
class Route:
    """How the fragment of a rank gets to the leader. ``host_ranks``: ranks of its host, itself
    among them, of which the first sends the fragments of all; the leader's host has no need for
    that. ``speakers``: the ranks that send to the leader: those of its own host, and the first of
    each other host. Both ascending."""

    host_ranks: Sequence[int]
    speakers: Sequence[int]

    @classmethod
    def of(cls, rank: int, hosts: Ints) -> Route:
        """The route of ``rank``, by a number of each rank's host."""
        first_of_hosts = np.unique(hosts, return_index=True)[1]
        speakers = np.union1d(ranks_with(0, hosts), first_of_hosts).tolist()
        if hosts[rank] == hosts[0]:
            return cls([rank], speakers)
        return cls(ranks_with(rank, hosts), speakers)


@dataclass(frozen=True, eq=False)
class GlobalPlan:
    """The global plan as one rank keeps it. ``id`` is the same on all ranks, and no other plan has
    it. ``identical``: rows that were the same wherever they are held, by a name of the group of
    ranks that hold them. ``divergent``: rows that differed.

    ``sent_layouts``: keys of the layouts that this rank need not send again. Their receiver has
    them in its ``received_layouts``: a save by this plan has sent them and was committed, and the
    receiver has followed this plan ever since, or it would be another plan.
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
        """The plan of a rank without peers."""
        return cls(b"", Agreed({}, {}), {}, {}, Route([rank], [rank]))

    @property
    def rows(self) -> list[int]:
        """The rows that are digested at each save."""
        return [
            *(row for rows in self.identical.values() for row in rows),
            *self.divergent.values(),
        ]

    def followed(self, digests: Mapping[int, bytes]) -> PlanFollowed:
        """The statement of a rank that follows this plan."""
        identical = {
            name: digest(b"".join(digests[row] for row in rows))
            for name, rows in self.identical.items()
        }
        divergent = {name: digests[row] for name, row in self.divergent.items()}
        return PlanFollowed(self.id, identical, divergent)


GlobalPlans = LruCache[GlobalPlan]
"""The global plans of one process, by what they follow from."""


async def agree(
    team: Team,
    uri: str,
    flat: FlatState,
    digests: Digest,
    plans: GlobalPlans,
    compression: str | None = None,
) -> GlobalPlan:
    """Agree with the other ranks on a global plan. Every rank of a team of several calls this.

    The storage is not used: trainers wait for the copies that begin when this returns.

    Raises UsageError where ranks save to different URIs or compress differently, StateError where
    the tensors of all ranks are placeholders, SaveError where ranks hold different values of one
    part of a DTensor.
    """
    key = (flat.layout_id, team.rank, team.world)
    plan: GlobalPlan | None = None
    if flat.layout_id is not None:
        plan = plans.get(key)
    held: Held | None = None
    if plan is None:
        held = Held.of(flat, team.rank, team.world)
    leader = PlanLeader()
    verdict = await team.round(
        AGREE, await _statement(team, uri, flat, digests, plan, held, compression), leader.agree
    )
    if plan is not None and verdict.plan:
        return plan
    if held is None:
        held = Held.of(flat, team.rank, team.world)
    comparison = verdict.comparison
    if comparison is None:
        comparison = await team.round(HOLDS, held.encode(team.host), leader.choose_labels)
    plan = await _new_plan(team, flat, held.names, digests, set(comparison.labels), leader)
    if flat.layout_id is not None:
        plans.put(key, plan)
    return plan


async def _statement(
    team: Team,
    uri: str,
    flat: FlatState,
    digests: Digest,
    plan: GlobalPlan | None,
    held: Held | None,
    compression: str | None,
) -> SaveStatement:
    placeholders = reported_placeholders(flat)
    return SaveStatement(
        uri,
        plan=None if plan is None else plan.followed(await offload(digests, plan.rows)),
        holdings=None if held is None else held.encode(team.host),
        compression=compression,
        placeholders=None if placeholders is None else dict(placeholders),
    )


async def _new_plan(
    team: Team,
    flat: FlatState,
    names: Sequence[str],
    digests: Digest,
    compared: Set[str],
    leader: PlanLeader,
) -> GlobalPlan:
    """Digest the rows that are compared, and return the plan that results. ``names``: the labels of
    the rows that this rank holds."""
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
    """The plan for the rows that were compared, by label."""
    groups = [*decision.groups, tuple(range(team.world))]  # the last one has number ALL_RANKS
    holders: dict[int, Group] = {}
    identical: defaultdict[str, list[int]] = defaultdict(list)
    divergent: dict[str, int] = {}
    # Sorted, so that all ranks that hold the same digest it in one order.
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
