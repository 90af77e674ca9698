"""Test copies that fail, die or meet others: they leave a whole checkpoint or none, and resume."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from support.copies import (
    OLD,
    RANKS,
    attempts,
    checkpoint,
    copied,
    flipped,
    images,
    loaded,
    run,
    save,
)
from support.drivers import Fault, HookedDriver, age, contents

import holdfast
from holdfast.drivers.contract import Driver
from holdfast.drivers.local.driver import LocalDriver
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.format.manifest import MANIFEST_KEY, Manifest
from holdfast.storage.operations.loading.load import run_build
from holdfast.storage.operations.maintenance.copy import Orders, copy_checkpoint
from holdfast.storage.protocol import limits
from holdfast.storage.runtime.engine import start

BUDGET_NBYTES = 64 << 20


def prepared() -> MemoryDriver:
    """A destination with another checkpoint, and what a dead attempt left."""
    storage = MemoryDriver()
    run(save(storage, OLD))
    run(storage.put("data/20200101T000000-00000000/attempt.json", b"{}"))
    run(storage.put("data/20200101T000000-00000000/0.safetensors", b"half an image"))
    return storage


def accesses() -> int:
    """How often a copy accesses its destination."""
    fault = Fault(1 << 30, after=False, for_good=False)
    copied(checkpoint(), HookedDriver(prepared(), fault.on_before), overwrite=True)
    return fault.seen + 1


N_ACCESSES = accesses()


@pytest.mark.nightly(27)
@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("n", range(N_ACCESSES))
def test_a_copy_that_fails_at_any_access_leaves_a_whole_checkpoint(
    n: int, after: bool, for_good: bool
) -> None:
    """A repeated copy succeeds and resends no whole image."""
    theirs, ours = checkpoint(), prepared()
    fault = Fault(n, after=after, for_good=for_good)
    failed = False
    try:
        copied(theirs, HookedDriver(ours, fault.on_before, fault.on_after), overwrite=True)
    except holdfast.StorageDownError:
        failed = True
    assert fault.hit is not None
    found = loaded(ours)["who"]
    if not failed:
        assert found == "new"
        refused = after and fault.hit[1].endswith(
            "/attempt.json"
        )  # the second put there ends with an error of its own
        assert (
            fault.hit[0] in ("delete", "delete_all", "stat", "get", "sweep") or refused
        )  # stat: that something is gone
    elif found == "new":
        looks = [("get", "data/pruning"), ("get", MANIFEST_KEY)]  # whether what was put stays
        assert fault.hit in looks or (fault.hit, after) == (("put", MANIFEST_KEY), True)
    objects = run(contents(ours))
    undecided = {
        a
        for a in attempts(ours)
        if f"data/{a}/fate" not in objects and f"data/{a}/attempt.json" in objects
    }
    whole = [
        key
        for key in images(ours)
        if key.split("/")[1] in undecided and "2020" not in key.split("/")[1][:4]
    ]
    nbytes = {
        key.split("/")[2]: len(data)
        for key, data in run(contents(theirs)).items()
        if key in images(theirs)
    }
    sent_nbytes = copied(theirs, ours, overwrite=True)
    assert sent_nbytes == (
        0 if found == "new" else sum(nbytes.values()) - sum(len(objects[key]) for key in whole)
    )
    assert loaded(ours)["who"] == "new"
    objects = run(contents(ours))
    left = attempts(ours) - {Manifest.decode(objects[MANIFEST_KEY]).attempt}
    if sent_nbytes or found == "old":
        assert all(objects[f"data/{attempt}/fate"].startswith(b"claim ") for attempt in left)
        assert len(left) <= 1


def stopped(theirs: Driver, ours: MemoryDriver, committed: int) -> None:
    """A copy that dies when so many images are whole."""
    done = 0

    async def die(operation: str, key: str) -> None:
        nonlocal done
        if operation == "commit":
            done += 1
            if done > committed:
                raise holdfast.StorageDownError("injected")

    with pytest.raises(holdfast.StorageDownError):
        copied(theirs, HookedDriver(ours, before=die))


def test_a_copy_goes_on_where_it_stopped() -> None:
    """Under the same attempt; only what is missing is read and sent."""
    theirs, ours, read = checkpoint(), MemoryDriver(), Counter[str]()
    stopped(theirs, ours, 2)
    (attempt,) = attempts(ours)
    assert len(images(ours)) == 2
    with pytest.raises(holdfast.NotACheckpointError):
        loaded(ours)

    async def count(operation: str, key: str) -> None:
        read[operation] += 1

    sent_nbytes = copied(HookedDriver(theirs, before=count), ours)
    assert read["read"] == 1
    assert sent_nbytes in {len(run(theirs.get(key))) for key in images(theirs)}
    assert attempts(ours) == {attempt}
    assert loaded(ours)["who"] == "new"


def test_what_is_no_whole_image_is_sent_again() -> None:
    """One of another size, and one whose checksums are not those of this checkpoint."""
    theirs, ours = checkpoint(), MemoryDriver()
    stopped(theirs, ours, 2)
    short, strange = images(ours)
    run(ours.put(short, run(ours.get(short))[:-1]))
    flipped(ours, strange, -1)
    nbytes = sum(len(run(theirs.get(key))) for key in images(theirs))
    assert copied(theirs, ours) == nbytes
    assert loaded(ours)["who"] == "new"


def test_half_a_copy_of_another_checkpoint_is_collected() -> None:
    """Neither gone on with nor left behind: also where the same job has saved anew."""
    theirs, ours = checkpoint(), MemoryDriver()
    stopped(theirs, ours, 2)
    other = checkpoint()
    copied(other, ours)
    assert len(attempts(ours)) == 1
    assert len(images(ours)) == RANKS


@pytest.mark.parametrize("moment", ["create", "write", "commit", "put", "stat"])
@pytest.mark.parametrize("exclusive", [True, False])
def test_two_copies_of_one_checkpoint_to_one_place(moment: str, exclusive: bool) -> None:
    """In the end there is one whole checkpoint and nothing else."""
    theirs, ours = checkpoint(), MemoryDriver()
    ours.traits = replace(ours.traits, exclusive_is_atomic=exclusive)
    once = []

    async def meanwhile(operation: str, key: str) -> None:
        if operation == moment and not once:
            once.append(key)
            await copy_checkpoint(theirs, ours, Orders(False, BUDGET_NBYTES))

    try:
        copied(theirs, HookedDriver(ours, before=meanwhile))
    except holdfast.SupersededError:
        assert exclusive
    assert once
    assert loaded(ours)["who"] == "new"
    assert run(run_build(ours, 2, BUDGET_NBYTES))[0]["own"][0] == 2.0
    assert len(attempts(ours)) <= (1 if exclusive else 2)


def test_without_exclusion_a_copy_that_was_idle_for_long_is_not_gone_on_with() -> None:
    """A collector that goes by age may soon delete it."""
    theirs, ours = checkpoint(), MemoryDriver()
    ours.traits = replace(ours.traits, exclusive_is_atomic=False)
    stopped(theirs, ours, 2)
    half = attempts(ours)
    age(ours, limits.IDLE_S * 0.75)
    copied(theirs, ours)
    assert attempts(ours) > half
    assert len(attempts(ours)) == 2


def test_a_save_that_commits_meanwhile_is_not_replaced_unasked() -> None:
    """What was not there at the beginning may be there at the end."""
    theirs, ours = checkpoint(), MemoryDriver()
    run(save(ours, OLD))
    objects = run(contents(ours))
    there = MemoryDriver()

    async def appear(operation: str, key: str) -> None:
        if operation == "commit":
            for name, data in objects.items():
                await there.put(name, data)

    with pytest.raises(holdfast.ExistsError):
        copied(theirs, HookedDriver(there, before=appear))
    assert loaded(there)["who"] == "old"


def test_an_interrupted_copy_cleans_up_first(tmp_path: Path, no_leaks: None) -> None:
    """No temporary file stays, and called again it goes on."""
    large, ours, reached, cancelled = (
        checkpoint(6 << 20),
        LocalDriver(tmp_path),
        threading.Event(),
        list[str](),
    )

    async def halt(operation: str, key: str) -> None:
        if operation == "write":
            reached.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(key)
                raise

    future = start(
        copy_checkpoint(large, HookedDriver(ours, before=halt), Orders(False, BUDGET_NBYTES))
    )
    assert reached.wait(30)
    future.cancel()
    while len(cancelled) < 1 or list(tmp_path.rglob("*.tmp")):
        assert reached.wait(30)
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["attempt.json"]
    copied(large, ours)
    assert loaded(ours)["who"] == "new"
    run(ours.close())
