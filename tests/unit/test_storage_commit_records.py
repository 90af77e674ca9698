"""Commit records and settled attempts: a committed attempt is neither deleted nor mixed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from support.bits import difference, fresh_uri
from support.copies import (
    BUDGET_NBYTES,
    LAST,
    NEW,
    OLD,
    attempts,
    checkpoint,
    copied,
    images,
    loaded,
    run,
    save,
)
from support.drivers import HookedDriver, age, contents, retried, storage_at

import holdfast
from holdfast.drivers.contract import Driver
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.format.manifest import MANIFEST_KEY, Manifest
from holdfast.storage.operations.maintenance.copy import Orders, copy_checkpoint
from holdfast.storage.operations.saving.save import SaveJob, run_save
from holdfast.storage.protocol import collect, commit, limits, prune_lock
from holdfast.storage.protocol.attempt import Attempt, delete_attempt, put_commit_record
from holdfast.storage.protocol.current import read_manifest
from holdfast.storage.ranks.team import Team
from holdfast.storage.state.flattening.flatten import flatten

HOUR_S = 3600.0


def with_old() -> MemoryDriver:
    """Return storage with a checkpoint."""
    storage = MemoryDriver()
    run(save(storage, OLD))
    return storage


def aged(storage: MemoryDriver, key: str, seconds: float) -> None:
    """Backdate an object by ``seconds``."""
    data, _ = storage.objects[key]
    storage.objects[key] = (data, time.time() - seconds)


async def with_images(storage: Driver, theirs: Driver) -> tuple[Attempt, Manifest]:
    """Prepare a copy that is not yet committed."""
    manifest, _ = await read_manifest(theirs)
    attempt, _ = await commit.begin_copy(storage, "the same checkpoint")
    target = replace(manifest, attempt=attempt.id)
    for image in range(len(manifest.images)):
        await storage.put(target.image_key(image), await theirs.get(manifest.image_key(image)))
    return attempt, target


@pytest.mark.parametrize("layer", [lambda driver: driver, retried], ids=["bare", "retried"])
def test_a_commit_record_that_the_client_put_twice_is_recognised(
    layer: Callable[[Driver], Driver],
) -> None:
    """A conflict with one's own commit record, after a retried put, counts as success."""
    storage = MemoryDriver()
    refused = []

    async def twice(operation: str, key: str) -> None:
        if operation == "put" and key.endswith("/fate"):
            refused.append(key)
            raise holdfast.ExistsError("412 precondition failed", uri=storage.uri, key=key)

    run(save(layer(HookedDriver(storage, after=twice)), OLD))
    assert len(refused) == 1
    assert difference(OLD, loaded(storage)) is None


def test_a_prune_lock_that_the_client_put_twice_is_recognised() -> None:
    """A pruning recognises its own lock after a retried put, and need not wait an hour for it."""
    storage = with_old()
    (attempt,) = attempts(storage)

    async def twice(operation: str, key: str) -> None:
        if (operation, key) == ("put", prune_lock.PRUNING_KEY):
            raise holdfast.ExistsError("412 precondition failed", uri=storage.uri, key=key)

    assert run(prune_lock.delete_manifest(HookedDriver(storage, after=twice), Attempt(attempt)))
    assert prune_lock.PRUNING_KEY not in run(contents(storage))


def test_a_pruning_leaves_the_prune_lock_of_one_that_took_over() -> None:
    """A pruning deletes only its own prune lock."""
    storage = with_old()
    (attempt,) = attempts(storage)
    run(storage.put(prune_lock.PRUNING_KEY, prune_lock.new_lock()))
    aged(storage, prune_lock.PRUNING_KEY, 2 * HOUR_S)
    other = prune_lock.new_lock()

    async def overtake(operation: str, key: str) -> None:
        if (operation, key) == ("delete", MANIFEST_KEY):
            await storage.put(prune_lock.PRUNING_KEY, other)

    assert run(prune_lock.delete_manifest(HookedDriver(storage, before=overtake), Attempt(attempt)))
    assert run(contents(storage))[prune_lock.PRUNING_KEY] == other


@pytest.mark.parametrize(
    "old", [b"", b"claim 0123456789abcdef"], ids=["of earlier versions", "of this version"]
)
def test_a_commit_record_of_any_version_counts(old: bytes) -> None:
    """Collectors spare an attempt with a commit record, empty or not."""
    theirs, storage = checkpoint(), MemoryDriver()
    attempt, target = run(with_images(storage, theirs))
    run(storage.put(attempt.record_key, old))
    with pytest.raises(holdfast.SupersededError):
        run(commit.commit(storage, attempt, target))
    run(save(storage, OLD))
    assert attempt.id in attempts(storage)
    aged(storage, attempt.record_key, 2 * HOUR_S)
    run(save(storage, OLD))
    assert attempt.id not in attempts(storage)


def test_an_image_of_another_size_is_not_committed() -> None:
    """If the leader sees another size, the save fails and the old checkpoint stays."""
    storage = with_old()

    async def shrink(operation: str, key: str) -> None:
        if operation == "commit" and key.endswith(".safetensors"):
            data, written_s = storage.objects[key]
            storage.objects[key] = (data[:-1], written_s)

    with pytest.raises(holdfast.InvisibleFilesError, match="bytes for the committing rank, not"):
        run(save(HookedDriver(storage, after=shrink), NEW))
    assert difference(OLD, loaded(storage)) is None


def test_the_hour_of_an_unsettled_attempt_begins_with_its_commit_record() -> None:
    """The grace hour starts at the commit record, so a two-hour save is spared after its commit."""
    storage = with_old()
    (attempt,) = attempts(storage)
    run(storage.put(f"data/{attempt}/attempt.json", b""))  # it is not settled
    aged(storage, f"data/{attempt}/attempt.json", 2 * HOUR_S)
    run(save(storage, NEW))
    assert attempt in attempts(storage)
    aged(storage, f"data/{attempt}/fate", 2 * HOUR_S)
    run(save(storage, NEW))
    assert attempt not in attempts(storage)


def test_a_deletion_that_dies_halfway_leaves_no_marker() -> None:
    """A save whose images are being deleted finds its marker gone, and does not commit."""
    storage = MemoryDriver()
    run(save(storage, OLD))
    attempt = Attempt(next(iter(attempts(storage))))
    run(storage.put(attempt.marker_key, b"{}"))
    deleted: list[str] = []

    async def die(operation: str, key: str) -> None:
        if operation.startswith("delete"):
            if deleted:
                raise holdfast.StorageDownError("the process has died")
            deleted.append(key)

    run(delete_attempt(HookedDriver(storage, before=die), attempt))
    assert deleted == [attempt.marker_key]


def test_under_a_damaged_manifest_no_attempt_with_a_commit_record_is_collected() -> None:
    """The manifest may have named that attempt, and a user may want to salvage it."""
    storage = with_old()
    (attempt,) = attempts(storage)
    run(storage.put(MANIFEST_KEY, b"rubbish"))
    aged(storage, f"data/{attempt}/fate", 1000 * HOUR_S)
    run(save(storage, NEW))
    assert {key for key in images(storage) if attempt in key}


def test_an_attempt_is_as_young_as_its_newest_file() -> None:
    """An attempt is as old as its newest file, in any order of listing: active saves are spared."""
    storage = MemoryDriver()
    attempt = "20200101T000000-00000000"
    for name, age_s in (
        ("0.safetensors", 1.0),
        ("1.safetensors", 2 * HOUR_S),
        ("attempt.json", 3 * HOUR_S),
    ):
        run(storage.put(f"data/{attempt}/{name}", b""))
        aged(storage, f"data/{attempt}/{name}", age_s)
    run(collect.collect(storage, HOUR_S))
    assert attempts(storage) == {attempt}
    aged(storage, f"data/{attempt}/0.safetensors", 2 * HOUR_S)
    run(collect.collect(storage, HOUR_S))
    assert attempts(storage) == set()


@pytest.mark.parametrize("exclusive", [True, False])
def test_a_copy_is_settled_only_where_no_other_can_have_put_its_commit_record(
    exclusive: bool,
) -> None:
    """Without exclusive puts a copy stays unsettled: another may still put the manifest."""
    theirs, ours = checkpoint(), MemoryDriver()
    ours.traits = replace(ours.traits, exclusive_is_atomic=exclusive)
    copied(theirs, ours)
    (attempt,) = attempts(ours)
    assert (f"data/{attempt}/attempt.json" in run(contents(ours))) == (not exclusive)


@pytest.mark.parametrize("moment", ["committed", "claimed"])
def test_a_copy_that_finds_damage_deletes_no_attempt_that_another_commits(moment: str) -> None:
    """A copy that meets damage leaves an attempt that another copy shares."""
    theirs, ours, once = checkpoint(), MemoryDriver(), list[str]()

    async def meanwhile(operation: str, key: str) -> None:
        if operation != "read" or once:
            return
        once.append(key)
        if moment == "committed":
            await copy_checkpoint(theirs, ours, Orders(False, BUDGET_NBYTES))
        else:
            (attempt,) = {key.split("/")[1] for key in ours.objects}
            await ours.put(f"data/{attempt}/0.safetensors", b"what the other has written")
            await put_commit_record(ours, Attempt(attempt))
        for damaged in [
            key
            for key in theirs.objects
            if key.startswith("data/") and key.endswith(".safetensors")
        ]:
            data = await theirs.get(damaged)
            await theirs.put(damaged, data[:300] + bytes([data[300] ^ 1]) + data[301:])

    with pytest.raises(holdfast.DamagedError):
        copied(HookedDriver(theirs, before=meanwhile), ours)
    assert once
    assert images(ours)
    if moment == "committed":
        assert loaded(ours)["who"] == "new"


def putting_again(storage: MemoryDriver, meanwhile: Callable[[], Awaitable[Any]]) -> HookedDriver:
    """Return a driver to ``storage`` that puts each manifest again after ``meanwhile``."""

    async def after(operation: str, key: str) -> None:
        if (operation, key) == ("put", MANIFEST_KEY):
            manifest = await storage.get(key)
            await meanwhile()
            await storage.put(key, manifest)

    return HookedDriver(storage, after=after)


@pytest.mark.parametrize("grace_over", [False, True])
def test_a_pruning_between_the_two_deletes_nothing_that_is_named_again(grace_over: bool) -> None:
    """A pruning waits for the saver, or for the hour."""
    root, pruned = fresh_uri(), []
    storage = storage_at(f"{root}/step-1")

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
    run(run_save(putting_again(storage, meanwhile), Team(), job))
    assert [c.step for c in pruned] == ([1] if grace_over else [])
    if not grace_over:
        assert difference(NEW, loaded(storage)) is None
        assert [c.step for c in holdfast.prune(root, keep_last=1).checkpoints] == [1]
        assert attempts(storage) == set()


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
