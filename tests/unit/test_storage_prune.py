"""Pruning deletes checkpoints that no rule retains, and dead leftovers. It never deletes half of a
checkpoint."""

from __future__ import annotations

import itertools
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.bits import difference, flip, fresh_uri, image_in
from support.copies import run, save
from support.drivers import Fault, Hook, HookedDriver, age, contents, nothing, storage_at
from support.given import Serve
from support.inside import clean_up_within

import holdfast
from holdfast.drivers.contract import ObjectInfo
from holdfast.drivers.local.driver import LocalDriver
from holdfast.drivers.memory import MemoryDriver
from holdfast.storage.format.manifest import MANIFEST_KEY
from holdfast.storage.operations import location
from holdfast.storage.operations.maintenance.choice import Rules, choose, chosen_by
from holdfast.storage.operations.maintenance.listing import ListedCheckpoint
from holdfast.storage.protocol import collect, limits
from holdfast.storage.protocol.prune_lock import new_lock

DEAD = "20200101T000000-00000000"


def state(step: int) -> dict[str, Any]:
    """Return a state that contains its step."""
    return {"x": torch.full((100,), float(step)), "step": step}


def saved(root: str, *steps: int) -> str:
    """Save checkpoints in a folder; return the folder."""
    for step in steps:
        holdfast.save(f"{root}/step-{step}", state(step))
    return root


def steps(root: str | Path) -> list[int | None]:
    """Return the steps of the existing checkpoints, which must be intact."""
    listed = holdfast.list_checkpoints(root)
    for c in listed:
        assert c.problem is None
        assert difference(state(c.step or 0), holdfast.load(f"{root}/{c.path}")) is None
    return [c.step for c in listed]


def listed(
    path: str, step: int | None, created_s: float = 0.0, problem: str | None = None
) -> ListedCheckpoint:
    """Return a line of a listing."""
    return ListedCheckpoint(path, step, 1, 1, 1, created_s, problem)


FOLDER = [listed(f"s{step}", step, step) for step in (500, 100, 200, 300, 400)]


def test_what_cannot_be_judged_is_kept() -> None:
    """Checkpoints without a step, unreadable ones, and the one at the URI itself are kept."""
    odd = [listed("a", None), listed("b", 1, problem="damaged"), listed("", 2)]
    assert choose([*odd, *FOLDER], 5, None) == []


def test_what_has_the_latest_time_is_kept_besides() -> None:
    """The latest save is retained, even with a low step."""
    again = [
        listed("s900", 900, 1.0),
        listed("s300", 300, 2.0),
        listed("s200", 200, 0.0),
        listed("", 1, 9.0),
    ]
    choice = run(
        chosen_by(
            location.Place.of(fresh_uri(), None),
            Rules(1, None, abandoned=False, verify=False),
            again,
        )
    )
    assert [c.step for c in choice.gone] == [200]


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 30), st.floats(0, 9)),
        unique_by=lambda c: c[:2],
    ),
    st.integers(1, 5) | st.none(),
    st.integers(1, 7) | st.none(),
)
def test_the_newest_of_a_folder_never_goes(
    members: list[tuple[str, int, float]], last: int | None, every: int | None
) -> None:
    """It has the highest step, regardless of clocks. Others go if no rule retains them."""
    everything = [
        listed(f"{folder}/{step}", step, created_s) for folder, step, created_s in members
    ]
    gone = choose(everything, last, every)
    for folder in {folder for folder, *_ in members}:
        mine = sorted((c for c in everything if c.path[0] == folder), key=lambda c: c.step or 0)
        kept = [c for c in mine if c not in gone]
        assert mine[-1] in kept
        others = [
            c
            for c in kept
            if c not in mine[-(last or 1) :] and (every is None or (c.step or 0) % every)
        ]
        assert not others or last is every is None
        assert set(gone).isdisjoint(mine[-last:] if last else [])


@pytest.mark.parametrize("where", ["memory", "file"])
def test_checkpoints_are_deleted_with_their_folders(where: str, tmp_path: Path) -> None:
    """Pruned checkpoints vanish with their folders; foreign files stay."""
    root = saved(fresh_uri() if where == "memory" else str(tmp_path), 1, 2, 3, 4)
    if where == "file":
        (tmp_path / "step-1" / "notes.txt").write_text("a stranger's")
    report = holdfast.prune(root, keep_last=2)
    assert (report.done, [c.step for c in report.checkpoints]) == (True, [1, 2])
    assert report.kept == ("step-3", "step-4")
    assert report.nbytes > 2000
    assert steps(root) == [3, 4]
    if where == "file":
        (tmp_path / "step-1" / "notes.txt").unlink()
        (tmp_path / "step-1").rmdir()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["step-3", "step-4"]
    assert holdfast.prune(root, keep_last=2).checkpoints == ()


def test_a_dry_run_deletes_nothing() -> None:
    """It reports exactly what would be deleted; so does a prune that the user declines."""
    root = saved(fresh_uri(), 1, 2, 3)
    storage = storage_at(root)
    run(storage.put(f"step-9/data/{DEAD}/attempt.json", b"{}"))
    before = run(contents(storage))
    plan = holdfast.prune(root, keep_last=1, idle_s=0, dry_run=True)
    assert not plan.done
    assert holdfast.prune(root, keep_last=1, idle_s=0, confirm=lambda asked: asked != plan) == plan
    assert run(contents(storage)) == before
    done = holdfast.prune(root, keep_last=1, idle_s=0)
    assert replace(done, done=False) == plan
    after = run(contents(storage))
    assert plan.nbytes == sum(len(data) for data in before.values()) - sum(
        len(data) for data in after.values()
    )


def test_leftovers_are_collected_once_they_are_idle() -> None:
    """A claimed attempt also has a grace period."""
    root = saved(fresh_uri(), 1)
    storage = storage_at(root)
    for where in ("step-1", "step-2"):
        run(storage.put(f"{where}/data/{DEAD}/attempt.json", b"{}"))
        run(storage.put(f"{where}/data/{DEAD}/0.safetensors", bytes(1000)))
    run(storage.put("step-3/data/20200101T000000-11111111/fate", b""))
    assert holdfast.prune(root).leftovers == ()
    report = holdfast.prune(root, idle_s=0)
    assert [(x.path, x.attempt, x.nbytes) for x in report.leftovers] == [
        ("step-1", DEAD, 1002),
        ("step-2", DEAD, 1002),
    ]
    assert not [key for key in run(contents(storage)) if DEAD in key]
    assert steps(root) == [1]
    age(storage, limits.GRACE_S + 60.0)
    assert [x.path for x in holdfast.prune(root, idle_s=0).leftovers] == ["step-3"]
    assert [key for key in run(contents(storage)) if not key.startswith("step-1")] == []


class Coarse(MemoryDriver):
    """A stat reports an earlier time than a list does."""

    async def stat(self, key: str) -> ObjectInfo:
        info = await super().stat(key)
        return replace(info, modified_s=info.modified_s - 1.0)


def test_clocks_of_whole_seconds_keep_nothing_alive(serve: Serve) -> None:
    """A stat may report an earlier time than a list does, as on S3."""
    root = serve(Coarse)
    run(MemoryDriver(root.removeprefix("given://")).put(f"a/data/{DEAD}/attempt.json", b"{}"))
    assert len(holdfast.prune(root, idle_s=0).leftovers) == 1


def test_a_save_under_way_is_spared() -> None:
    """It is spared by default. If it is deleted anyway, it fails and leaves nothing torn."""
    storage, idle_s = MemoryDriver("prune-live"), 24 * 3600.0

    async def prune_meanwhile(operation: str, key: str) -> None:
        if operation == "commit":
            await collect.collect(storage, idle_s)

    run(save(HookedDriver(storage, before=prune_meanwhile), state(1)))
    idle_s = 0.0
    with pytest.raises(holdfast.SupersededError):
        run(save(HookedDriver(storage, before=prune_meanwhile), state(2)))
    assert difference(state(1), holdfast.load("memory://prune-live")) is None


@pytest.mark.parametrize("moment", ["put", "commit"])
def test_a_save_whose_folder_is_removed_says_so(tmp_path: Path, moment: str) -> None:
    """The error does not claim that another save took over, because there is none."""
    folder = tmp_path / "c"
    removed: list[str] = []

    async def remove(operation: str, key: str) -> None:
        if operation == moment and not removed and "data/" in key and folder.exists():
            removed.append(key)
            shutil.rmtree(folder)

    with pytest.raises(holdfast.SaveError, match="deleted while it was in progress"):
        run(save(HookedDriver(LocalDriver(str(folder)), before=remove), state(1)))
    assert removed


def test_a_checkpoint_that_was_saved_anew_is_kept() -> None:
    """Prune deletes the checkpoint that it has examined, or nothing."""
    root = saved(fresh_uri(), 1, 2, 3)
    report = holdfast.prune(root, keep_last=1, confirm=lambda plan: bool(saved(root, 1)))
    assert [c.step for c in report.checkpoints] == [2]
    assert steps(root) == [1, 3]


def hooked(serve: Serve, root: str, before: Hook, after: Hook = nothing) -> str:
    """Return a URI of the same storage, whose operations call ``before`` and ``after``."""
    name = root.removeprefix("memory://")

    def make(location: str) -> HookedDriver:
        below = location.partition("/")[2]
        return HookedDriver(MemoryDriver(f"{name}/{below}".rstrip("/")), before, after)

    return serve(make)


def prepared() -> str:
    """Return a folder with checkpoints and leftovers."""
    root = saved(fresh_uri(), 1, 2, 3)
    run(storage_at(root).put(f"step-2/data/{DEAD}/attempt.json", b"{}"))
    return root


@pytest.mark.nightly(23)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_pruning_that_dies_at_any_access_leaves_whole_checkpoints(
    after: bool, serve: Serve
) -> None:
    """The newest checkpoint always stays, and the next prune finishes."""
    for n in itertools.count():
        root = prepared()
        there = storage_at(root)
        fault = Fault(n, after=after, for_good=True)
        try:
            uri = hooked(serve, root, fault.on_before, fault.on_after)
            holdfast.prune(uri, keep_last=1, idle_s=0)
        except holdfast.StorageDownError:
            assert fault.hit
        if fault.hit is None:
            break
        assert steps(root) in ([1, 2, 3], [2, 3], [3])
        holdfast.prune(root, keep_last=1, idle_s=0)
        assert steps(root) in ([1, 3], [2, 3], [3])
        age(there, limits.GRACE_S + 60.0)
        holdfast.prune(root, keep_last=1, idle_s=0)
        assert steps(root) == [3]
        left = run(contents(there))
        assert {key.split("/")[0] for key in left} == {"step-3"}


def test_the_sign_of_a_pruning_that_died_goes_once_it_is_old() -> None:
    """A stale lock is deleted, wherever it lies."""
    root = saved(fresh_uri(), 1, 2)
    there = storage_at(root)
    signs = {"step-2/data/pruning", "step-7/data/pruning", "data/pruning"}
    for key in signs:
        run(there.put(key, new_lock()))
    run(there.put("mine/data/pruning", b"cut back in May"))
    run(there.put("mine/data/trees/pruning", new_lock()))
    before = run(contents(there))
    holdfast.prune(root, keep_last=2, idle_s=0)
    assert run(contents(there)) == before  # the prune that put it may only be slow
    age(there, limits.GRACE_S + 60.0)
    assert holdfast.prune(root, dry_run=True).nbytes == 0
    assert run(contents(there)) == before
    holdfast.prune(root)
    assert set(before) - set(run(contents(there))) == signs
    assert steps(root) == [1, 2]


def test_a_save_beside_a_pruning_that_died_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A save fails without a write until the lock is stale or removed."""
    root = saved(fresh_uri(), 1)
    there = storage_at(f"{root}/step-1")
    run(there.put("data/pruning", b"0" * 16))
    before = run(contents(there))
    with monkeypatch.context() as patch:
        clean_up_within(patch, 0.05)
        with pytest.raises(holdfast.StorageDownError, match="died doing it") as caught:
            holdfast.save(f"{root}/step-1", state(1))
    assert caught.value.key == "data/pruning"
    assert run(contents(there)) == before
    age(there, limits.GRACE_S + 60.0)
    holdfast.save(f"{root}/step-1", state(1))
    run(there.delete("data/pruning"))
    saved(root, 1)
    assert steps(root) == [1]


def test_a_pruning_that_fails_before_it_deletes_bars_nobody(serve: Serve) -> None:
    """It removes its lock: nothing was or will be deleted."""
    root, flagged = saved(fresh_uri(), 1, 2), list[bool]()

    async def fail(operation: str, key: str) -> None:
        flagged.extend([True] if (operation, key) == ("put", "data/pruning") else [])
        if flagged and operation == "get":
            raise holdfast.AccessError("away")

    report = holdfast.prune(hooked(serve, root, fail), keep_last=1)
    assert (report.checkpoints, report.failed) == ((), {"step-1": "away"})
    assert flagged
    saved(root, 1)
    assert steps(root) == [1, 2]


def test_the_manifest_goes_first(serve: Serve) -> None:
    """No reader finds a checkpoint whose data is being deleted."""
    root, seen = saved(fresh_uri(), 1, 2), list[str]()

    async def note(operation: str, key: str) -> None:
        if operation in ("delete", "delete_all"):
            seen.append(key)

    holdfast.prune(hooked(serve, root, note), keep_last=1)
    assert seen[0] == MANIFEST_KEY
    assert seen[1] == "data/pruning"
    assert seen[2].endswith("/attempt.json")


@pytest.mark.parametrize("wrong", [{"keep_last": 0}, {"keep_every": 0}, {"idle_s": -1.0}], ids=str)
def test_wrong_rules_are_refused(wrong: dict[str, Any]) -> None:
    """Prune refuses a rule that is not positive before it looks at the storage."""
    with pytest.raises(holdfast.UsageError, match=next(iter(wrong))):
        holdfast.prune(fresh_uri(), **wrong)


def damaged_folder(folder: Path, step_of_each: dict[str, int]) -> None:
    """Make checkpoints that are good, flipped in a bit, without their image, and cut short."""
    for name, step in step_of_each.items():
        holdfast.save(folder / name, state(step))
        image = image_in(folder / name)
        if name == "flipped":
            flip(image, 4200)
        elif name == "gone":
            image.unlink()
        elif name == "short":
            os.truncate(image, image.stat().st_size - 1)


def left(folder: Path) -> list[str]:
    """Return the names of the existing checkpoints."""
    return sorted(c.path for c in holdfast.list_checkpoints(folder))


SAME = {"good": 20, "flipped": 20, "gone": 20, "short": 20}
LATER = {"old": 10, "good": 20, "gone": 30, "short": 40}


@pytest.mark.parametrize(
    ("there", "options", "kept"),
    [
        (SAME, {"keep_last": 1, "verify": True}, ["good"]),
        (LATER, {"keep_last": 1}, ["gone", "good", "short"]),
        (LATER, {"keep_every": 40}, ["gone", "good", "short"]),
        ({"good": 10, "flipped": 20}, {"keep_every": 20, "verify": True}, ["flipped", "good"]),
        (
            {"old": 5, "good": 10, "flipped": 20},
            {"keep_last": 1, "verify": True},
            ["flipped", "good"],
        ),
        ({"gone": 10, "short": 20}, {"keep_last": 1}, ["gone", "short"]),
        ({"gone": 10, "short": 20, "good": 30}, {"keep_last": 2}, ["gone", "good", "short"]),
    ],
)
def test_what_is_damaged_does_not_count_as_kept(
    there: dict[str, int], options: dict[str, Any], kept: list[str], tmp_path: Path
) -> None:
    """The only intact checkpoint is never deleted."""
    damaged_folder(tmp_path, there)
    plan = holdfast.prune(tmp_path, dry_run=True, **options)
    assert sorted(plan.kept) == kept
    assert left(tmp_path) == sorted(there)
    report = holdfast.prune(tmp_path, **options)
    assert sorted(report.kept) == kept == left(tmp_path)
    broken = {"gone", "short"} | ({"flipped"} if "verify" in options else set())
    assert set(report.damaged) == broken & set(kept)
    assert {c.path for c in report.checkpoints if c.damage} == broken & (set(there) - set(kept))


def test_an_abandoned_checkpoint_goes_only_beside_a_whole_one(tmp_path: Path) -> None:
    """Otherwise it may be the only one left of the run."""
    with holdfast.Checkpointer(tmp_path, grace_s=None, when_busy="wait") as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state(step))
        ckpt.resume(state(0), step=1)
    image = image_in(tmp_path / "step-00000001")
    whole = image.read_bytes()
    image.unlink()
    assert holdfast.prune(tmp_path, abandoned=True).checkpoints == ()
    image.write_bytes(whole)
    assert [c.step for c in holdfast.prune(tmp_path, abandoned=True).checkpoints] == [2, 3]


def test_a_dry_run_lists_no_attempt_that_may_be_alive() -> None:
    """A dry run lists exactly what would be deleted."""
    root = saved(fresh_uri(), 1)
    storage = storage_at(root)
    run(storage.put(f"step-2/data/{DEAD}/attempt.json", b""))
    assert holdfast.prune(root, dry_run=True).leftovers == holdfast.prune(root).leftovers == ()
    assert len(holdfast.prune(root, dry_run=True, idle_s=0).leftovers) == 1
