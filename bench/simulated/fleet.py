"""Plans a save for every rank of a job and merges the manifest, with the engine's own functions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...errors import UsageError
from ...planner.image import ImageLayout
from ...storage.format.fragment import Fragment, StateLayout
from ...storage.format.merge import merge
from ...storage.pipeline.chunks import chunks_to_write
from ...storage.state.plan import ImagePlan, plan_image
from ..workloads.spec import Workload
from .flat import FlatStates
from .fragments import by_host, fragment_told

__all__ = ["Fleet", "RankPlan", "planned_fleet"]

SHARDS_MAX = 8_000_000
"""Limit of shards to plan in one process. Merging the manifest of more takes gigabytes of
memory."""


@dataclass(frozen=True)
class RankPlan:
    """Plan of one rank's image.

    ``state_nbytes`` counts its tensors. ``image_nbytes`` counts its file with header and digests; 0
    if it writes none. ``reads`` counts the reads of a full load: one for each chunk with data, and
    one for the digests if chunks are not verified whole.
    """

    state_nbytes: int
    image_nbytes: int
    shards: int
    chunks: int
    reads: int


@dataclass(frozen=True)
class Fleet:
    """All ranks in order, and the manifest that their leader commits. ``tensors`` counts a sharded
    tensor once."""

    ranks: tuple[RankPlan, ...]
    tensors: int
    manifest_nbytes: int

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
    manifest = merge(list(by_host(_fragments(workload, world, piece_nbytes, ranks), host_ranks)))
    if not manifest.tensor_nbytes:
        raise UsageError("no rank has anything to save", advice="Give a larger workload.")
    return Fleet(tuple(ranks), len(manifest.tensors), len(manifest.encode()))


def _fragments(
    workload: Workload, world: int, piece_nbytes: int, ranks: list[RankPlan]
) -> Iterator[Fragment]:
    """Yield the ranks' reports in order, and append the plan of each to ``ranks``."""
    states = FlatStates(world)
    reported: StateLayout | None = None
    for rank in range(world):
        flat, agreed, is_alike = states.of(workload.specs(rank, world), rank)
        plan = plan_image(flat, rank, agreed)
        if is_alike and reported is not None:
            plan = replace(plan, reported=reported)  # the reported layout is then encoded once
        reported = plan.reported
        ranks.append(_rank_plan(plan, piece_nbytes))
        yield fragment_told(plan, rank, flat)


def _rank_plan(plan: ImagePlan, piece_nbytes: int) -> RankPlan:
    chunks = chunks_to_write(plan.layout)
    return RankPlan(
        state_nbytes=int(plan.held.nbytes.sum()),
        image_nbytes=plan.layout.nbytes if chunks else 0,
        shards=len(plan.shards),
        chunks=chunks,
        reads=_reads(plan.layout, piece_nbytes) if chunks else 0,
    )


def _reads(layout: ImageLayout, piece_nbytes: int) -> int:
    """Return the reads of an image. Data that arrives in pieces is verified by piece, so its
    digests are read first."""
    skipped_chunks, rest_nbytes = divmod(len(layout.header), layout.chunk_nbytes)
    in_pieces = 0 < piece_nbytes < layout.hashed_end
    needs_digests = in_pieces or rest_nbytes >= layout.block_nbytes
    return layout.chunks - skipped_chunks + needs_digests
