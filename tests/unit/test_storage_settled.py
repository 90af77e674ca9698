"""Test manifests that are put twice, because an answer was lost: their data still exists."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import torch
from support.bits import difference, fresh_uri
from support.copies import attempts, checkpoint, copied, loaded, run, save
from support.drivers import HookedDriver, age

import holdfast
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.format.manifest import MANIFEST_KEY
from holdfast.storage.operations.saving.save import SaveJob, run_save
from holdfast.storage.protocol import limits
from holdfast.storage.ranks.team import Solo
from holdfast.storage.state.flattening.flatten import flatten

OLD, NEW, LAST = (
    {"who": who, "x": torch.full((5,), float(i))} for i, who in enumerate(["old", "new", "last"])
)


def putting_again(storage: MemoryDriver, meanwhile: Callable[[], Awaitable[Any]]) -> HookedDriver:
    """Return a driver to ``storage`` that puts each manifest again after ``meanwhile``."""

    async def after(operation: str, key: str) -> None:
        if (operation, key) == ("put", MANIFEST_KEY):
            manifest = await storage.get(key)
            await meanwhile()
            await storage.put(key, manifest)

    return HookedDriver(storage, after=after)


def is_look(done: Sequence[tuple[str, str]]) -> bool:
    """Whether the last of these operations of a saver read the manifest that it had put."""
    return ("put", MANIFEST_KEY) in done and done[-1] == ("get", MANIFEST_KEY)


def dying_unsettled(storage: MemoryDriver) -> HookedDriver:
    """A saver's way to ``storage``, which is gone when the manifest has been put, and seen."""
    done: list[tuple[str, str]] = []

    async def before(operation: str, key: str) -> None:
        if is_look(done):
            raise holdfast.StorageDownError("injected")

    async def after(operation: str, key: str) -> None:
        if not is_look(done):
            done.append((operation, key))

    return HookedDriver(storage, before, after)


def with_old() -> MemoryDriver:
    """Storage with a checkpoint."""
    storage = MemoryDriver()
    run(save(storage, OLD))
    return storage


def test_a_save_between_the_two_deletes_nothing_that_is_named_again() -> None:
    """Both checkpoints stay whole for the grace period."""
    storage = with_old()

    async def meanwhile() -> None:
        await save(storage, LAST)

    run(save(putting_again(storage, meanwhile), NEW))
    assert difference(NEW, loaded(storage)) is None
    assert len(attempts(storage)) == 2
    age(storage, limits.GRACE_S + 60.0)
    run(save(storage, LAST))
    assert len(attempts(storage)) == 1


def has_put(done: Sequence[tuple[str, str]]) -> bool:
    """Return whether the last of these operations of a save put its manifest."""
    return done[-1] == ("put", MANIFEST_KEY)


@pytest.mark.parametrize(
    ("lingers", "expected"),
    [(is_look, NEW), (has_put, LAST)],
    ids=["after it looked", "before it looks"],
)
def test_a_save_that_meets_the_second_put_deletes_nothing_that_is_named_again(
    lingers: Callable[[Sequence[tuple[str, str]]], bool], expected: dict[str, Any]
) -> None:
    """A save that has looked lets the repeated put win; one that looks later puts its own again."""
    storage = with_old()

    async def both() -> None:
        replaced, settled, later = asyncio.Event(), asyncio.Event(), []
        done: list[tuple[str, str]] = []

        async def linger(operation: str, key: str) -> None:
            done.append((operation, key))
            if lingers(done):
                replaced.set()
                await settled.wait()

        async def meanwhile() -> None:
            later.append(asyncio.create_task(save(HookedDriver(storage, after=linger), LAST)))
            await replaced.wait()

        await save(putting_again(storage, meanwhile), NEW)
        settled.set()
        await later[0]

    run(both())
    assert difference(expected, loaded(storage)) is None


@pytest.mark.parametrize("grace_over", [False, True])
def test_a_pruning_between_the_two_deletes_nothing_that_is_named_again(grace_over: bool) -> None:
    """A pruning waits for the saver, or for the hour."""
    root, pruned = fresh_uri(), []
    storage = MemoryDriver(f"{root}/step-1".removeprefix("memory://"))

    def others() -> None:
        if grace_over:
            age(storage, limits.GRACE_S + 60.0)
        holdfast.save(f"{root}/step-2", LAST, step=2)
        report = holdfast.prune(root, keep_last=1)
        pruned.extend(report.checkpoints)
        assert report.kept == (("step-2",) if grace_over else ("step-1", "step-2"))

    async def meanwhile() -> None:
        await asyncio.to_thread(others)

    job = SaveJob(flatten(NEW), 1, 1 << 20)
    run(run_save(putting_again(storage, meanwhile), Solo(), job))
    assert [c.step for c in pruned] == ([1] if grace_over else [])
    if not grace_over:
        assert difference(NEW, loaded(storage)) is None
        assert [c.step for c in holdfast.prune(root, keep_last=1).checkpoints] == [1]
        assert attempts(storage) == set()


@pytest.mark.parametrize("grace_over", [False, True])
def test_who_dies_before_it_settles_counts_as_settled_an_hour_later(grace_over: bool) -> None:
    """For a save that replaces it."""
    storage = with_old()
    run(save(dying_unsettled(storage), NEW))
    assert difference(NEW, loaded(storage)) is None
    assert len(attempts(storage)) == 2
    if grace_over:
        age(storage, limits.GRACE_S + 60.0)
    run(save(storage, LAST))
    assert len(attempts(storage)) == (1 if grace_over else 3)


def test_a_copy_is_settled_and_another_one_of_the_same_leaves_it_alone() -> None:
    """Two copies share an attempt, which becomes the checkpoint."""
    theirs, ours, first = checkpoint(), MemoryDriver(), True

    async def overtaken(operation: str, key: str) -> None:
        nonlocal first
        if operation == "commit" and first:
            first = False
            await asyncio.to_thread(copied, theirs, ours)

    copied(theirs, HookedDriver(ours, before=overtaken))
    assert not first
    (attempt,) = attempts(ours)
    with pytest.raises(holdfast.NotFoundError):
        run(ours.stat(f"data/{attempt}/attempt.json"))
    assert loaded(ours)["who"] == "new"
    run(save(ours, OLD))
    assert len(attempts(ours)) == 1
