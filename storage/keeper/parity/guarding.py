"""Encodes parity among the keepers of a group, and rebuilds an image that was lost with its host.

``planner/parity.py`` assigns bytes to stripes, :mod:`.galois` does the arithmetic, and
:mod:`.combining` moves the bytes. The caller decides when to encode, and how bytes arrive from
another host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from ....errors import DamagedError, UsageError
from ....planner.parity import Lane, ParityBlock, StripeRepair
from ...arenas.hosts import GuardedGroup
from ...arenas.label import GenerationId, Label
from ...arenas.memory import Memory
from ...runtime.engine import offload
from ..sealing import is_sealed
from .combining import Block, Combine, Pull, Range, make_all
from .galois import Bytes, make_q, make_xor, recover

__all__ = [
    "Block",
    "Guarded",
    "HeldParity",
    "Pull",
    "guard",
    "image_nbytes",
    "rebuild",
]


@dataclass(eq=False)
class HeldParity:
    """A parity block in the memory of this member of the group.

    ``lane``: number of its lane; lane n protects the n-th rank of every member. ``memory``:
    ``block.nbytes`` bytes, None if that is 0.
    """

    lane: int
    block: ParityBlock
    memory: Memory | None

    @property
    def view(self) -> memoryview:
        """The bytes of the block, not to be modified."""
        if self.memory is None:
            return memoryview(b"")
        return self.memory.view

    def close(self) -> None:
        """Release the memory. Safe to call twice."""
        if self.memory is not None:
            self.memory.close()


@dataclass(eq=False)
class Guarded:
    """Parity of one generation on one member of a group. Owns the memory.

    ``member``: index in ``group``. ``parities``: ascending by lane. ``labels``: copies of the
    encoded labels of all ranks of the group, by rank.
    """

    group: GuardedGroup
    member: int
    generation: GenerationId
    labels: dict[int, bytes]
    parities: list[HeldParity] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Size of the parity and the labels."""
        labels = sum(map(len, self.labels.values()))
        return labels + sum(parity.block.nbytes for parity in self.parities)

    def close(self) -> None:
        """Release all memory. Safe to call twice."""
        while self.parities:
            self.parities.pop().close()


def image_nbytes(label: Label) -> int:
    """Return the number of bytes of an image that parity covers: 0 for a rank without shards, which
    has no image."""
    return label.nbytes if label.digests else 0


async def guard(
    group: GuardedGroup,
    member: int,
    generation: GenerationId,
    labels: Mapping[int, bytes],
    pull: Pull,
    room: Callable[[int], Memory],
) -> Guarded:
    """Encode the parity that ``member`` holds of a generation from the images of the others.

    ``labels``: encoded labels of all ranks of the group; ``room``: allocates memory of at least one
    byte, in a thread. Either all parity is encoded, or all memory is released and no pull is in
    flight any more. Uses up to ``BUFFERS_NBYTES`` besides the result.

    Raises as ``pull``; OSError if there is no memory; DamagedError if a label is damaged or
    contradicts itself or another one; UsageError if a label is missing or the group is not valid.
    """
    if not 0 <= member < len(group.names):
        raise UsageError(f"a group of {len(group.names)} hosts has no member {member}")
    known = await offload(_decoded, group, labels)
    for label in known.values():
        _check(label, label.generation == generation, f"is not that of step {generation.step}")
    guarded = Guarded(group, member, generation, {rank: labels[rank] for rank in known})
    try:
        ranges = []
        for number, lane in enumerate(_lanes(group, known)):
            for block in lane.held_by(member):
                held = HeldParity(number, block, None)
                guarded.parities.append(held)
                if block.nbytes:
                    await offload(_make_room, held, room)
                    ranges.append(_of_parity(held, lane))
        await make_all(ranges, pull)
    except BaseException:
        guarded.close()
        raise
    return guarded


async def rebuild(
    group: GuardedGroup,
    want_rank: int,
    lost: Collection[int],
    labels: Mapping[int, bytes],
    pull: Pull,
    memory: Memory,
) -> Label:
    """Rebuild the image of ``want_rank`` in ``memory``, which has the size given by its label.
    Return the label.

    ``lost``: members that cannot be read; the member of ``want_rank`` counts as one of them.
    ``labels``: encoded labels of all ranks of the group. Pulls only what is needed, with at most
    ``BUFFERS_NBYTES`` in flight, and verifies the whole image against its label. After an error
    ``memory`` holds no valid image. Does nothing for a rank without an image.

    Raises as ``pull``; DamagedError if too many members are lost, the result does not match its
    label, or a label is damaged; UsageError if a label is missing, the rank is not in the group, or
    ``memory`` has another size.
    """
    known = await offload(_decoded, group, labels)
    if want_rank not in known:
        raise UsageError(f"rank {want_rank} is not in this group", rank=want_rank)
    label = known[want_rank]
    if memory.nbytes != label.nbytes:
        raise UsageError(
            f"an image of {label.nbytes:,} bytes needs memory of that size, not {memory.nbytes:,}",
            rank=want_rank,
        )
    if not image_nbytes(label):
        return label
    member = group.member_of(want_rank)
    number = group.ranks[member].index(want_rank)
    lane = _lanes(group, known)[number]
    without = {member, *lost}
    image = f"the image of rank {want_rank} of step {label.generation.step}"
    try:
        repairs = lane.repairs(without, member)
    except ValueError as error:
        raise DamagedError(
            f"{len(without)} of {len(group.names)} hosts of a group are lost, and {group.mode} "
            f"tolerates {lane.parity}: {image} cannot be rebuilt",
            rank=want_rank,
        ) from error
    await make_all([_of_repair(repair, number, memory) for repair in repairs], pull)
    if not await is_sealed(memory, label):
        raise DamagedError(
            f"{image}, rebuilt from other hosts, does not match its label",
            rank=want_rank,
        )
    return label


def _decoded(group: GuardedGroup, labels: Mapping[int, bytes]) -> dict[int, Label]:
    """Return the labels of all ranks of the group, decoded, by rank.

    Raises UsageError if one is missing; DamagedError if one is damaged, or they are not all of the
    same run and generation.
    """
    found: dict[int, Label] = {}
    for rank in (rank for ranks in group.ranks for rank in ranks):
        if rank not in labels:
            raise UsageError(f"the label of rank {rank} is missing", rank=rank)
        label = Label.decode(labels[rank])
        _check(label, label.rank == rank, f"is not that of rank {rank}")
        one = next(iter(found.values()), label)
        belongs = (label.run, label.generation) == (one.run, one.generation)
        _check(label, belongs, f"does not belong to that of rank {one.rank}")
        found[rank] = label
    return found


def _check(label: Label, is_right: bool, problem: str) -> None:
    if not is_right:
        raise DamagedError(
            f"the label of rank {label.rank} of step {label.generation.step} {problem}",
            rank=label.rank,
        )


def _lanes(group: GuardedGroup, labels: Mapping[int, Label]) -> tuple[Lane, ...]:
    try:
        return group.lanes({rank: image_nbytes(label) for rank, label in labels.items()})
    except ValueError as error:
        raise UsageError(f"the group {', '.join(group.names)}: {error}") from error


def _make_room(held: HeldParity, room: Callable[[int], Memory]) -> None:
    # Assigned here, not returned: a cancelled caller would not see the result, and leak it.
    held.memory = room(held.block.nbytes)


def _of_parity(held: HeldParity, lane: Lane) -> Range:
    assert held.memory is not None
    block = held.block
    data = lane.data(block.stripe)
    combine: Combine | None = make_q
    if block.row == 0:
        # Empty blocks add nothing to P. In Q they count, by position.
        data = tuple(each for each in data if each.nbytes)
        combine = None if len(data) == 1 else make_xor
    return Range(held.memory, 0, block.nbytes, held.lane, data, combine)


def _of_repair(repair: StripeRepair, lane: int, memory: Memory) -> Range:
    wanted = repair.wanted
    blocks = repair.pulled
    combine: Combine | None = partial(_recovered, repair)
    if len(blocks) == 1 and repair.parity[0].row == 0:
        combine = None  # P of a single block is a copy of it
    return Range(memory, wanted.start, wanted.nbytes, lane, blocks, combine)


def _recovered(repair: StripeRepair, out: Bytes, pulled: Sequence[Bytes]) -> None:
    of_data = zip(repair.data, pulled, strict=False)
    of_parity = zip(repair.parity, pulled[len(repair.data) :], strict=True)
    recover(
        out,
        repair.wanted.position,
        {block.position: array for block, array in of_data},
        {block.row: array for block, array in of_parity},
        repair.unknown,
    )
