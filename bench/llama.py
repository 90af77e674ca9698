"""The state of each rank in a training of Llama-3 405B: names, shapes and placements, without data.

Besides the bf16 weights it has the fp32 master copy and two moments of Adam, and a random state and
a data position that differ from rank to rank. Memory for the tensors is allocated but never
touched, so it costs only address space.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ..planner.placement import Replicated, Split, local_shape
from .workloads.llama_dimensions import LLAMA3, Llama
from .workloads.sized import MASTER_AND_MOMENTS

__all__ = ["KINDS", "MODEL", "RNG_NBYTES", "TINY", "Job", "placement_of"]

KINDS = ("ZeRO-1", "ZeRO-3", "HSDP")
RNG_NBYTES = 5056
"""Size of the state of torch's generator."""
SHARD_GROUP_MAX = 16
"""HSDP shards within groups of at most this many data-parallel ranks, and replicates across
groups."""


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
        shape, tuple(mesh.shape), coordinate, [placement_of(placement) for placement in placements]
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


def placement_of(placement: Placement) -> Replicated | Split:
    """Convert torch's placement to the planner's."""
    if isinstance(placement, Replicate):
        return Replicated()
    return Split(placement.dim, getattr(placement, "split_factor", 1))  # type: ignore[attr-defined]
