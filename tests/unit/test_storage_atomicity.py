"""Test that a save commits as a whole or not at all, and that the next one collects leftovers."""

from __future__ import annotations

import asyncio
import copy
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.bits import difference, fresh_uri
from support.copies import DEAD, LAST, NEW, OLD, attempts, loaded, prepared, run, save
from support.drivers import Fault, Halting, HookedDriver, age, contents, storage_at
from support.given import Serve
from support.inside import clean_up_within

import holdfast
from holdfast.drivers.local.driver import LocalDriver
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.format.digest import digest
from holdfast.storage.format.manifest import MANIFEST_KEY, Manifest
from holdfast.storage.protocol import limits

pytestmark = pytest.mark.clocked


def test_a_checkpoint_is_a_manifest_and_one_attempt(tmp_path: Path) -> None:
    """A save over a checkpoint replaces it: nothing of the old one is left, and no temporary file."""
    for state in (OLD, NEW):
        report = holdfast.save(tmp_path, state)
        files = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
        data = f"data/{report.attempt}"
        assert files == {
            "manifest.safetensors",
            f"{data}/0.safetensors",
            f"{data}/fate",
            f"{data}/telemetry.jsonl.gz",
        }
        assert [p.name for p in (tmp_path / "data").iterdir()] == [report.attempt]
        assert difference(state, holdfast.load(tmp_path)) is None


def test_a_state_without_tensors_writes_no_image(tmp_path: Path) -> None:
    """There is nothing to put into it."""
    report = holdfast.save(tmp_path, {"step": 3, "empty": torch.zeros(0)}, allow_empty=True)
    assert report.nbytes == 0
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == [
        "fate",
        "manifest.safetensors",
        "telemetry.jsonl.gz",
    ]
    assert difference({"step": 3, "empty": torch.zeros(0)}, holdfast.load(tmp_path)) is None


def accesses(storage: MemoryDriver) -> list[tuple[str, str]]:
    """Return the operations of a save over a checkpoint, except for the last cleanup."""
    seen: list[tuple[str, str]] = []

    async def note(operation: str, key: str) -> None:
        seen.append((operation, key))

    run(save(HookedDriver(storage, before=note), NEW))
    return seen


N_ACCESSES = len(accesses(prepared()))


@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("n", range(N_ACCESSES))
def test_a_save_that_fails_at_any_access_leaves_a_whole_checkpoint(
    n: int, after: bool, for_good: bool
) -> None:
    """The checkpoint is the old or the new one; the next save works."""
    storage = prepared()
    fault = Fault(n, after=after, for_good=for_good)
    failed: holdfast.HoldfastError | None = None
    try:
        run(save(HookedDriver(storage, fault.on_before, fault.on_after), NEW))
    except holdfast.StorageDownError as error:
        failed = error
    assert fault.hit is not None
    found = loaded(storage)["who"]
    if failed is None:
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
    run(save(storage, LAST))
    assert difference(LAST, loaded(storage)) is None
    objects = run(contents(storage))
    left = attempts(storage)
    current = Manifest.decode(objects[MANIFEST_KEY]).attempt
    left.remove(current)
    assert {key.split("/")[2] for key in objects if current in key} == {"0.safetensors", "fate"}
    assert all(objects[f"data/{attempt}/fate"].startswith(b"claim ") for attempt in left)
    assert len(left) <= 2


def test_a_save_that_fails_does_not_wait_for_ever_to_clean_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cleaning up is limited, and the save's own error is raised."""
    clean_up_within(monkeypatch, 0.1)
    storage = prepared()

    async def go_away(operation: str, key: str) -> None:
        if operation == "create":
            raise holdfast.StorageDownError("injected")
        if operation.startswith("delete"):
            await asyncio.sleep(3600)

    run(storage.delete(f"data/{DEAD}/attempt.json"))
    run(storage.delete_all(f"data/{DEAD}"))
    with pytest.raises(holdfast.StorageDownError, match="injected"):
        run(asyncio.wait_for(save(HookedDriver(storage, before=go_away), NEW), 30))
    assert difference(OLD, loaded(storage)) is None
    assert len(attempts(storage)) == 2
    run(save(storage, LAST))
    assert len(attempts(storage)) == 1


def test_a_first_save_that_fails_leaves_no_empty_folder(tmp_path: Path) -> None:
    """Empty folders are removed, files of others are not."""

    async def fail(operation: str, key: str) -> None:
        if operation == "create":
            raise holdfast.StorageDownError("injected")

    async def first() -> None:
        driver = LocalDriver(tmp_path)
        try:
            await save(HookedDriver(driver, before=fail), NEW)
        finally:
            await driver.close()

    for others in ([], [f"data/{DEAD}/fate"]):
        for key in others:
            (tmp_path / key).parent.mkdir(parents=True)
            (tmp_path / key).touch()
        with pytest.raises(holdfast.StorageDownError, match="injected"):
            run(first())
        assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()] == others
        assert (tmp_path / "data").exists() == bool(others)


def test_a_request_that_the_storage_did_twice_does_not_fail_a_save() -> None:
    """A save whose marker already exists takes another attempt."""
    driver, done = MemoryDriver(), list[str]()

    async def twice(operation: str, key: str) -> None:
        if operation == "put" and key.endswith("attempt.json"):
            done.append(key)
            if len(done) == 1:
                await driver.put(key, b"", exclusive=True)

    run(save(HookedDriver(driver, before=twice), NEW))
    assert len(set(done)) == 2
    (attempt,) = attempts(driver)
    files = {f"data/{attempt}/0.safetensors", f"data/{attempt}/fate"}
    assert files == run(contents(driver)).keys() - {MANIFEST_KEY}
    assert difference(NEW, loaded(driver)) is None


def test_a_save_does_not_wait_for_ever_to_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save proceeds if sweeping hangs."""
    clean_up_within(monkeypatch, 0.1)

    async def hang(operation: str, key: str) -> None:
        if operation == "sweep":
            await asyncio.sleep(3600)

    storage = prepared()
    run(asyncio.wait_for(save(HookedDriver(storage, before=hang), NEW), 30))
    assert difference(NEW, loaded(storage)) is None


def without_exclusion(storage: MemoryDriver) -> MemoryDriver:
    """Return the same storage, without atomic exclusive puts."""
    storage.traits = replace(storage.traits, exclusive_is_atomic=False)
    return storage


def test_without_exclusion_nobody_is_sentenced() -> None:
    """Two overlapping savers both commit; the last manifest wins."""
    storage = without_exclusion(prepared())

    async def overtake(operation: str, key: str) -> None:
        if operation == "create":
            await save(storage, LAST)

    dead = len(attempts(storage)) - 1
    run(save(HookedDriver(storage, before=overtake), NEW))
    assert difference(NEW, loaded(storage)) is None
    assert len(attempts(storage)) == 1 + dead


def test_without_exclusion_the_dead_are_collected_once_they_are_long_idle() -> None:
    """Until then they may live."""
    storage = without_exclusion(prepared())
    run(save(storage, NEW))
    assert len(attempts(storage)) == 2
    age(storage, limits.IDLE_S + 60.0)
    run(save(storage, LAST))
    assert len(attempts(storage)) == 1
    assert difference(LAST, loaded(storage)) is None


def test_a_save_that_was_overtaken_is_told_so_and_changes_nothing() -> None:
    """The newer one wins, whether the older is still writing or about to commit."""
    for moment in ("create", "commit"):
        storage = prepared()

        async def overtake(
            operation: str, key: str, moment: str = moment, storage: MemoryDriver = storage
        ) -> None:
            if operation == moment:
                await save(storage, LAST)

        with pytest.raises(holdfast.SupersededError):
            run(save(HookedDriver(storage, before=overtake), NEW))
        assert difference(LAST, loaded(storage)) is None
        assert len(attempts(storage)) == 1


def test_two_saves_of_one_process_to_one_uri_take_turns() -> None:
    """The second save waits for the first; both succeed, and the second one stays."""
    uri = fresh_uri()
    handles = [holdfast.async_save(uri, {"i": i, "x": torch.full((1000,), i)}) for i in range(5)]
    for handle in handles:
        handle.wait(30)
    assert difference({"i": 4, "x": torch.full((1000,), 4)}, holdfast.load(uri)) is None
    assert len(attempts(storage_at(uri))) == 1


def test_what_a_newer_release_wrote_is_not_overwritten() -> None:
    """A manifest of a version that this release does not know is left alone."""
    storage = prepared()
    newer = run(storage.get(MANIFEST_KEY)).replace(rb"\"version\":1", rb"\"version\":9")
    run(storage.put(MANIFEST_KEY, newer[:-16] + digest(newer[:-16])))
    before, there = run(contents(storage)), attempts(storage)
    with pytest.raises(holdfast.UnsupportedFormatError, match="version 9"):
        run(save(storage, NEW))
    after = run(contents(storage))
    assert {k: v for k, v in after.items() if k in before} == before
    assert attempts(storage) == there


def test_strange_files_below_data_are_left_alone(tmp_path: Path) -> None:
    """Only what looks like an attempt is collected."""
    holdfast.save(tmp_path, OLD)
    strange = [
        tmp_path / "data" / "notes.txt",
        tmp_path / "data" / "mine" / "0.safetensors",
        tmp_path / "readme",
        tmp_path / "data" / "20200101T000000-xyz" / "a",
    ]
    for path in strange:
        path.parent.mkdir(exist_ok=True)
        path.write_text("keep")
    holdfast.save(tmp_path, NEW)
    assert [path.read_text() for path in strange] == ["keep"] * 4


def test_after_an_async_save_returns_the_state_may_change(serve: Serve) -> None:
    """All bytes were copied by then: tensors, arrays, and small values."""
    state = {"x": torch.ones(100_000), "a": torch.ones(4).numpy(), "v": [1], "d": {"k": 2}}
    expected = copy.deepcopy(state)
    storage = Halting(serve, "write")
    handle = holdfast.async_save(storage.uri, state)
    assert handle.captured.done()
    state["x"].zero_()
    state["a"][:] = 0
    state["v"][0] = 9
    state["d"].clear()
    assert not handle.done()
    storage.go.set()
    handle.wait(30)
    assert storage.reached.is_set()
    assert difference(expected, holdfast.load(storage.uri)) is None


def test_a_handle_tells_how_far_its_save_is(serve: Serve) -> None:
    """Stages are reached in order; a limited wait names its stage."""
    storage = Halting(serve, "commit")
    handle = holdfast.async_save(storage.uri, {"x": torch.ones(10)})
    assert storage.reached.wait(30)
    handle.sealed.wait(30)
    assert (handle.captured.done(), handle.sealed.done(), handle.done()) == (True, True, False)
    began = time.monotonic()
    with pytest.raises(holdfast.DeadlineError, match="durable"):
        handle.wait(0.1)
    assert time.monotonic() - began < 5
    assert handle.report is None
    storage.go.set()
    report = handle.wait(30)
    assert report is not None
    assert report is handle.report
    assert 0 <= report.captured_s <= report.sealed_s <= report.durable_s


def test_a_handle_can_be_awaited() -> None:
    """So can its stages. The handle returns the report of the save."""

    async def main() -> None:
        handle = holdfast.async_save(fresh_uri(), {"x": torch.ones(10)})
        await handle.captured
        report = await handle
        assert handle.done()
        assert report is not None
        assert report is handle.report is handle.wait()

    asyncio.run(main())


@pytest.mark.parametrize("operation", ["put", "create", "write", "commit"])
def test_what_fails_in_the_background_is_raised_by_wait(
    operation: str, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """Every wait raises the error; it is logged if the call had returned; the next save works."""
    is_full = False

    async def fail(doing: str, key: str) -> None:
        if is_full and doing == operation:
            raise holdfast.FullError("injected")

    uri = serve(lambda path: HookedDriver(MemoryDriver(path), before=fail))
    holdfast.save(uri, OLD)
    is_full = True
    try:
        handle = holdfast.async_save(uri, NEW)
    except holdfast.FullError:
        assert operation in ("put", "create")
    else:
        for _ in range(2):
            with pytest.raises(holdfast.FullError, match="injected"):
                handle.wait(30)
        assert handle.done()
        assert handle.report is None
        assert "injected" in caplog.text
    is_full = False
    assert difference(OLD, holdfast.load(uri)) is None
    holdfast.save(uri, NEW)
    assert difference(NEW, holdfast.load(uri)) is None
