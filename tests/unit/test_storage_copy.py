"""Test copies: bit for bit, verified, within the budget; resumed after failures, alone at a place."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from support.bits import difference, flip, fresh_uri, image_in, saved
from support.copies import (
    BUDGET_NBYTES,
    DEAD,
    OLD,
    RANKS,
    attempts,
    checkpoint,
    copied,
    flipped,
    images,
    loaded,
    prepared,
    run,
    save,
)
from support.drivers import Counting, Fault, HookedDriver, age, contents, dying_after
from support.inside import on_allocation
from support.ordered import Ordered
from support.ranks import save_as_ranks

import holdfast
from holdfast.drivers.contract import Driver, PartOrder
from holdfast.drivers.local.driver import LocalDriver
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.format.manifest import MANIFEST_KEY, Manifest
from holdfast.storage.format.packed import Compression
from holdfast.storage.operations.loading.load import run_build
from holdfast.storage.operations.maintenance.copy import Orders, copy_checkpoint
from holdfast.storage.operations.reading.reader import Checkpoint
from holdfast.storage.protocol import limits
from holdfast.storage.protocol.current import read_manifest
from holdfast.storage.runtime.buffers import host_pool
from holdfast.storage.runtime.engine import start


def test_a_folder_is_copied_checkpoint_by_checkpoint(tmp_path: Path) -> None:
    """A recursive copy sends each missing checkpoint to the same path below the destination."""
    root = fresh_uri()
    for step in (20, 3):
        holdfast.save(f"{root}/run/step-{step}", {"x": torch.ones(step), "step": step})
    first = holdfast.copy(root, tmp_path, recursive=True)
    assert [(c.path, c.step) for c in first.checkpoints] == [("run/step-3", 3), ("run/step-20", 20)]
    holdfast.save(f"{root}/run/step-30", {"x": torch.ones(3), "step": 30})
    second = holdfast.copy(root, tmp_path, recursive=True)
    with holdfast.open(tmp_path / "run/step-20") as c, holdfast.open(f"{root}/run/step-20") as old:
        assert (c.step, c.world, c.created_s) == (20, 1, old.created_s)
        assert c.attempt != old.attempt
    assert [c.sent_nbytes > 0 for c in second.checkpoints] == [False, False, True]
    assert [c.path for c in holdfast.list_checkpoints(tmp_path)] == [
        "run/step-3",
        "run/step-20",
        "run/step-30",
    ]
    with pytest.raises(holdfast.NotACheckpointError):
        holdfast.copy(root, fresh_uri())
    with pytest.raises(holdfast.NotACheckpointError):
        holdfast.copy(fresh_uri(), fresh_uri(), recursive=True)


def test_another_checkpoint_is_replaced_only_if_asked_for() -> None:
    """Without ``overwrite``, a copy over another checkpoint fails before it reads any data."""
    theirs, ours, seen = checkpoint(), MemoryDriver(), Counter[str]()
    run(save(ours, OLD))
    before = run(contents(ours))

    async def count(operation: str, key: str) -> None:
        seen[operation] += 1

    with pytest.raises(holdfast.ExistsError, match="another checkpoint already exists"):
        copied(HookedDriver(theirs, before=count), HookedDriver(ours, before=count))
    assert seen == {"get": 2}
    assert run(contents(ours)) == before
    copied(theirs, ours, overwrite=True)
    assert loaded(ours)["who"] == "new"
    assert len(attempts(ours)) == 1


def test_a_damaged_manifest_at_the_destination_is_no_free_place() -> None:
    """Without ``overwrite``, a copy refuses to replace a damaged manifest."""
    theirs, ours = checkpoint(), MemoryDriver()
    run(ours.put(MANIFEST_KEY, b"rubbish"))
    with pytest.raises(holdfast.ExistsError, match="damaged"):
        copied(theirs, ours)
    copied(theirs, ours, overwrite=True)
    assert loaded(ours)["who"] == "new"


@pytest.mark.parametrize("image_nbytes", [None, 1], ids=["as is", "anew"])
def test_the_same_checkpoint_is_left_alone_or_mended(image_nbytes: int | None) -> None:
    """Nothing is sent to an equal copy; ``overwrite`` repairs a damaged one."""
    theirs, ours = checkpoint(), MemoryDriver()
    sent_nbytes = copied(theirs, ours, image_nbytes=image_nbytes)
    assert copied(theirs, ours, image_nbytes=image_nbytes) == 0
    assert copied(theirs, ours, overwrite=True, image_nbytes=image_nbytes) == 0
    flipped(ours, images(ours)[1], 5000)
    assert copied(theirs, ours, image_nbytes=image_nbytes) == 0
    assert copied(theirs, ours, overwrite=True, image_nbytes=image_nbytes) == sent_nbytes
    assert copied(theirs, ours, overwrite=True, image_nbytes=image_nbytes) == 0
    assert copied(ours, ours, overwrite=True, image_nbytes=image_nbytes) == 0


@pytest.mark.parametrize("image_nbytes", [None, 1], ids=["as is", "anew"])
def test_a_source_that_is_replaced_meanwhile_is_called_so(image_nbytes: int | None) -> None:
    """A copy whose source is replaced raises ReplacedError, not DamagedError."""
    theirs, ours = checkpoint(), MemoryDriver()
    other = run(contents(checkpoint()))

    async def replaced(operation: str, key: str) -> None:
        if operation == "read" and MANIFEST_KEY in other:
            await theirs.put(MANIFEST_KEY, other.pop(MANIFEST_KEY))
            await theirs.delete_all("data")

    with pytest.raises(holdfast.ReplacedError):
        copied(HookedDriver(theirs, before=replaced), ours, image_nbytes=image_nbytes)
    assert run(contents(ours)) == {}


def test_each_side_has_options_of_its_own(tmp_path: Path) -> None:
    """Options of the source and of the destination each reach their own side only."""
    uri = saved({"x": torch.ones(3)})
    holdfast.copy(uri, tmp_path, dst_options={"threads": 3})
    assert holdfast.copy(tmp_path, fresh_uri(), src_options={"direct": "off"}).ok
    for options in ({"src_options": {"threads": 3}}, {"dst_options": {"endpoint": "x"}}):
        with pytest.raises(holdfast.UriError):
            holdfast.copy(uri, tmp_path, **options)


def test_what_is_damaged_counts_neither_as_copied_nor_as_there(tmp_path: Path) -> None:
    """A damaged checkpoint is a problem in the report, and stops no other from being copied."""
    root, seen = tmp_path / "from", list[tuple[int, int]]()
    for step in (1, 2, 3):
        holdfast.save(
            root / f"step-{step}", {"x": torch.zeros(5 << 20, dtype=torch.uint8), "step": step}
        )
    flip(image_in(root / "step-2"), 4 << 20)
    report = holdfast.copy(
        root,
        tmp_path / "to",
        recursive=True,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert [c.step for c in report.copied] == [1, 3]
    assert [c.step for c in holdfast.list_checkpoints(tmp_path / "to")] == [1, 3]
    assert (report.ok, report.checkpoints[1].problem is None) == (False, False)
    assert report.nbytes == report.sent_nbytes == 2 * report.checkpoints[0].nbytes
    assert seen[-1][0] == seen[-1][1] >= report.nbytes
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    again = holdfast.copy(root, tmp_path / "to", recursive=True)
    assert (again.nbytes, again.sent_nbytes) == (report.nbytes, 0)


@pytest.fixture(scope="module")
def large() -> MemoryDriver:
    """Return a checkpoint of three images of three chunks each."""
    return checkpoint((40 << 20) // 4)


@pytest.mark.nightly(5)
@pytest.mark.parametrize("order", ["any", "ascending", "serial"])
def test_parts_arrive_in_the_order_asked_for(order: PartOrder, large: MemoryDriver) -> None:
    """``ascending`` parts may overlap, ``serial`` ones may not; uploads may."""
    ours = Ordered(order)
    copied(large, ours, budget_nbytes=256 << 20)
    assert len(ours.uploads) == RANKS
    for upload in ours.uploads:
        assert len(upload.begun) == 4
        if order != "any":
            assert upload.begun == sorted(upload.begun)
        assert (upload.most == 1) == (order == "serial")
    assert ours.most_writing > 1
    assert run(run_build(ours, 1, BUDGET_NBYTES))[0]["own"][-1] == 1.0


@pytest.mark.parametrize("image_nbytes", [None, 1], ids=["as is", "anew"])
@pytest.mark.parametrize("order", ["any", "serial"])
def test_memory_stays_within_the_budget(
    order: PartOrder,
    large: MemoryDriver,
    monkeypatch: pytest.MonkeyPatch,
    image_nbytes: int | None,
) -> None:
    """A copy to slow storage keeps its budget, and returns all memory, also after a failure."""
    pool = host_pool(16 << 20)
    pool.release()
    out, most = 0, 0

    def counted(nbytes: int) -> None:
        nonlocal out, most
        out += 1
        most = max(most, out)

    on_allocation(monkeypatch, counted)
    copied(large, Ordered(order), budget_nbytes=48 << 20, image_nbytes=image_nbytes)
    assert 1 < most <= 3

    async def fail(operation: str, key: str) -> None:
        if operation == "write" and key.endswith("/1.safetensors"):
            raise holdfast.FullError("injected")

    ours = Ordered(order)
    with pytest.raises(holdfast.FullError):
        copied(
            large,
            HookedDriver(ours, before=fail),
            budget_nbytes=48 << 20,
            image_nbytes=image_nbytes,
        )
    assert pool.free_nbytes == most * pool.buffer_nbytes
    assert not any(upload.open for upload in ours.uploads)


@pytest.mark.parametrize("image_nbytes", [None, 1], ids=["as is", "anew"])
@pytest.mark.nightly(12)
@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_copy_that_fails_at_any_access_leaves_a_whole_checkpoint(
    after: bool, for_good: bool, image_nbytes: int | None
) -> None:
    """A copy that failed at any access is repeated with success, and sends no whole image again."""
    for n in itertools.count():
        theirs, ours = checkpoint(), prepared()
        fault = Fault(n, after=after, for_good=for_good)
        failed = False
        try:
            there = HookedDriver(ours, fault.on_before, fault.on_after)
            copied(theirs, there, overwrite=True, image_nbytes=image_nbytes)
        except holdfast.StorageDownError:
            failed = True
        if fault.hit is None:
            break
        found = loaded(ours)["who"]
        assert failed or found == "new"
        objects = run(contents(ours))
        undecided = {
            a
            for a in attempts(ours)
            if f"data/{a}/fate" not in objects and f"data/{a}/attempt.json" in objects
        }
        whole = [key for key in images(ours) if key.split("/")[1] in undecided - {DEAD}]
        missing_nbytes = size_of_copy(theirs, image_nbytes)
        missing_nbytes -= sum(len(objects[key]) for key in whole)
        sent_nbytes = copied(theirs, ours, overwrite=True, image_nbytes=image_nbytes)
        assert sent_nbytes == (0 if found == "new" else missing_nbytes)
        assert loaded(ours)["who"] == "new"
        objects = run(contents(ours))
        left = attempts(ours) - {Manifest.decode(objects[MANIFEST_KEY]).attempt}
        if sent_nbytes or found == "old":
            assert all(objects[f"data/{attempt}/fate"].startswith(b"claim ") for attempt in left)
            assert len(left) <= 1
    assert n > 20


def size_of_copy(theirs: Driver, image_nbytes: int | None) -> int:
    """Return the number of bytes that a copy to an empty destination sends."""
    return copied(theirs, MemoryDriver(), image_nbytes=image_nbytes)


def stopped(
    theirs: Driver, ours: MemoryDriver, committed: int, image_nbytes: int | None = None
) -> None:
    """Start a copy that dies after this many complete images."""
    with pytest.raises(holdfast.StorageDownError):
        copied(theirs, HookedDriver(ours, before=dying_after(committed)), image_nbytes=image_nbytes)


@pytest.mark.parametrize("image_nbytes", [None, 1], ids=["as is", "anew"])
def test_a_copy_goes_on_where_it_stopped(image_nbytes: int | None) -> None:
    """A repeated copy resumes the attempt. It reads and sends only the missing data."""
    theirs, ours, read = checkpoint(), MemoryDriver(), Counter[str]()
    stopped(theirs, ours, 2, image_nbytes)
    (attempt,) = attempts(ours)
    assert len(images(ours)) == 2
    with pytest.raises(holdfast.NotACheckpointError):
        loaded(ours)

    async def count(operation: str, key: str) -> None:
        read[operation] += 1

    sent_nbytes = copied(HookedDriver(theirs, before=count), ours, image_nbytes=image_nbytes)
    assert read["read"] == 1 if image_nbytes is None else 2  # pages of checksums
    assert sent_nbytes in {len(run(ours.get(key))) for key in images(ours)}
    assert attempts(ours) == {attempt}
    assert loaded(ours)["who"] == "new"


def test_what_is_no_whole_image_is_sent_again() -> None:
    """A resumed copy sends an image of another size, or with other checksums, again."""
    theirs, ours = checkpoint(), MemoryDriver()
    stopped(theirs, ours, 2)
    short, strange = images(ours)
    run(ours.put(short, run(ours.get(short))[:-1]))
    flipped(ours, strange, -1)
    nbytes = sum(len(run(theirs.get(key))) for key in images(theirs))
    assert copied(theirs, ours) == nbytes
    assert loaded(ours)["who"] == "new"


def test_half_a_copy_of_another_checkpoint_is_collected() -> None:
    """A copy deletes half a copy of another checkpoint, even of the same job."""
    theirs, ours = checkpoint(), MemoryDriver()
    stopped(theirs, ours, 2)
    other = checkpoint()
    copied(other, ours)
    assert len(attempts(ours)) == 1
    assert len(images(ours)) == RANKS


@pytest.mark.parametrize("image_nbytes", [None, 1], ids=["as is", "anew"])
@pytest.mark.parametrize("moment", ["create", "commit", "put"])
@pytest.mark.parametrize("exclusive", [True, False])
def test_two_copies_of_one_checkpoint_to_one_place(
    moment: str, exclusive: bool, image_nbytes: int | None
) -> None:
    """In the end there is one whole checkpoint and nothing else."""
    theirs, ours = checkpoint(), MemoryDriver()
    ours.traits = replace(ours.traits, exclusive_is_atomic=exclusive)
    once = []

    async def meanwhile(operation: str, key: str) -> None:
        if operation == moment and not once:
            once.append(key)
            await copy_checkpoint(theirs, ours, Orders(False, BUDGET_NBYTES, image_nbytes))

    try:
        copied(theirs, HookedDriver(ours, before=meanwhile), image_nbytes=image_nbytes)
    except holdfast.SupersededError:
        assert exclusive
    assert once
    assert loaded(ours)["who"] == "new"
    assert run(run_build(ours, 2, BUDGET_NBYTES))[0]["own"][0] == 2.0
    assert len(attempts(ours)) <= (1 if exclusive else 2)


def test_without_exclusion_a_copy_that_was_idle_for_long_is_not_gone_on_with() -> None:
    """Without atomic creation, a copy does not resume an old attempt, which may be collected soon."""
    theirs, ours = checkpoint(), MemoryDriver()
    ours.traits = replace(ours.traits, exclusive_is_atomic=False)
    stopped(theirs, ours, 2)
    half = attempts(ours)
    age(ours, limits.IDLE_S * 0.75)
    copied(theirs, ours)
    assert attempts(ours) > half
    assert len(attempts(ours)) == 2


def test_a_save_that_commits_meanwhile_is_not_replaced_unasked() -> None:
    """A copy without ``overwrite`` spares a checkpoint that was committed during the copy."""
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
    """A cancelled copy leaves no temporary file, and resumes when called again."""
    large, ours = checkpoint(6 << 20), LocalDriver(tmp_path)
    reached, cancelled = threading.Event(), list[str]()

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


def saved_with(compression: Compression | None) -> MemoryDriver:
    """Return storage with a checkpoint of four ranks: tensors of many kinds, cut in many ways."""
    grid = torch.arange(6 * 40_000, dtype=torch.float64).view(6, 40_000)
    states = []
    for rank in range(4):
        rows = range(6)[rank * 2 : rank * 2 + 2]
        part = holdfast.Shard(
            grid[rows.start : rows.stop], shape=(6, 40_000), offset=(rows.start, 0)
        )
        begin = rank * 10_000
        column = holdfast.Shard(
            grid[:, begin : begin + 10_000], shape=(6, 40_000), offset=(0, begin)
        )
        states.append(
            {
                "rows": part,
                "columns": column,
                "whole": torch.arange(70_001, dtype=torch.int32),
                "odd": torch.arange(3, dtype=torch.uint8),
                "none": torch.empty(0, 5),
                "scalar": torch.tensor(2.5),
                "own": holdfast.PerRank({"seed": torch.full((rank + 1,), rank)}),
                "tied": [grid, grid],
                "step": 5,
                "rank": holdfast.PerRank(rank),
            }
        )
    storage = MemoryDriver()
    save_as_ranks(storage, states, compression=compression)
    return storage


@pytest.mark.parametrize("compression", [None, "lz4"])
@pytest.mark.parametrize(("image_nbytes", "count"), [(1, 4), (3_000_000, 3), (1 << 40, 1)])
def test_a_copy_in_another_layout_is_the_same_state(
    compression: Compression | None, image_nbytes: int, count: int
) -> None:
    """Images are plain and of similar size, each tensor is whole, all ranks find their state."""
    theirs, ours = saved_with(compression), MemoryDriver()
    copied(theirs, ours, image_nbytes=image_nbytes)
    before, after = run(read_manifest(theirs))[0], run(read_manifest(ours))[0]
    keys = images(ours)
    assert len(keys) == count
    assert len(after.shards) == ((after.tensors.alias < 0) & (after.tensors.nbytes > 0)).sum()
    assert (np.diff(after.shards.image) >= 0).all()
    for key in keys:
        content = safetensors.torch.load(run(ours.get(key)))
        assert content.keys() >= {"__holdfast_blocks__"}
    for rank in range(4):
        states = [run(run_build(driver, rank, BUDGET_NBYTES))[0] for driver in (theirs, ours)]
        assert difference(*states) is None
    assert (after.step, after.world, after.created_s) == (before.step, 4, before.created_s)


def test_whole_tensors_take_fewer_reads_from_a_copy_in_another_layout() -> None:
    """One file is read in sequence; of a file per rank, each has a part of every tensor."""
    whole = torch.arange(64 * 4096.0).view(64, 4096)
    parts = [holdfast.Shard(whole[r : r + 1], shape=(64, 4096), offset=(r, 0)) for r in range(64)]
    theirs, ours = Counting(), Counting()
    save_as_ranks(theirs, [{"x": part, "y": part} for part in parts])
    copied(theirs, ours, image_nbytes=1 << 30)
    for storage in (theirs, ours):
        storage.reads.clear()
        with Checkpoint(storage, run(read_manifest(storage))[0], 0) as c:
            assert difference({"x": whole, "y": whole}, dict(c.read_shares())) is None
    assert len(theirs.reads) == 64
    assert 0 < len(ours.reads) <= 2


def test_an_image_has_room_for_a_byte() -> None:
    """A size below one is refused before anything is read."""
    with pytest.raises(holdfast.UsageError, match="image_nbytes is 0"):
        holdfast.copy(fresh_uri(), fresh_uri(), image_nbytes=0)
