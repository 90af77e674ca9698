"""Plans a save for every rank of a job and merges the manifest, with the engine's own functions.

Planning needs names, shapes, dtypes and layouts only, so tensors are replaced by specs. Jobs of any
size can be planned in a process that could not hold, or even address, their tensors. The ranks'
reports to the committing leader have no digests of the data, which does not exist.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...errors import UsageError
from ...planner.image import DIGEST_NBYTES, ImageLayout
from ...planner.layout import Layout, MeshLayout, local_layout
from ...planner.placement import Split, local_pieces, local_shape
from ...storage.format.fragment import Fragment, StateLayout, fragment_of, join
from ...storage.format.merge import merge
from ...storage.format.tables import ImageTable
from ...storage.pipeline.chunks import chunks_to_write
from ...storage.state.dtypes import dtype_of
from ...storage.state.flat_state import FlatState
from ...storage.state.plan import Agreed, ImagePlan, plan_image
from ..workloads.spec import Spec, Workload, itemsize_of

HEAD = ("20260101T000000-00000000", 100, 0.0)
SHARDS_MAX = 8_000_000
"""Limit of shards to plan in one process. Merging the manifest of more takes gigabytes of
memory."""


@dataclass(frozen=True)
class RankPlan:
    """Plan of one rank's image.

    ``state_nbytes`` counts its tensors. ``image_nbytes`` counts its file with header and digests; 0
    if it writes none. ``reads`` counts the reads of a full load: one for each chunk with data, and
    one for the digests if chunks are not verified whole. ``plan_s`` is the processor time of the
    plan.
    """

    state_nbytes: int
    image_nbytes: int
    shards: int
    chunks: int
    reads: int
    plan_s: float


@dataclass(frozen=True)
class Fleet:
    """All ranks in order, and the manifest that their leader commits. ``tensors`` counts a sharded
    tensor once. ``merge_s`` is the processor time of the leader."""

    ranks: tuple[RankPlan, ...]
    tensors: int
    manifest_nbytes: int
    merge_s: float

    @property
    def shards(self) -> int:
        """Shards of all ranks."""
        return sum(rank.shards for rank in self.ranks)

    @property
    def chunks(self) -> int:
        """Chunks of all images."""
        return sum(rank.chunks for rank in self.ranks)

    @property
    def reads(self) -> int:
        """Reads of a load into the same layout."""
        return sum(rank.reads for rank in self.ranks)


def planned_fleet(workload: Workload, world: int, host_ranks: int, piece_nbytes: int = 0) -> Fleet:
    """Plan for all ``world`` ranks, with ``host_ranks`` on each host. ``piece_nbytes`` is the trait
    of the storage's driver.

    Raises UsageError if the workload is not defined for that many ranks, if no rank has anything to
    save, and if there are too many shards.
    """
    first = workload.specs(0, world)
    if len(first) * world > SHARDS_MAX:
        raise UsageError(
            f"{len(first):,} tensors on {world:,} ranks are more than {SHARDS_MAX:,} shards",
            advice="Give fewer --ranks.",
        )
    ranks: list[RankPlan] = []
    told = list(by_host(_fragments(workload, world, piece_nbytes, ranks), host_ranks))
    began_s = time.process_time()
    manifest = merge(told)
    manifest_nbytes = len(manifest.encode())
    merge_s = time.process_time() - began_s
    if not manifest.tensor_nbytes:
        raise UsageError("no rank has anything to save", advice="Give a larger workload.")
    return Fleet(tuple(ranks), len(manifest.tensors), manifest_nbytes, merge_s)


def _fragments(
    workload: Workload, world: int, piece_nbytes: int, ranks: list[RankPlan]
) -> Iterator[Fragment]:
    """Yield the ranks' reports in order, and append the plan of each to ``ranks``."""
    states = FlatStates(world)
    reported: StateLayout | None = None
    for rank in range(world):
        flat, agreed, is_alike = states.of(workload.specs(rank, world), rank)
        began_s = time.process_time()
        plan = plan_image(flat, rank, agreed)
        plan_s = time.process_time() - began_s
        if is_alike and reported is not None:
            plan = replace(plan, reported=reported)  # the reported layout is then encoded once
        reported = plan.reported
        ranks.append(_rank_plan(plan, piece_nbytes, plan_s))
        yield fragment_told(plan, rank, flat)


def _rank_plan(plan: ImagePlan, piece_nbytes: int, plan_s: float) -> RankPlan:
    chunks = chunks_to_write(plan.layout)
    return RankPlan(
        state_nbytes=int(plan.held.nbytes.sum()),
        image_nbytes=plan.layout.nbytes if chunks else 0,
        shards=len(plan.shards),
        chunks=chunks,
        reads=_reads(plan.layout, piece_nbytes) if chunks else 0,
        plan_s=plan_s,
    )


def _reads(layout: ImageLayout, piece_nbytes: int) -> int:
    """Return the reads of an image. Data that arrives in pieces is verified by piece, so its
    digests are read first."""
    skipped_chunks, rest_nbytes = divmod(len(layout.header), layout.chunk_nbytes)
    in_pieces = 0 < piece_nbytes < layout.hashed_end
    needs_digests = in_pieces or rest_nbytes >= layout.block_nbytes
    return layout.chunks - skipped_chunks + needs_digests


class FlatStates:
    """The flat states of the ranks of one job."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._specs: Sequence[Spec] = ()
        self._like = FlatState()

    def of(self, specs: Sequence[Spec], rank: int) -> tuple[FlatState, Agreed | None, bool]:
        """Return a rank's flat state, its agreement with the others (None if it is alone), and
        whether it has the same tensors as the rank of the previous call."""
        is_alike = specs == self._specs
        if not is_alike:
            self._specs = specs
            self._like = FlatState(
                names=[spec.name for spec in specs],
                containers=[0] * len(specs),
                shapes=[spec.shape for spec in specs],
                dtypes=[dtype_of(spec.dtype, itemsize_of(spec.dtype)) for spec in specs],
                alias=[-1] * len(specs),
            )
        flat = replace(self._like, layouts=self._layouts(specs, rank))
        return flat, self._agreed(specs, rank), is_alike

    def _agreed(self, specs: Sequence[Spec], rank: int) -> Agreed | None:
        if self._world == 1:
            return None
        # No other rank has a tensor of that name: the leader would find a group of one rank.
        own = {row: (rank,) for row, spec in enumerate(specs) if not spec.sharded}
        return Agreed(own, {})

    def _layouts(self, specs: Sequence[Spec], rank: int) -> list[Layout]:
        made: dict[tuple[int, ...], Layout] = {}  # layers repeat, so there are few shapes
        layouts: list[Layout] = []
        for spec in specs:
            if not spec.sharded or self._world == 1:
                layouts.append(local_layout(spec.shape))
                continue
            layout = made.get(spec.shape)
            if layout is None:
                layout = made[spec.shape] = self._split(spec.shape, rank)
            layouts.append(layout)
        return layouts

    def _split(self, shape: tuple[int, ...], rank: int) -> MeshLayout:
        where = (self._world,), (rank,), (Split(0),)
        pieces = tuple(local_pieces(shape, *where))
        return MeshLayout(shape, pieces, local_shape(shape, *where), (rank,), self._world)


def fragment_told(plan: ImagePlan, rank: int, flat: FlatState) -> Fragment:
    """Return the report of ``rank`` at commit, with empty digests."""
    images = int(len(plan.shards) > 0)  # a rank without bytes of its own writes no image
    digests = np.zeros((images * plan.layout.chunks, DIGEST_NBYTES), np.uint8)
    hashed = np.full(images, plan.layout.hashed_end, np.int64)
    table = ImageTable(np.full(images, rank, np.int64), hashed, digests)
    return fragment_of(HEAD, rank, plan.reported, plan.shards, table, flat.tree)


def by_host(fragments: Iterator[Fragment], host_ranks: int) -> Iterator[Fragment]:
    """Yield the reports joined by host."""
    while host := list(itertools.islice(fragments, host_ranks)):
        yield join(host)
