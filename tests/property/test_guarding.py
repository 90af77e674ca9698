"""Guarding groups of any form: lost images come back byte for byte. After any damage, no wrong
image comes back."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st
from support.effort import examples
from support.guarded import Members, members

from holdfast.errors import DamagedError
from holdfast.storage.arenas.label import Label
from holdfast.storage.keeper.parity.guarding import image_nbytes

NBYTES = st.one_of(st.just(0), st.integers(1, 5000), st.integers(1, 100_000))


@st.composite
def shapes(draw: st.DrawFn) -> tuple[str, list[list[int]], int]:
    """Draw a mode, the bytes of each rank of each member, and the number of members to lose."""
    mode = draw(st.sampled_from(["copy", "xor", "pq"]))
    good = 2 if mode == "pq" else 1
    count = 2 if mode == "copy" else draw(st.integers(good + 1, 6))
    row = st.lists(NBYTES, max_size=3)
    return mode, draw(st.lists(row, min_size=count, max_size=count)), good


async def compare(group: Members, lost: set[int]) -> None:
    """Check that all images of the lost members come back."""
    for rank in (rank for member in lost for rank in group.group.ranks[member]):
        memory = await group.rebuilt(rank, lost)
        if image_nbytes(Label.decode(group.labels[rank])):
            assert memory.view == group.images[rank].view
        memory.close()


@examples(60)
@given(shapes(), st.data())
def test_any_loss_that_may_be_is_made_good(
    shape: tuple[str, list[list[int]], int], data: st.DataObject
) -> None:
    """This holds for groups, ranks per host and images of any size."""
    mode, sizes, good = shape
    lost = data.draw(st.sets(st.integers(0, len(sizes) - 1), max_size=good))

    async def main() -> None:
        group = await members(mode, sizes, data.draw(st.integers(0, 99)))
        await group.guard_all()
        await compare(group, lost)
        group.close()

    asyncio.run(main())


@examples(60)
@given(shapes(), st.data())
def test_no_wrong_image_comes_back(
    shape: tuple[str, list[list[int]], int], data: st.DataObject
) -> None:
    """Flip one bit of an image or of parity: each rebuilt image is the sealed one, or refused."""
    mode, sizes, _ = shape

    async def main() -> None:
        group = await members(mode, sizes)
        await group.guard_all()
        sealed = {rank: bytes(memory.view) for rank, memory in group.images.items()}
        held = [p.view for of in group.held.values() for p in of.parities if p.memory]
        held += [memory.view for memory in group.images.values()]
        if held:
            view = held[data.draw(st.integers(0, len(held) - 1), "where")]
            view[data.draw(st.integers(0, len(view) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        for rank in group.images:
            try:
                memory = await group.rebuilt(rank, {group.group.member_of(rank)})
            except DamagedError:
                continue
            if image_nbytes(Label.decode(group.labels[rank])):
                assert memory.view == sealed[rank]
            memory.close()
        group.close()

    asyncio.run(main())
