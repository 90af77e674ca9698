"""Groups of keepers in one process: images of noise with their real labels, and members that serve
their parts, or fail to."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from holdfast.core.units import MIB, ceil_div, round_up
from holdfast.errors import StorageDownError
from holdfast.planner.image import BLOCK_NBYTES, CHUNK_NBYTES, DIGEST_NBYTES, PAGE_NBYTES
from holdfast.planner.parity import ParityBlock
from holdfast.storage.arenas.hosts import GuardedGroup
from holdfast.storage.arenas.label import GenerationId, Label
from holdfast.storage.arenas.memory import Memory, sealed_memory
from holdfast.storage.keeper.parity.combining import Block
from holdfast.storage.keeper.parity.guarding import Guarded, guard, rebuild
from holdfast.storage.keeper.sealing import seal

STEP = GenerationId(1, 70)

_Hook = Callable[[Block, memoryview], Awaitable[None]]


def room(nbytes: int) -> Memory:
    """Allocate memory as a keeper does, but without populating its pages at once."""
    return Memory(sealed_memory(nbytes), nbytes)


@dataclass
class Members:
    """A group, the memory of its images by rank, their labels, and the parity of its members."""

    group: GuardedGroup
    images: dict[int, Memory]
    labels: dict[int, bytes]
    held: dict[int, Guarded] = field(default_factory=dict)
    lost: Collection[int] = ()
    before: _Hook | None = None
    """Called before each pull."""
    largest: int = 0
    """Bytes of the largest pull."""
    in_flight: int = 0
    most_in_flight: int = 0
    most_nbytes: int = 0
    """Most bytes of all pulls in flight."""
    pulled_nbytes: int = 0
    _now_nbytes: int = 0

    async def pull(
        self, member: int, lane: int, block: Block, start: int, into: memoryview
    ) -> None:
        """See Pull."""
        assert member == block.member
        assert len(into) > 0
        if member in self.lost:
            raise StorageDownError(f"{self.group.names[member]} is gone")
        self.in_flight += 1
        self._now_nbytes += len(into)
        self.largest = max(self.largest, len(into))
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self.most_nbytes = max(self.most_nbytes, self._now_nbytes)
        try:
            if self.before is not None:
                await self.before(block, into)
            await asyncio.sleep(0)
            into[:] = self._bytes(member, lane, block)[start : start + len(into)]
            self.pulled_nbytes += len(into)
        finally:
            self.in_flight -= 1
            self._now_nbytes -= len(into)

    def _bytes(self, member: int, lane: int, block: Block) -> memoryview:
        if isinstance(block, ParityBlock):
            (one,) = (
                held
                for held in self.held[member].parities
                if (held.lane, held.block.stripe, held.block.row) == (lane, block.stripe, block.row)
            )
            return one.view[: block.nbytes]
        rank = self.group.ranks[member][lane]
        return self.images[rank].view[block.start : block.stop]

    async def guard_all(self) -> None:
        """Let every member encode its parity."""
        for member in range(len(self.group.names)):
            self.held[member] = await guard(self.group, member, STEP, self.labels, self.pull, room)

    async def rebuilt(self, rank: int, lost: Collection[int]) -> Memory:
        """Rebuild the image of a rank in memory that has other contents."""
        self.lost = lost
        memory = room(self.images[rank].nbytes)
        memory.view[:] = os.urandom(1) * memory.nbytes
        try:
            label = await rebuild(self.group, rank, lost, self.labels, self.pull, memory)
            assert label == Label.decode(self.labels[rank])
        except BaseException:
            memory.close()
            raise
        return memory

    def close(self) -> None:
        """Release all memory."""
        for guarded in self.held.values():
            guarded.close()
        for memory in self.images.values():
            memory.close()


async def members(mode: str, sizes: Sequence[Sequence[int]], seed: int = 0) -> Members:
    """Make a group with a member for each row of ``sizes``. A row has the tensor bytes of each of
    the member's ranks, 0 for a rank without a shard."""
    random = np.random.default_rng(seed)
    images, labels, places = {}, {}, []
    for ranks in sizes:
        places.append(tuple(range(len(images), len(images) + len(ranks))))
        for rank, nbytes in zip(places[-1], ranks, strict=True):
            images[rank], label = await _image(rank, nbytes, random)
            labels[rank] = label.encode()
    names = tuple(f"host-{number}" for number in range(len(sizes)))
    return Members(GuardedGroup(mode, names, tuple(places)), images, labels)


async def _image(rank: int, nbytes: int, random: np.random.Generator) -> tuple[Memory, Label]:
    """Make an image of noise and its label, as a keeper does. Small images have small chunks."""
    chunk_nbytes, block_nbytes = 4 * PAGE_NBYTES, PAGE_NBYTES
    if nbytes > MIB:
        chunk_nbytes, block_nbytes = CHUNK_NBYTES, BLOCK_NBYTES
    hashed_end = round_up(max(nbytes, 1), PAGE_NBYTES)
    memory = room(hashed_end + DIGEST_NBYTES * ceil_div(hashed_end, block_nbytes))
    memory.view[:nbytes] = random.bytes(nbytes)
    draft = Label(
        run="run",
        generation=STEP,
        rank=rank,
        world=99,
        nbytes=memory.nbytes,
        hashed_end=hashed_end if nbytes else 0,
        chunk_nbytes=chunk_nbytes,
        block_nbytes=block_nbytes,
        created_s=0.0,
    )
    return memory, await seal(memory, draft)
