"""Saves that copy unchanged data from an earlier checkpoint of the same storage.

Every such checkpoint is complete: it equals a whole save in every byte, and does not depend on the
checkpoint that it was copied from.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import difference, fresh_uri
from support.copies import BUDGET_NBYTES, run
from support.drivers import HookedDriver
from support.ranks import as_ranks, succeeded

import holdfast
from holdfast.drivers.contract import CopyTraits, Driver
from holdfast.drivers.memory import STORES, MemoryDriver
from holdfast.errors import (
    DamagedError,
    HoldfastError,
    NotFoundError,
    StorageError,
    UsageError,
)
from holdfast.planner.image import BLOCK_NBYTES, CHUNK_NBYTES
from holdfast.storage.operations.location import Place
from holdfast.storage.operations.saving.save import SaveJob, run_save
from holdfast.storage.pipeline.base import Base
from holdfast.storage.pipeline.borrowing import RUN_BLOCKS_MIN, RUNS_MAX, runs_of
from holdfast.storage.ranks.team import Team
from holdfast.storage.state.flattening.flatten import flatten

BLOCK = BLOCK_NBYTES // 4
"""Elements of a block."""
BLOCKS = 700
"""Blocks of the state: three chunks, the last one short."""


def state(seed: int = 0) -> dict[str, Any]:
    """Return a state of a few chunks, which does not end with a whole block."""
    random = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(BLOCKS * BLOCK + 77, generator=random), "note": "a", "step": 1}


def store_of(uri: str) -> dict[str, tuple[bytes, float]]:
    """Return the objects of a URI in memory."""
    return STORES[uri.removeprefix("memory://").partition("/")[0]]


def image_of(uri: str) -> bytes:
    """Return the image of a checkpoint of one rank in memory."""
    prefix = uri.removeprefix("memory://").partition("/")[2]
    (image,) = (
        data
        for key, (data, _) in store_of(uri).items()
        if key.startswith(f"{prefix}/data/") and key.endswith("/0.safetensors")
    )
    return image


def changed(values: dict[str, Any], blocks: list[int]) -> dict[str, Any]:
    """Return a state in which one element of each of these blocks of ``w`` differs."""
    new = {**values, "w": values["w"].clone()}
    for block in blocks:
        new["w"][block * BLOCK + 5] += 1
    return new


def to_write(old: bytes, new: bytes) -> int:
    """Return the number of bytes of an image to write, given the earlier image."""
    end = len(new) // (BLOCK_NBYTES + 16) * BLOCK_NBYTES + len(new) % (BLOCK_NBYTES + 16) - 16
    assert len(old) == len(new)
    count = len(new) - end
    for start in range(0, end, CHUNK_NBYTES):
        cuts = range(start, min(start + CHUNK_NBYTES, end), BLOCK_NBYTES)
        blocks = [slice(cut, min(cut + BLOCK_NBYTES, end)) for cut in cuts]
        equal = np.array([old[block] == new[block] for block in blocks])
        for begin, stop, borrowed in runs_of(equal, whole=False):
            sizes = [block.stop - block.start for block in blocks[begin:stop]]
            count += 0 if borrowed else sum(sizes)
    return count


@pytest.mark.parametrize(
    "blocks",
    [[], [0], [5, 6, 300], [BLOCKS - 1], [10, 13], list(range(0, 256, 5)), list(range(BLOCKS))],
    ids=["nothing", "one", "three", "the last", "close ones", "scattered", "all"],
)
def test_equal_blocks_are_copied_and_all_others_written(blocks: list[int]) -> None:
    """The result equals a whole save in every byte."""
    uri, old = fresh_uri(), state()
    holdfast.save(f"{uri}/1", old)
    new = changed(old, blocks)
    report = holdfast.save(f"{uri}/2", new, base=f"{uri}/1")
    whole = holdfast.save(f"{uri}/3", new)
    assert (report.base, report.why_whole, report.nbytes) == (f"{uri}/1", "", whole.nbytes)
    before, image, expected = (image_of(f"{uri}/{name}") for name in (1, 2, 3))
    assert image == expected
    assert report.written_nbytes == to_write(before, image)
    assert report.borrowed_nbytes + report.written_nbytes == len(image)
    assert not difference(holdfast.load(f"{uri}/2"), new)


def test_a_checkpoint_outlives_the_one_it_has_copied_from() -> None:
    """After all earlier ones are deleted, the last one is still whole."""
    uri, values = fresh_uri(), state()
    holdfast.save(f"{uri}/0", values)
    for step in range(1, 4):
        values = changed(values, [step])
        assert holdfast.save(f"{uri}/{step}", values, base=f"{uri}/{step - 1}").borrowed_nbytes
        store = store_of(uri)
        for key in [key for key in store if key.startswith(f"{step - 1}/")]:
            del store[key]
    with holdfast.open(f"{uri}/3") as checkpoint:
        assert checkpoint.verify().ok
    assert not difference(holdfast.load(f"{uri}/3"), values)


def test_a_checkpoint_may_replace_its_own_base() -> None:
    """The base stays until the new one is committed."""
    uri, old = fresh_uri(), state()
    holdfast.save(uri, old)
    new = changed(old, [3])
    report = holdfast.save(uri, new, base=uri)
    assert report.borrowed_nbytes > report.written_nbytes
    assert not difference(holdfast.load(uri), new)


def other_layout(uri: str) -> None:
    """Save a state with one additional tensor."""
    holdfast.save(uri, {**state(), "more": torch.zeros(BLOCK)})


def compressed(uri: str) -> None:
    """Save with compression."""
    holdfast.save(uri, state(), compression="lz4")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda uri: None, "the earlier checkpoint is gone"),
        (other_layout, "the image of rank 0 had another layout, or there was none"),
        (compressed, "the earlier checkpoint is compressed"),
    ],
    ids=["none", "another layout", "compressed"],
)
def test_without_a_usable_base_everything_is_written(make: Callable[[str], None], why: str) -> None:
    """The report gives the reason."""
    uri = fresh_uri()
    make(f"{uri}/1")
    report = holdfast.save(f"{uri}/2", state(), base=f"{uri}/1")
    assert (report.borrowed_nbytes, report.why_whole) == (0, why)
    assert not difference(holdfast.load(f"{uri}/2"), state())


def test_storage_that_cannot_copy_gets_whole_checkpoints() -> None:
    """A base on other storage does not help either."""
    uri, elsewhere = fresh_uri(), fresh_uri()
    holdfast.save(elsewhere, state())
    report = holdfast.save(uri, state(), base=elsewhere)
    assert report.borrowed_nbytes == 0
    assert report.why_whole == f"this storage cannot copy from {elsewhere}"


def test_compression_excludes_a_base(tmp_path: Any) -> None:
    """The combination is refused before any I/O."""
    with pytest.raises(UsageError, match="incremental save with compression='lz4'"):
        holdfast.save(tmp_path, {"a": torch.ones(2)}, base=tmp_path, compression="lz4")
    with pytest.raises(UsageError, match="incremental save with compression='lz4'"):
        holdfast.Checkpointer(tmp_path, incremental=True, compression="lz4")
    assert not list(tmp_path.iterdir())


async def save(driver: Driver, values: Any, base: str = "") -> Any:
    """Save as a job of one rank."""
    job = SaveJob(flatten(values), None, BUDGET_NBYTES)
    job.base = Base(Place.of(base, None).opened, lambda: "") if base else None
    return await run_save(driver, Team(), job)


@pytest.mark.parametrize("spoilt", range(4))
def test_a_base_that_vanishes_during_the_save_costs_only_time(spoilt: int) -> None:
    """The save writes what it cannot copy, at whichever copy it notices."""
    uri, old = fresh_uri(), state()
    holdfast.save(f"{uri}/1", old)
    new = changed(old, [0, 200, 500])
    store = store_of(uri)
    copies = 0

    async def vanish(operation: str, key: str) -> None:
        nonlocal copies
        copies += operation == "copy"
        if copies == spoilt + 1:
            for name in [name for name in store if name.startswith("1/data/")]:
                del store[name]

    to = MemoryDriver(f"{uri.removeprefix('memory://')}/2")
    saved = run(save(HookedDriver(to, before=vanish), new, f"{uri}/1"))
    assert saved.borrowed_nbytes > 0 or spoilt == 0
    assert not difference(holdfast.load(f"{uri}/2"), new)


@pytest.mark.parametrize("kind", [StorageError, DamagedError, NotFoundError])
def test_copies_that_fail_are_written_instead(kind: type[HoldfastError]) -> None:
    """This holds for any error, also if the base is cut short. A failed copy leaves nothing."""
    uri, old = fresh_uri(), state()
    holdfast.save(f"{uri}/1", old)

    async def fail(operation: str, key: str) -> None:
        if operation == "copy":
            raise kind("no copies today", uri=uri, key=key)

    to = MemoryDriver(f"{uri.removeprefix('memory://')}/2")
    assert run(save(HookedDriver(to, before=fail), old, f"{uri}/1")).borrowed_nbytes == 0
    assert not difference(holdfast.load(f"{uri}/2"), old)


def test_storage_with_large_copies_only_copies_whole_chunks() -> None:
    """S3 is such storage: a part has at least 5 MiB."""

    class Large(MemoryDriver):
        def __init__(self, location: str) -> None:
            super().__init__(location)
            self.traits = replace(self.traits, copies=CopyTraits(min_nbytes=5 << 20))

    uri, old = fresh_uri(), state()
    holdfast.save(f"{uri}/1", old)
    to = Large(f"{uri.removeprefix('memory://')}/2")
    new = changed(old, [300])
    saved = run(save(to, new, f"{uri}/1"))
    assert 0 < saved.borrowed_nbytes <= saved.nbytes - CHUNK_NBYTES
    assert not difference(holdfast.load(f"{uri}/2"), new)


def test_each_rank_borrows_from_its_own_image() -> None:
    """A rank without a base writes its image; both kinds form one checkpoint."""
    uri = fresh_uri()
    location = uri.removeprefix("memory://")
    mine = [{f"w{rank}": state(rank)["w"]} for rank in range(3)]
    base = Base(Place.of(f"{uri}/1", None).opened, lambda: "")

    def saved(name: str, states: list[Any], *, borrows: bool) -> Any:
        jobs = [SaveJob(flatten(one), None, BUDGET_NBYTES) for one in states]
        for job in jobs:
            job.base = base if borrows else None
        driver = MemoryDriver(f"{location}/{name}")
        return succeeded(as_ranks(3, lambda team: run_save(driver, team, jobs[team.rank])))

    saved("1", mine, borrows=False)
    mine[1] = changed({"w": mine[1]["w1"]}, [7])
    mine[1] = {"w1": mine[1]["w"]}
    mine[2] = {**mine[2], "new": torch.ones(5 * BLOCK)}
    found = saved("2", mine, borrows=True)
    written = [one.stored_nbytes - one.borrowed_nbytes for one in found]
    assert written[0] < written[1] < BLOCK_NBYTES * 4
    assert found[2].borrowed_nbytes == 0
    assert found[2].why_whole == "the image of rank 2 had another layout, or there was none"
    whole = holdfast.load(f"{uri}/2")
    assert all(torch.equal(whole[name], one[name]) for one in mine for name in one)


def steps_of(uri: str, runs: list[tuple[int | None, list[int]]], *, anew: bool) -> list[str]:
    """Save steps after each resume, by one Checkpointer or by one per resume. Return the steps of
    the bases."""
    values, bases = state(), []
    with contextlib.ExitStack() as opened:
        run_: holdfast.Checkpointer | None = None
        for resumed, steps in runs:
            if anew or run_ is None:
                opened.close()
                made = holdfast.Checkpointer(uri, every=1, incremental=True, lazy=False, keep=4)
                run_ = opened.enter_context(made)
            run_.resume(values, step=resumed)
            for step in steps:
                values["w"][step * BLOCK] += 1
                handle = run_.step(step, values)
                assert handle is not None
                bases.append(handle.wait().base.rpartition("/")[2].removeprefix("step-0000000"))
                run_.wait()
                assert not difference(holdfast.load(f"{uri}/step-{step:08}"), values)
    return bases


@pytest.mark.parametrize("anew", [True, False])
def test_a_run_borrows_from_its_newest_checkpoint(anew: bool) -> None:
    """This also holds after a resume. It never borrows from an abandoned one."""
    runs = [(None, [1, 2, 3]), (3, [4]), (2, [3]), (1, [2, 3])]
    assert steps_of(fresh_uri(), runs, anew=anew) == ["", "1", "2", "3", "2", "1", "2"]


def test_a_run_does_not_borrow_from_a_save_that_has_failed(tmp_path: Any) -> None:
    """It borrows from the checkpoint before the failed save."""
    values = state()
    (tmp_path / "step-00000002").write_text("in the way")
    with holdfast.Checkpointer(tmp_path, every=1, incremental=True) as run_:
        run_.resume(values)
        for step in (1, 2):
            run_.step(step, values)
            run_.wait()
        assert run_.counters.failed == 1
        handle = run_.step(3, values)
        assert handle is not None
        report = handle.wait()
    assert (report.base, report.why_whole) == (f"{tmp_path.as_uri()}/step-00000001", "")


def test_a_run_borrows_from_the_checkpoint_that_it_has_resumed(tmp_path: Any) -> None:
    """The name of that checkpoint need not contain its step."""
    steps_of(str(tmp_path), [(None, [1, 2])], anew=True)
    (tmp_path / "step-00000002").rename(tmp_path / "best")
    assert steps_of(str(tmp_path), [(None, [3])], anew=True) == ["best"]


@pytest.mark.parametrize("seed", range(30))
def test_runs_cover_all_blocks_in_order(seed: int) -> None:
    """Borrowed and written runs alternate. Borrowed ones are equal, and long enough."""
    random = np.random.default_rng(seed)
    equal = random.random(random.integers(1, 257)) < random.choice([0.0, 0.5, 0.9, 0.99, 1.0])
    for whole in (False, True):
        runs = runs_of(equal, whole=whole)
        assert [begin for begin, _, _ in runs] == [0, *(end for _, end, _ in runs[:-1])]
        assert runs[-1][1] == len(equal)
        assert sum(borrowed for _, _, borrowed in runs) <= (1 if whole else RUNS_MAX)
        for begin, end, borrowed in runs:
            assert not borrowed or equal[begin:end].all()
            assert not borrowed or end - begin >= min(RUN_BLOCKS_MIN, len(equal))
        flags = [borrowed for _, _, borrowed in runs]
        assert all(one != other for one, other in itertools.pairwise(flags))
