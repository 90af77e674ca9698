"""The ranks of a training of Llama-3 405B: their states without data, and their messages at commit.

Besides the bf16 weights a state has the fp32 master copy and two moments of Adam, and a random
state and a data position that differ from rank to rank. Memory for the tensors is allocated but
never touched, so it costs only address space.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ..planner.layout import MeshLayout
from ..planner.placement import Replicated, Split, holders, local_pieces, local_shape
from ..storage.format.fragment import Fragment, Group, StateLayout
from ..storage.state.flat_state import FlatState
from ..storage.state.flattening.flatten import flatten
from ..storage.state.plan import Agreed, plan_image
from .simulated.fleet import HEAD, fragment_told
from .workloads.llama_dimensions import LLAMA3, Llama
from .workloads.sized import MASTER_AND_MOMENTS

__all__ = ["KINDS", "MODEL", "TINY", "Job", "agreed_by_mesh", "fragments"]

KINDS = ("ZeRO-1", "ZeRO-3", "HSDP")
RNG_NBYTES = 5056
"""Size of the state of torch's generator."""
SHARD_GROUP_MAX = 16
"""HSDP shards within groups of at most this many data-parallel ranks, and replicates across
groups."""


_Kind = tuple[tuple[int, ...], tuple[Replicated | Split, ...]]
MODEL = LLAMA3["llama3-405b"]
TINY = Llama(layers=4, hidden=256, ffn=512, kv=64, vocab=1000)


@dataclass(frozen=True)
class Job:
    """A training job: the model on ``tp`` x ``pp`` x ``dp`` ranks. Ranks of one tensor-parallel
    group are neighbours.

    ``kind`` selects what data parallelism splits: the optimizer (ZeRO-1), the whole state (ZeRO-3),
    or the whole state within groups of ranks that replicate each other (HSDP).
    """

    model: Llama
    kind: str
    tp: int
    pp: int
    dp: int

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Mesh of one pipeline stage: replicas, data-parallel shards, tensor parallelism."""
        if self.kind == "HSDP":
            split = max(n for n in range(1, SHARD_GROUP_MAX + 1) if self.dp % n == 0)
        else:
            split = self.dp
        return self.dp // split, split, self.tp

    def mesh(self, rank: int) -> DeviceMesh:
        """Return the mesh of the stage of ``rank`` as that rank sees it, without communication."""
        size = self.tp * self.dp
        ranks = torch.arange(rank // size * size, (rank // size + 1) * size).reshape(self.shape)
        return DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank)

    def state(self, rank: int, mesh: DeviceMesh | None = None) -> dict[str, Any]:
        """Return the state that ``rank`` saves."""
        mesh = mesh or self.mesh(rank)
        parameters = dict(self.model.stage(rank // (self.tp * self.dp), self.pp))
        split_weights = self.kind != "ZeRO-1"
        weights = {}
        moments = {}
        for name, shape in parameters.items():
            placements = self._placements(name, split_weights)
            weights[name] = _part(mesh, shape, placements, torch.bfloat16)
            placements = self._placements(name, True)
            moments[name] = {
                k: _part(mesh, shape, placements, torch.float32) for k in MASTER_AND_MOMENTS
            }
        return {
            "model": weights,
            "optim": moments,
            "step": 100,
            "rng": torch.empty(RNG_NBYTES, dtype=torch.uint8),
            "data": {"epoch": 1, "position": 1000 + rank},
        }

    def _placements(self, name: str, split: bool) -> Sequence[Placement]:
        if "norm" in name:
            return [Replicate(), Shard(0) if split else Replicate(), Replicate()]
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            over = 1
        else:
            over = 0
        if over:
            rows: Placement = Shard(0)
        else:
            rows = _StridedShard(0, split_factor=self.tp)
        return [Replicate(), rows if split else Replicate(), Shard(over)]


def _part(
    mesh: DeviceMesh, shape: tuple[int, ...], placements: Sequence[Placement], dtype: torch.dtype
) -> DTensor:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    local = local_shape(
        shape, tuple(mesh.shape), coordinate, [_placement_of(placement) for placement in placements]
    )
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(
        torch.empty(local, dtype=dtype),
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )


def _placement_of(placement: Placement) -> Replicated | Split:
    """Convert torch's placement to the planner's."""
    if isinstance(placement, Replicate):
        return Replicated()
    return Split(placement.dim, getattr(placement, "split_factor", 1))  # type: ignore[attr-defined]


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
        placements = tuple(_placement_of(p) for p in flat.origins[row].placements)  # type: ignore[union-attr]
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


def fragments(job: Job) -> Iterator[Fragment]:
    """Yield the fragments of all ranks of a job.

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
