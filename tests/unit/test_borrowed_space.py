"""Commands that handle shared files of checkpoints: the owner of bytes, the space that a deletion
frees, and the checkpoints that damage affects."""

from __future__ import annotations

import itertools
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import difference, flip, fresh_uri
from support.commands import run, run_json
from support.copies import run as drive
from support.drivers import Fault, Hook, HookedDriver, age, contents, storage_at
from support.given import Serve
from support.lending import save_borrowing, save_whole, tiny_borrowed
from support.tiny import state_of

import holdfast
from holdfast.drivers.memory import STORES
from holdfast.drivers.registry import open_driver
from holdfast.planner.image import BLOCK_NBYTES
from holdfast.storage.format.manifest import MANIFEST_KEY, Manifest
from holdfast.storage.pipeline.verifier import is_damaged_at
from holdfast.storage.protocol import limits

BLOCK = BLOCK_NBYTES // 4
"""Elements of a block."""
STEPS = (1, 2, 3, 4)
NAMES = [f"step-{step:08d}" for step in STEPS]


def state(step: int) -> dict[str, Any]:
    """Return a state of 40 blocks; each step changes three of them, some again."""
    x = torch.arange(40.0 * BLOCK)
    for number in range(2, step + 1):
        x[[5 * BLOCK, 4 * number * BLOCK, (4 * number + 1) * BLOCK]] += number
    return {"x": x, "step": step}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Save a run of four steps. The first is whole; each other one borrows from the previous."""
    save_whole(tmp_path / NAMES[0], [state(1)], 1)
    for before, name, step in zip(NAMES, NAMES[1:], STEPS[1:], strict=False):
        save_borrowing(tmp_path / name, [state(step)], tmp_path / before, step)
    return tmp_path


def used_nbytes(folder: Path) -> int:
    """Return the bytes of all files, by inode."""
    stats = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return sum({stat.st_ino: stat.st_size for stat in stats}.values())


def manifest_of(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint."""
    return Manifest.decode((folder / MANIFEST_KEY).read_bytes())


def test_own_and_borrowed_bytes_are_shown(root: Path) -> None:
    """Lenders are named by their folders, or by their attempts once these are gone."""
    own = {c.path: c.own_nbytes for c in holdfast.list_checkpoints(root)}
    for name in NAMES[1:]:
        files = root.glob(f"{name}/data/*/*.blocks")
        assert own[name] == sum(path.stat().st_size for path in files) < own[NAMES[0]] / 10
    entry = run_json("ls", root)["checkpoints"][-1]
    assert (entry["own_nbytes"], entry["stored_nbytes"]) == (own[NAMES[3]], own[NAMES[0]])
    shown = run("show", root / NAMES[3], "--depth", "0").stdout
    assert "borrowed 92.5 % of 2.50 MiB: 82.5 % step-00000001, 4.99 % step-0000000" in shown
    assert "(3 files); own 193 KiB" in shown
    told = run_json("show", root / NAMES[3])
    lenders = {lender["path"]: lender["attempt"] for lender in told["lenders"]}
    assert sorted(lenders) == NAMES[:3]
    assert told["own_nbytes"] + sum(x["nbytes"] for x in told["lenders"]) == own[NAMES[0]]
    shutil.rmtree(root / NAMES[0])
    assert f"82.5 % {lenders[NAMES[0]]}" in run("show", root / NAMES[3]).stdout
    assert "borrowed" not in run("show", root / NAMES[1], "--depth", "0").stdout.split("\n\n")[1]


def test_du_counts_each_file_once(root: Path) -> None:
    """The sum equals that of the file system. Unused parts of files do not count as live."""
    told = run_json("du", root)
    assert told["nbytes"] == used_nbytes(root)
    held = sorted((group["path"], group["held_by"]) for group in told["groups"])
    alone = [(name, [name]) for name in NAMES[2:]]  # blocks that change in every step
    assert held == sorted([*((name, NAMES[i:]) for i, name in enumerate(NAMES[:3])), *alone])
    assert all(group["nbytes"] == group["live_nbytes"] for group in told["groups"])
    for name in NAMES[:3]:
        shutil.rmtree(root / name)
    told = run_json("du", root)
    lent = manifest_of(root / NAMES[3]).lent_nbytes
    groups = {group["attempt"]: group for group in told["groups"]}
    assert told["nbytes"] == used_nbytes(root)
    assert {a: g["live_nbytes"] for a, g in groups.items() if g["path"] is None} == lent
    assert sum(g["live_nbytes"] < g["nbytes"] for g in groups.values()) == 2
    assert "step-00000004" in run("du", root).stdout


def test_du_of_storage_without_links_has_sizes() -> None:
    """Copies within the storage count as separate files. Without a checkpoint the status is 1."""
    uri = fresh_uri()
    assert "no checkpoint" in run("du", uri, status=1).stderr
    for step in (1, 2):
        holdfast.save(f"{uri}/{step}", state(step), base=f"{uri}/1" if step > 1 else None)
    store = STORES[uri.removeprefix("memory://").partition("/")[0]]
    told = run_json("du", uri)
    assert told["nbytes"] == sum(len(data) for data, _ in store.values())
    assert [group["held_by"] for group in told["groups"]] in ([["1"], ["2"]], [["2"], ["1"]])


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_prune_tells_in_advance_what_becomes_free(kept: int, root: Path) -> None:
    """The figures of a dry run equal those of the prune, and of the file system."""
    unfinished = root / NAMES[0] / "data" / "20200101T000000-00000000"
    (lent,) = (root / NAMES[3]).glob("data/*/lent/*/0.safetensors")
    writer = lent.parent.name
    (unfinished / "lent" / writer).mkdir(parents=True)
    (unfinished / "lent" / writer / "0.safetensors").hardlink_to(lent)
    rules = ("--keep-last", str(kept), "--idle-hours", "0")
    plan, before = run_json("prune", root, *rules, "--dry-run"), used_nbytes(root)
    shown = run("prune", root, *rules, "-y").stdout
    assert f"stay, shared with {', '.join(NAMES[-kept:])}\n" in shown
    assert plan["shared"]["paths"] == NAMES[-kept:]
    assert before - used_nbytes(root) == plan["nbytes"] > 0
    assert plan["shared"]["nbytes"] > 40 * BLOCK_NBYTES


def test_a_compacted_checkpoint_shares_nothing(root: Path) -> None:
    """It keeps its contents and its place. Others keep their files and their contents."""
    interrupted = root / NAMES[2]

    def stop(done_nbytes: int, total_nbytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        holdfast.compact(interrupted, progress=stop)
    assert difference(holdfast.load(interrupted), state(3)) is None
    assert run("compact", interrupted).stdout.startswith("compacted: ")
    assert not list(interrupted.rglob("lent"))
    assert manifest_of(interrupted).version == 1
    assert "nothing to send" in run("compact", interrupted).stdout
    assert len(list((interrupted / "data").iterdir())) == 1
    for name, step in zip(NAMES, STEPS, strict=True):
        assert difference(holdfast.load(root / name), state(step)) is None
    before = sorted(root.rglob("*"))
    (lent,) = (root / NAMES[3]).glob("data/*/lent/*/0.safetensors")
    flip(lent, 30 * BLOCK_NBYTES)
    with pytest.raises(holdfast.DamagedError):
        holdfast.compact(root / NAMES[3])
    assert sorted(path for path in root.rglob("*") if path.is_file()) == [
        p for p in before if p.is_file()
    ]


def hooked(uri: str, hooks: tuple[Hook, Hook], _: str) -> HookedDriver:
    """Return a driver of the storage at ``uri`` that calls these before and after operations."""
    return HookedDriver(storage_at(uri), *hooks)


@pytest.mark.nightly(6)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_compaction_that_dies_at_any_access_leaves_a_whole_checkpoint(
    after: bool, serve: Serve
) -> None:
    """The state is never lost, and the next compaction finishes."""
    files = tiny_borrowed()
    for n in itertools.count():
        uri, fault = fresh_uri(), Fault(n, after=after, for_good=True)
        there = storage_at(uri)
        for key, data in files.items():
            drive(there.put(key, data))
        try:
            hooks = (fault.on_before, fault.on_after)
            holdfast.compact(serve(partial(hooked, uri, hooks)))
        except holdfast.StorageDownError:
            assert fault.hit
        if fault.hit is None:
            break
        assert difference(holdfast.load(uri), state_of(0)) is None
        age(there, limits.GRACE_S + 60.0)
        holdfast.compact(uri)
        holdfast.prune(uri, idle_s=0)  # the first one may have died just after its commit
        assert difference(holdfast.load(uri), state_of(0)) is None
        assert not [key for key in drive(contents(there)) if "/lent/" in key]
    assert n > 20


def test_verify_names_shared_damage_once(root: Path) -> None:
    """The line names the checkpoints that use the damaged bytes, not all that hold the file."""
    (lender,) = (root / NAMES[0]).glob("data/*/0.safetensors")
    flip(lender, 30 * BLOCK_NBYTES)
    flip(lender, 12 * BLOCK_NBYTES)  # replaced in step 3
    key = lender.relative_to(root).as_posix()
    (root / "step-00000009").mkdir()
    (root / "step-00000009" / MANIFEST_KEY).write_bytes(b"torn")
    found = run_json("verify", root, status=1)["damages"]
    assert [(d["key"], d["start"] // BLOCK_NBYTES, d["checkpoints"]) for d in found] == [
        (key, 12, NAMES[:2]),
        (key, 30, NAMES),
        ("step-00000009", 0, ["step-00000009"]),
    ]
    shown = run("verify", root, status=1).stdout
    assert f"tensors: x; shared by {', '.join(NAMES)}\n" in shown
    assert "shared by" not in run("verify", root / NAMES[3], status=1).stdout
    run("verify", root / "nothing", status=2)


@pytest.mark.parametrize("how", ["flipped", "missing"])
@pytest.mark.parametrize("repaired", [False, True])
def test_resume_loads_no_two_steps_with_one_dead_file(
    how: str, repaired: bool, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It skips all steps but the first, unless their copy of the file is intact."""
    first, *links = sorted(root.rglob("0.safetensors"))
    data = first.read_bytes()
    flip(first, 30 * BLOCK_NBYTES)
    for path in links if how == "missing" else []:
        path.unlink()
    for path in [first, *(path for path in links if repaired and NAMES[2] in path.parts)]:
        path.unlink(missing_ok=True)
        path.write_bytes(data)
    into = state(0)
    expected = 3 if repaired else 1
    with holdfast.Checkpointer(root) as ckpt:
        assert ckpt.resume(into) == expected
    assert difference(into, state(expected)) is None
    assert caplog.text.count("trying the previous one:") == 1
    assert caplog.text.count("in the same place") == (0 if repaired else 2)


@pytest.mark.parametrize("position", [0, 30 * BLOCK_NBYTES + 5, 39 * BLOCK_NBYTES, -1])
def test_the_chunk_or_page_at_a_place_is_checked(position: int, root: Path) -> None:
    """Damage of the data and of its stored digests is found from any place in the image."""
    m = manifest_of(root / NAMES[0])
    position %= int(m.images.nbytes(m.block_nbytes)[0])
    driver = open_driver(root / NAMES[0])
    assert not drive(is_damaged_at(driver, m, 0, position))
    flip(root / NAMES[0] / m.image_key(0), position)
    assert drive(is_damaged_at(driver, m, 0, position))
    assert not drive(is_damaged_at(driver, m, 7, position))
    drive(driver.close())
