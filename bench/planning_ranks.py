"""The ranks of a large job, simulated: their messages at the start of a save and at its commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from ..planner.layout import MeshLayout
from ..planner.placement import Replicated, Split, holders, local_pieces, local_shape
from ..storage.format.digest import digest
from ..storage.format.fragment import Fragment, Group, StateLayout
from ..storage.operations.rounds import Findings, SaveStatement
from ..storage.operations.saving.global_plan import GlobalPlan, Route
from ..storage.operations.saving.plan_leader import Held, PlanLeader
from ..storage.ranks.messages import codec
from ..storage.state.flat_state import FlatState
from ..storage.state.flattening.flatten import flatten
from ..storage.state.plan import Agreed, plan_image
from .llama import RNG_NBYTES, Job, placement_of
from .simulated.fleet import HEAD, HOST_RANKS, fragment_told

__all__ = [
    "URI",
    "Beginning",
    "agreed_by_mesh",
    "fragments_by_twins",
    "fragments_of",
]

URI = "s3://bucket/run/step-100"
_Kind = tuple[tuple[int, ...], tuple[Replicated | Split, ...]]


def agreed_by_mesh(flat: FlatState) -> Agreed:
    """Return the job's agreement: all tensors are laid out by their mesh, and the random
    state is each rank's own."""
    return Agreed({row: layout.holders or () for row, layout in enumerate(flat.layouts)}, {})


class _Stage:
    """The ranks of one pipeline stage, which hold the same tensors. Their state is flattened once
    and moved from rank to rank."""

    def __init__(self, job: Job, rank: int) -> None:
        self._flat = flatten(job.state(rank))
        first = rank // (job.tp * job.dp) * job.tp * job.dp
        self._ranks = np.arange(first, first + job.tp * job.dp).reshape(job.shape)
        self._layout: StateLayout | None = None
        self._parts = dict[object, MeshLayout]()
        self._kinds = dict[_Kind, int]()  # layers repeat, so there are few kinds
        self._kind = [self._kind_of(row) for row in range(len(self._flat.names))]
        self.kind = (tuple(self._kinds), tuple(self._kind))
        """Key shared by stages that differ only in names."""

    def _kind_of(self, row: int) -> int | None:
        flat = self._flat
        if flat.layouts[row].holders is None:
            return None
        placements = tuple(placement_of(p) for p in flat.origins[row].placements)  # type: ignore[union-attr]
        return self._kinds.setdefault((flat.shapes[row], placements), len(self._kinds))

    def at(self, rank: int) -> FlatState:
        """Return the flat state of ``rank``."""
        at = tuple(int(n) for n in np.argwhere(self._ranks == rank)[0])
        layouts = [self._located(shape, at, placements) for shape, placements in self._kinds]
        moved_layouts = list(self._flat.layouts)
        for row, kind in enumerate(self._kind):
            if kind is not None:
                moved_layouts[row] = layouts[kind]
        moved = replace(self._flat, layouts=moved_layouts, layout_id=None)
        for value in moved.tree.values:
            if value.key == "position":
                value.by_rank = [([0], 1000 + rank)]
        return moved

    def _located(
        self,
        shape: tuple[int, ...],
        at: tuple[int, ...],
        placements: tuple[Replicated | Split, ...],
    ) -> MeshLayout:
        """Return the layout at a mesh position. The coordinate on a replicating axis does not
        matter."""
        at = tuple(
            0 if isinstance(p, Replicated) else n for n, p in zip(at, placements, strict=True)
        )
        part = self._parts.get((shape, at, placements))
        if part is None:
            pieces = tuple(local_pieces(shape, self._ranks.shape, at, placements))
            local = local_shape(shape, self._ranks.shape, at, placements)
            part = MeshLayout(
                shape, pieces, local, holders(self._ranks, at, placements), self._ranks.size
            )
            self._parts[shape, at, placements] = part
        return part

    def told(self, rank: int, moved: FlatState) -> Fragment:
        """Return the fragment of ``rank``."""
        plan = plan_image(moved, rank, agreed_by_mesh(moved))
        self._layout = self._layout or plan.reported
        # The layout is the same for all ranks, and is encoded once.
        return fragment_told(replace(plan, reported=self._layout), rank, moved)


def fragments_of(
    job: Job, expected: Mapping[int, bytes], stating: Callable[[int, FlatState], object]
) -> Iterator[Fragment]:
    """Yield the fragments of all ranks, and pass their flat states to ``stating``. Raises
    AssertionError if a fragment differs from the expected one."""
    for first in range(0, job.world, job.tp * job.dp):
        stage = _Stage(job, first)
        for rank in range(first, first + job.tp * job.dp):
            flat = stage.at(rank)
            told = stage.told(rank, flat)
            if rank in expected and told.encode() != expected[rank]:
                raise AssertionError(
                    "a rank that was moved tells something else than one that was made"
                )
            stating(rank, flat)
            yield told


class Beginning:
    """The messages of ranks at the start of a save, and their handling by the leader."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.first: list[bytes] = []
        self._compared: list[bytes] = []
        self.again: list[bytes] = []
        self._statement = codec(SaveStatement)
        self._findings = codec(Findings)

    def state(self, rank: int, flat: FlatState) -> None:
        """Add a rank's messages for a first save and for the next one. Each tensor lies on a mesh,
        except the random state."""
        held = Held.of(flat, rank, self._job.world)
        row = int(np.flatnonzero(held.mesh < 0)[0])
        fingerprint = digest(b"%d" % rank)
        route = Route([rank], [rank])
        plan = GlobalPlan(b"0" * 16, Agreed({}, {}), {}, {held.names[row]: row}, route)
        findings = Findings((row,), fingerprint, (RNG_NBYTES,), {})
        holdings = held.encode(f"host {rank // HOST_RANKS}")
        self.first.append(self._statement.encode(SaveStatement(URI, holdings=holdings)))
        self._compared.append(self._findings.encode(findings))
        followed = plan.followed({row: fingerprint})
        self.again.append(self._statement.encode(SaveStatement(URI, followed)))

    async def lead(self) -> tuple[float, float]:
        """Return the leader's seconds for a first save and for the next one."""
        leader = PlanLeader()
        began_s = time.process_time()
        await leader.agree([self._statement.decode(data, "a statement") for data in self.first])
        await leader.decide([self._findings.decode(data, "findings") for data in self._compared])
        between_s = time.process_time()
        again = [self._statement.decode(data, "a statement") for data in self.again]
        if not (await leader.agree(again)).plan:
            raise AssertionError("the ranks do not follow their plan")
        return between_s - began_s, time.process_time() - between_s


def fragments_by_twins(job: Job) -> Iterator[Fragment]:
    """Yield the fragments of all ranks of a job that is too large to plan for each.

    Stages with the same number of layers differ only in names, so the plans of the first one serve
    for the others. Their bytes may be off by a page, where a header is longer.
    """
    size = job.tp * job.dp
    known = dict[object, list[Group]]()
    for first in range(0, job.world, size):
        stage = _Stage(job, first)
        one = stage.told(first, stage.at(first)).groups[0]
        if stage.kind not in known:
            known[stage.kind] = [
                stage.told(first + i, stage.at(first + i)).groups[0] for i in range(size)
            ]
        for i, group in enumerate(known[stage.kind]):
            ranks = np.array([first + i])
            values = [[([first + i], by[0][1])] for by in group.values]
            images = replace(group.images, rank=ranks)
            yield Fragment(
                HEAD, [replace(group, layout=one.layout, ranks=ranks, images=images, values=values)]
            )
