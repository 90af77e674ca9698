"""Guarding: the members of a group of keepers hold parity of each other's images, and make an image
again that was lost with its host.

Which bytes go into which stripe is planned by ``planner/parity.py``, and the arithmetic is that of
:mod:`.galois`; :mod:`.combining` moves bytes by both.

Scope: neither when this is done, nor how bytes come from another host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ...core.aio import at_most
from ...errors import DamagedError, UsageError
from ...planner.parity import Lane, ParityBlock, StripeRepair
from ..arenas.hosts import GuardedGroup
from ..arenas.label import GenerationId, Label, check_sizes
from ..arenas.memory import Memory
from ..format.digest import digest
from ..runtime.engine import CPU_THREADS, offload
from .combining import Block, Combine, Pull, Range, make_all
from .galois import Bytes, find_isal, make_pq, make_xor, recover
from .sealing import is_sealed

__all__ = [
    "Block",
    "Guarded",
    "HeldParity",
    "Pull",
    "guard",
    "image_nbytes",
    "parity_is_intact",
    "rebuild",
]

_SPARE_ALIGN_NBYTES = 64
"""Memory that ISA-L is given is aligned like that; all else is, to pages."""


@dataclass(eq=False)
class HeldParity:
    """A block of parity that this member holds. ``memory``: of ``block.nbytes``, or None where that
    is nothing; ``digest``: xxh3-128 of its bytes."""

    lane: int
    block: ParityBlock
    memory: Memory | None
    digest: bytes = b""

    @property
    def view(self) -> memoryview:
        """Its bytes, which nobody may change."""
        if self.memory is None:
            return memoryview(b"")
        return self.memory.view

    def close(self) -> None:
        """Give its memory back. Safe to call twice."""
        if self.memory is not None:
            self.memory.close()


@dataclass(eq=False)
class Guarded:
    """What one member of a group holds for one generation: the ``labels`` of all ranks of the
    group, encoded, and its ``parities``, lane by lane. Owns the memory of these."""

    group: GuardedGroup
    member: int
    generation: GenerationId
    labels: dict[int, bytes]
    parities: list[HeldParity] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Of all parity, and of the labels."""
        labels = sum(map(len, self.labels.values()))
        return labels + sum(parity.block.nbytes for parity in self.parities)

    def close(self) -> None:
        """Give all memory back. Safe to call twice."""
        while self.parities:
            self.parities.pop().close()


def image_nbytes(label: Label) -> int:
    """How many bytes of the image of a rank are guarded: none where it has no shard. It has a slot
    even so, whose bytes mean nothing."""
    return label.nbytes if label.digests else 0


async def guard(
    group: GuardedGroup,
    member: int,
    generation: GenerationId,
    labels: Mapping[int, bytes],
    pull: Pull,
    room: Callable[[int], Memory],
) -> Guarded:
    """Make the parity that ``member`` holds of a generation, out of the images of the others.

    ``labels``: of all ranks of the group, encoded; ``room``: makes memory of so many bytes, at
    least one, in a thread. Either all of it is made, or all memory is given back, whatever has
    happened, and no pull is under way any more. No more than ``BUFFERS_NBYTES`` are held besides.

    Raises what ``pull`` raises, OSError where there is no room; DamagedError where a label is
    damaged, or contradicts itself or others; UsageError where one is missing, or the group cannot
    be one.
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
        await at_most(CPU_THREADS, (offload(_seal, held) for held in guarded.parities))
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
    """Make the image of ``want_rank`` again in ``memory``, which has the size that its label tells,
    and return its label.

    ``lost``: the members from which nothing can be pulled; that of the rank counts as one of them.
    ``labels``: of all ranks of the group. No more is pulled than is needed, at most
    ``BUFFERS_NBYTES`` at a time. The whole image is compared with the label. If this raises, what
    lies in ``memory`` is no image. Nothing is done for a rank that has no image.

    Raises what ``pull`` raises; DamagedError where too many members are lost, where what was made
    is not the image, or a label is damaged; UsageError where a label is missing, the rank is not of
    the group, or the memory has another size.
    """
    known = await offload(_decoded, group, labels)
    if want_rank not in known:
        raise UsageError(f"rank {want_rank} is in no place of this group", rank=want_rank)
    label = known[want_rank]
    if memory.nbytes != label.nbytes:
        raise UsageError(
            f"an image of {label.nbytes:,} bytes does not go into {memory.nbytes:,}", rank=want_rank
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
            f"{len(without)} hosts of a group of {len(group.names)} are lost, and {group.mode} "
            f"makes good {lane.parity}: {image} cannot be made again",
            rank=want_rank,
        ) from error
    await make_all([_of_repair(repair, number, memory) for repair in repairs], pull)
    if not await is_sealed(memory, label):
        raise DamagedError(
            f"{image}, made again out of what other hosts hold, does not match its label",
            rank=want_rank,
        )
    return label


async def parity_is_intact(held: HeldParity) -> bool:
    """Whether its bytes are those that were made: to be asked before they are handed out. Reads all
    of them, in a thread."""
    return await offload(digest, held.view) == held.digest


def _decoded(group: GuardedGroup, labels: Mapping[int, bytes]) -> dict[int, Label]:
    """The labels of all ranks of the group."""
    found: dict[int, Label] = {}
    for rank in (rank for ranks in group.ranks for rank in ranks):
        if rank not in labels:
            raise UsageError(f"the label of rank {rank} is missing", rank=rank)
        label = Label.decode(labels[rank])
        check_sizes(label)
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
    # Not returned: who waits for it may be cancelled, and would never know of it.
    held.memory = room(held.block.nbytes)


def _seal(held: HeldParity) -> None:
    held.digest = digest(held.view)


def _of_parity(held: HeldParity, lane: Lane) -> Range:
    """How a block of parity is made."""
    assert held.memory is not None
    block = held.block
    data = lane.data(block.stripe)
    combine: Combine | None = _into_q
    if block.row == 0:
        # What is no data adds nothing; in Q it counts, by its position.
        data = tuple(each for each in data if each.nbytes)
        combine = None if len(data) == 1 else _into_p
    return Range(held.memory, 0, block.nbytes, held.lane, data, combine)


def _into_p(out: Bytes, data: Sequence[Bytes]) -> None:
    make_xor(out, data, find_isal())


def _into_q(out: Bytes, data: Sequence[Bytes]) -> None:
    # P is made along with it, and thrown away: another member holds that one.
    spare = np.empty(len(out) + _SPARE_ALIGN_NBYTES, np.uint8)
    start = -spare.ctypes.data % _SPARE_ALIGN_NBYTES
    make_pq(spare[start : start + len(out)], out, data, find_isal())


def _of_repair(repair: StripeRepair, lane: int, memory: Memory) -> Range:
    """How a block of a lost image is made again."""
    wanted = repair.wanted
    blocks = repair.pulled
    combine: Combine | None = partial(_recovered, repair)
    if len(blocks) == 1 and repair.parity[0].row == 0:
        combine = None  # P of one block is that block
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
