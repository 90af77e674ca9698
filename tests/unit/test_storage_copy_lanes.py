"""Test how images are sent: in the driver's order, within the budget, until the first failure."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from support.copies import RANKS, checkpoint, copied, images, run
from support.drivers import HookedDriver
from support.inside import on_allocation

import holdfast
from holdfast.drivers.contract import Buffer, PartOrder, Upload
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.operations.loading.load import run_build
from holdfast.storage.pipeline.image_copier import balanced
from holdfast.storage.runtime.buffers import host_pool

BUDGET_NBYTES = 64 << 20


class Ordered(MemoryDriver):
    """Memory storage that wants parts in an order, and records their order and concurrency."""

    def __init__(self, order: PartOrder, streams: int = 1) -> None:
        super().__init__()
        self.traits = replace(self.traits, part_order=order, streams=streams)
        self.begun: dict[str, list[int]] = {}
        self.running: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.most_uploads = 0

    async def create(self, key: str, nbytes: int) -> Upload:
        return OrderedUpload(self, key, await super().create(key, nbytes))


class OrderedUpload(Upload):
    """See :class:`Ordered`."""

    def __init__(self, driver: Ordered, key: str, inner: Upload) -> None:
        self.driver, self.key, self.inner = driver, key, inner

    async def write(self, start: int, data: Buffer) -> None:
        d = self.driver
        d.begun.setdefault(self.key, []).append(start)
        d.running[self.key] += 1
        d.most[self.key] = max(d.most[self.key], d.running[self.key])
        d.most_uploads = max(d.most_uploads, sum(n > 0 for n in d.running.values()))
        await asyncio.sleep(0.05)
        await self.inner.write(start, data)
        d.running[self.key] -= 1

    async def commit(self, nbytes: int | None = None) -> None:
        await self.inner.commit(nbytes)

    async def abort(self) -> None:
        await self.inner.abort()


@pytest.fixture(scope="module")
def large() -> MemoryDriver:
    """A checkpoint of three images of three chunks each."""
    return checkpoint((40 << 20) // 4)


@pytest.mark.nightly(5)
@pytest.mark.parametrize("order", ["any", "ascending", "serial"])
def test_parts_arrive_in_the_order_asked_for(order: PartOrder, large: MemoryDriver) -> None:
    """``ascending`` parts may overlap, ``serial`` ones may not; uploads may."""
    ours = Ordered(order)
    copied(large, ours, budget_nbytes=256 << 20)
    assert len(ours.begun) == RANKS
    for key, begun in ours.begun.items():
        assert len(begun) == 4
        if order != "any":
            assert begun == sorted(begun)
        assert (ours.most[key] == 1) == (order == "serial")
    assert ours.most_uploads > 1
    assert run(run_build(ours, 1, BUDGET_NBYTES))[0]["own"][-1] == 1.0


@pytest.mark.parametrize("order", ["any", "serial"])
def test_memory_stays_within_the_budget(
    order: PartOrder, large: MemoryDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow the destination is; and all of it is given back, also after a failure."""
    pool = host_pool(16 << 20)
    pool.release()
    out, most = 0, 0

    def counted(nbytes: int) -> None:
        nonlocal out, most
        out += 1
        most = max(most, out)

    on_allocation(monkeypatch, counted)
    copied(large, Ordered(order), budget_nbytes=48 << 20)
    assert 1 < most <= 3

    async def fail(operation: str, key: str) -> None:
        if operation == "write":
            raise holdfast.FullError("injected")

    with pytest.raises(holdfast.FullError):
        copied(large, HookedDriver(Ordered(order), before=fail), budget_nbytes=48 << 20)
    assert pool.free_nbytes == most * pool.buffer_nbytes


def test_the_first_failure_ends_all_that_runs(large: MemoryDriver) -> None:
    """Uploads are dropped, on every line, and what is raised is what went wrong, with its cause."""
    ours, aborted = Ordered("serial"), []

    class Dropped(HookedDriver):
        async def create(self, key: str, nbytes: int) -> Upload:
            upload = await super().create(key, nbytes)
            abort = upload.abort

            async def noted() -> None:
                aborted.append(key)
                await abort()

            upload.abort = noted  # type: ignore[method-assign]
            return upload

    async def fail(operation: str, key: str) -> None:
        if operation == "write" and key.endswith("/1.safetensors"):
            raise holdfast.FullError("injected", key=key) from ValueError("the cause")

    with pytest.raises(holdfast.FullError, match="injected") as caught:
        copied(large, Dropped(ours, before=fail), budget_nbytes=256 << 20)
    assert isinstance(caught.value.__cause__, ValueError)
    assert len(set(aborted)) == RANKS
    assert images(ours) == []


@pytest.mark.parametrize(
    ("nbytes", "hands", "dealt"),
    [
        ([], 3, []),
        ([5], 3, [[0]]),
        ([1, 1, 1, 1], 2, [[0, 2], [1, 3]]),
        ([9, 1, 2, 3, 3], 2, [[0], [1, 2, 3, 4]]),
    ],
)
def test_images_are_dealt_evenly(nbytes: list[int], hands: int, dealt: list[list[int]]) -> None:
    """By bytes, each once, and nobody gets none."""
    assert balanced(nbytes, hands) == dealt
