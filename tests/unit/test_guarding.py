"""Keepers that guard each other's images. A lost image comes back byte for byte, or not at all."""

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
from holdfast.storage.keeper.parity.guarding import guard, rebuild

pytestmark = pytest.mark.usefixtures("no_leaks")


def with_members(
    mode: str, sizes: list[list[int]], body: Callable[[Members], Awaitable[None]]
) -> None:
    """Run ``body`` with a group; release its memory afterwards."""

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
    """Return the number of mappings of unnamed memory in this process."""
    with open("/proc/self/maps") as file:
        return sum("memfd:holdfast" in line for line in file)


async def until_mapped(count: int) -> None:
    """Wait until this many mappings exist, for two seconds at most."""
    for _ in range(200):
        gc.collect()
        if mapped() == count:
            return
        await asyncio.sleep(0.01)
    assert mapped() == count


@pytest.mark.parametrize(("mode", "count", "good"), [("copy", 2, 1), ("xor", 4, 1), ("pq", 4, 2)])
def test_more_losses_than_parity_are_refused(mode: str, count: int, good: int) -> None:
    """The error says how many hosts are lost, and nothing is read from the others."""

    async def body(group: Members) -> None:
        await group.guard_all()
        before_nbytes = group.pulled_nbytes
        for lost in itertools.combinations(range(count), good + 1):
            rank = group.group.ranks[lost[0]][0]
            with pytest.raises(DamagedError) as raised:
                await group.rebuilt(rank, lost)
            assert (
                f"{good + 1} of {count} hosts of a group are lost, and {mode} tolerates {good}: "
                f"the image of rank {rank} of step 70 cannot be rebuilt"
            ) in str(raised.value)
        assert group.pulled_nbytes == before_nbytes

    with_members(mode, [[70_000, 9000]] * count, body)


@pytest.mark.nightly(36)
@pytest.mark.parametrize("doing", ["guard", "rebuild"])
@pytest.mark.parametrize("end", ["fails", "is cancelled", "cancels itself"])
@pytest.mark.parametrize(("mode", "after"), [("copy", 1), ("pq", 4)])
def test_what_does_not_end_well_leaves_nothing(mode: str, after: int, end: str, doing: str) -> None:
    """If a pull fails, or all work is cancelled, no task remains and all memory is freed."""
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


@pytest.mark.parametrize(("mode", "count"), [("copy", 2), ("pq", 4)])
def test_several_pulls_are_under_way_in_bounded_memory(mode: str, count: int) -> None:
    """Pulls of large images overlap, and fit together into the buffers."""

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
    """Return all labels, one of them altered."""
    altered = replace(Label.decode(group.labels[rank]), **changes).encode()
    return {**group.labels, rank: altered}


def test_labels_that_cannot_be_right_are_refused_by_name() -> None:
    """Labels may be damaged, missing, of another rank or step, or have impossible sizes. Nothing is
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
    """Examples are ranks and members outside the group, memory of another size, invalid groups."""

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
    """The bytes themselves may be right."""

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
