"""Keepers that guard each other's images: whatever is lost comes back byte for byte, or not at all."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from support.guarded import STEP, Members, members, room

from holdfast.core.units import MIB
from holdfast.errors import DamagedError, StorageError, UsageError
from holdfast.storage.arenas.hosts import GuardedGroup
from holdfast.storage.arenas.label import GenerationId, Label
from holdfast.storage.keeper.parity.combining import (
    BUFFERS_NBYTES,
    PULLED_NBYTES_MAX,
    WORKERS,
    Block,
)
from holdfast.storage.keeper.parity.guarding import guard, image_nbytes, rebuild
from holdfast.storage.keeper.parity.guards import Guards

SHAPES = [
    pytest.param("copy", [[70_000], [50_000]], 1, id="copy of 2"),
    pytest.param("copy", [[0, 9000], [50_000, 1]], 1, id="copy of 2, one image missing"),
    pytest.param("xor", [[70_000], [50_000], [1]], 1, id="xor of 3"),
    pytest.param("xor", [[70_000, 9000], [50_000, 0], [1, 1], [40_000]], 1, id="xor of 4, 2 ranks"),
    pytest.param("xor", [[70_000], [0], [33_000], [40_000], [64_000]], 1, id="xor of 5"),
    pytest.param("pq", [[70_000], [50_000], [1]], 2, id="pq of 3"),
    pytest.param("pq", [[70_000, 1], [50_000, 0], [0, 9000], [40_000]], 2, id="pq of 4, 2 ranks"),
    pytest.param("pq", [[70_000], [50_000], [33_000], [40_000], [64_000]], 2, id="pq of 5"),
]

pytestmark = pytest.mark.usefixtures("no_leaks")


def with_members(
    mode: str, sizes: list[list[int]], body: Callable[[Members], Awaitable[None]]
) -> None:
    """Run ``body`` with a group; then give its memory back."""

    async def main() -> None:
        group = await members(mode, sizes)
        try:
            await body(group)
            assert group.in_flight == 0
            assert asyncio.all_tasks() == {asyncio.current_task()}
        finally:
            group.close()

    asyncio.run(main())


def mapped() -> int:
    """How many mappings of memory without a name this process has."""
    with open("/proc/self/maps") as file:
        return sum("memfd:holdfast" in line for line in file)


async def until_mapped(count: int) -> None:
    """Until there are so many, for two seconds at most."""
    for _ in range(200):
        gc.collect()
        if mapped() == count:
            return
        await asyncio.sleep(0.01)
    assert mapped() == count


@pytest.mark.parametrize(("mode", "sizes", "good"), SHAPES)
def test_every_loss_that_may_be_is_made_good(mode: str, sizes: list[list[int]], good: int) -> None:
    """Of each member and of each two where two may be lost: all their images come back byte for byte,
    and nothing is asked of a host that is lost. Where more are lost, no other image comes back."""

    async def body(group: Members) -> None:
        await group.guard_all()
        count = len(sizes)
        for number in range(1, good + 2):
            for lost in itertools.combinations(range(count), number):
                for rank in (rank for member in lost for rank in group.group.ranks[member]):
                    before_nbytes = group.pulled_nbytes
                    try:
                        memory = await group.rebuilt(rank, lost)
                    except DamagedError as error:
                        assert number > good
                        assert group.pulled_nbytes == before_nbytes
                        assert (
                            f"{number} of {count} hosts of a group are lost, and {mode} tolerates "
                            f"{good}: the image of rank {rank} of step 70 cannot be rebuilt"
                        ) in str(error)
                        continue
                    if image_nbytes(Label.decode(group.labels[rank])):
                        assert memory.view == group.images[rank].view
                    memory.close()

    with_members(mode, sizes, body)


@pytest.mark.parametrize(
    ("mode", "at"), [("copy", 0), ("copy", -1), ("xor", 8191), ("pq", 20_000), ("pq", -1)]
)
def test_flipped_bits_on_the_way_are_found(mode: str, at: int) -> None:
    """In the data, and in the digests at its end: no image that differs from its label is
    returned."""

    async def body(group: Members) -> None:
        await group.guard_all()
        (lane,) = group.group.lanes({rank: held.nbytes for rank, held in group.images.items()})
        place = at % group.images[0].nbytes
        (repair,) = (
            one
            for one in lane.repairs([0], 0)
            if one.wanted.start <= place < one.wanted.start + one.wanted.nbytes
        )

        def flip(block: Block, start: int, into: memoryview) -> None:
            """In the last block of the stripe, which is parity, that byte counts."""
            if block == repair.pulled[-1]:
                into[place - repair.wanted.start - start] ^= 0x10

        group.after = flip
        with pytest.raises(DamagedError, match=r"rank 0 of step 70, rebuilt .*\(rank 0\)"):
            await group.rebuilt(0, [0])
        group.after = None
        memory = await group.rebuilt(0, [0])
        assert memory.view == group.images[0].view
        memory.close()

    with_members(mode, [[100_000]] * (2 if mode == "copy" else 4), body)


@pytest.mark.nightly(73)
@pytest.mark.parametrize("doing", ["guard", "rebuild"])
@pytest.mark.parametrize("end", ["fails", "is cancelled", "cancels itself"])
@pytest.mark.parametrize(("mode", "after"), [("copy", 1), ("pq", 0), ("pq", 4), ("xor", 9)])
def test_what_does_not_end_well_leaves_nothing(mode: str, after: int, end: str, doing: str) -> None:
    """A pull fails, or all of it is cancelled: the other pulls are ended, no task stays, and all
    memory is given back, however far it had come."""
    before = mapped()

    async def body(group: Members) -> None:
        await group.guard_all()
        kept = mapped()
        count = 0
        work: asyncio.Future[Any] | None = None

        async def stop(block: Block, into: memoryview) -> None:
            nonlocal count
            count += 1
            if count == after + 1:
                if end == "fails":
                    raise StorageError("the network is gone")
                if end == "cancels itself":
                    raise asyncio.CancelledError
                assert work is not None
                work.cancel()
            if count > after:
                await asyncio.sleep(60)

        group.before = stop
        if doing == "guard":
            work = asyncio.ensure_future(
                guard(group.group, 0, STEP, group.labels, group.pull, room)
            )
        else:
            work = asyncio.ensure_future(group.rebuilt(0, [0]))
        try:
            (await work).close()
            assert count <= after
        except (StorageError, asyncio.CancelledError) as error:
            assert isinstance(error, StorageError) is (end == "fails")
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert group.in_flight == 0
        work = None
        await until_mapped(kept)  # a thread may have been about to make some of it

    sizes = [[100_000, 30_000, 1000]] * (2 if mode == "copy" else 4)
    with_members(mode, sizes, body)
    assert mapped() == before


@pytest.mark.parametrize(("mode", "count"), [("copy", 2), ("xor", 3), ("xor", 5), ("pq", 4)])
def test_several_pulls_are_under_way_in_bounded_memory(mode: str, count: int) -> None:
    """Of large images: as many as workers have blocks, none larger than may be, and all together no
    more than the buffers."""

    async def body(group: Members) -> None:
        async def slow(block: Block, into: memoryview) -> None:
            await asyncio.sleep(0.002)

        group.before = slow
        await group.guard_all()
        width = 1 if mode == "copy" else count - (2 if mode == "pq" else 1)
        assert 2 <= group.most_in_flight <= WORKERS * width
        (await group.rebuilt(1, [1])).close()
        assert group.most_in_flight <= WORKERS * (count - 1)
        assert MIB <= group.largest <= PULLED_NBYTES_MAX
        assert group.most_nbytes <= BUFFERS_NBYTES

    with_members(mode, [[20 * MIB + 5]] * count, body)


def labels_of(group: Members, rank: int, **changes: Any) -> dict[int, bytes]:
    """All labels, one of them altered."""
    altered = replace(Label.decode(group.labels[rank]), **changes).encode()
    return {**group.labels, rank: altered}


def test_labels_that_cannot_be_right_are_refused_by_name() -> None:
    """Damaged, missing, of another rank or step, or with sizes that no image has: nothing is
    pulled."""

    async def body(group: Members) -> None:
        other = GenerationId(1, 71)
        cases = [
            ({**group.labels, 1: group.labels[1][:-1] + b"x"}, DamagedError, "its own checksum"),
            ({0: group.labels[0]}, UsageError, "the label of rank 1 is missing"),
            ({**group.labels, 1: group.labels[0]}, DamagedError, "rank 0 .* not that of rank 1"),
            (labels_of(group, 1, generation=other), DamagedError, "not belong to that of rank 0"),
            (labels_of(group, 1, run="other"), DamagedError, "not belong to that of rank 0"),
            (labels_of(group, 1, nbytes=5), DamagedError, "contradicts itself: its pages"),
        ]
        for labels, kind, text in cases:
            with pytest.raises(kind, match=text):
                await guard(group.group, 0, STEP, labels, group.pull, room)
            with pytest.raises(kind, match=text):
                await rebuild(group.group, 1, [1], labels, group.pull, group.images[1])
        with pytest.raises(DamagedError, match="rank 0 of step 70 is not that of step 71"):
            await guard(group.group, 0, other, group.labels, group.pull, room)
        assert group.pulled_nbytes == 0

    with_members("copy", [[9000], [50_000]], body)


def test_calls_that_cannot_be_right_are_refused() -> None:
    """Ranks and members that are not of the group, memory of another size, groups that are none."""

    async def body(group: Members) -> None:
        await group.guard_all()
        with pytest.raises(UsageError, match="a group of 2 hosts has no member 2"):
            await guard(group.group, 2, STEP, group.labels, group.pull, room)
        with pytest.raises(UsageError, match="rank 7 is not in this group"):
            await rebuild(group.group, 7, [1], group.labels, group.pull, group.images[1])
        with pytest.raises(
            UsageError, match=r"of 53,456 bytes needs memory of that size, not 12,\d+"
        ):
            await rebuild(group.group, 1, [1], group.labels, group.pull, group.images[0])
        for mode, text in [
            ("raid", "'raid' is not a mode of protection"),
            ("pq", "host-0, host-1: "),
        ]:
            none = GuardedGroup(mode, group.group.names, group.group.ranks)
            with pytest.raises(UsageError, match=text):
                await guard(none, 0, STEP, group.labels, group.pull, room)

    with_members("copy", [[9000], [50_000]], body)


def test_a_label_whose_digests_are_too_few_matches_no_image() -> None:
    """However right the bytes are."""

    async def body(group: Members) -> None:
        await group.guard_all()
        digests = Label.decode(group.labels[1]).digests
        assert len(digests) > 16
        labels = labels_of(group, 1, digests=digests[:-16])
        memory = room(group.images[1].nbytes)
        with pytest.raises(DamagedError, match="does not match its label"):
            await rebuild(group.group, 1, [1], labels, group.pull, memory)
        memory.close()

    with_members("copy", [[9000], [50_000]], body)


class Parity:
    """The parity of a generation."""

    nbytes = 1
    closed = False

    def close(self) -> None:
        self.closed = True


def guards(*steps: int) -> Any:
    """Return guards with parity of these steps."""
    found: Any = Guards("run", "", lambda: None)
    add_parity(found, *steps)
    return found


def add_parity(found: Any, *steps: int) -> None:
    """Give the guards parity of these steps."""
    for step in steps:
        found._held[GenerationId(0, step)] = Parity()
        found._worlds[GenerationId(0, step)] = 1


def steps_of(found: Any) -> list[int]:
    """Return the steps with parity."""
    return [id.step for id in sorted(found._held)]


def test_parity_that_nobody_relies_on_is_dropped_except_the_newest() -> None:
    """All keepers may be about to rely on the newest."""
    found = guards(1, 2, 3, 4)
    parity = list(found._held.values())
    found.keep([GenerationId(0, 2)])
    assert steps_of(found) == [2, 4]
    assert [one.closed for one in parity] == [True, False, True, False]


def test_parity_offered_to_a_restart_is_retained_until_all_have_chosen() -> None:
    """Keepers protect newer steps meanwhile. A resume drops later steps even if they are offered."""
    found = guards(1, 2)
    newest = GenerationId(0, 5)
    for client in (7, 8):
        found.offer(client, [GenerationId(0, 2), GenerationId(0, 3)])
    add_parity(found, 3, 4, 5)
    for client, left in ((0, [1, 2, 3, 5]), (7, [1, 2, 3, 5]), (7, [1, 2, 3, 5]), (8, [5])):
        found.released(client)
        found.keep([newest])
        assert steps_of(found) == left
    found.offer(7, [])
    found.drop_later(None)
    assert steps_of(found) == []
