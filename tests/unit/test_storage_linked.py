"""Saves that share files with an earlier checkpoint, by hard links (format version 3)."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import difference
from support.copies import BUDGET_NBYTES, run
from support.drivers import HookedDriver
from support.ranks import as_ranks, succeeded

import holdfast
from holdfast.drivers.contract import Driver
from holdfast.drivers.registry import open_driver
from holdfast.errors import AccessError, NotFoundError, UsageError
from holdfast.planner.image import BLOCK_NBYTES, CHUNK_NBYTES, lay_out
from holdfast.storage.format.extents import WHOLE_IMAGE
from holdfast.storage.format.manifest import MANIFEST_KEY, Manifest
from holdfast.storage.operations.location import Place
from holdfast.storage.operations.saving.save import SaveJob, run_save
from holdfast.storage.pipeline.base import Base
from holdfast.storage.pipeline.borrowing import Incremental
from holdfast.storage.pipeline.linking import EXTENTS_MAX, linked_image
from holdfast.storage.ranks.team import Team
from holdfast.storage.state.flattening.flatten import flatten

BLOCK = BLOCK_NBYTES // 4
"""Elements of a block."""
BLOCKS = 600
"""Blocks of the state: three chunks, the last one short."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield an empty folder in memory: it has hard links, and cannot clone."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def state(seed: int = 0, blocks: int = BLOCKS) -> dict[str, Any]:
    """Return a state that does not end with a whole block."""
    return {"w": torch.randn(blocks * BLOCK + 77, generator=torch.Generator().manual_seed(seed))}


def changed(values: dict[str, Any], blocks: list[int]) -> dict[str, Any]:
    """Return a state in which one element of each of these blocks differs."""
    new = {**values, "w": values["w"].clone()}
    new["w"][torch.tensor(blocks, dtype=torch.int64) * BLOCK + 5] += 1
    return new


def manifest_at(uri: Path) -> Manifest:
    """Return the manifest of a checkpoint."""
    return Manifest.decode((uri / MANIFEST_KEY).read_bytes())


def check(uri: Path, values: dict[str, Any]) -> None:
    """Check that a checkpoint is whole, and holds these values."""
    assert not difference(holdfast.load(uri), values)
    with holdfast.open(uri) as checkpoint:
        assert checkpoint.verify().ok


def space_nbytes(*folders: Path) -> int:
    """Return the bytes of all files in these folders; one with several names counts once."""
    files = {}
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file():
                status = path.stat()
                files[status.st_ino] = status.st_size
    return sum(files.values())


@pytest.mark.parametrize("seed", range(3))
def test_a_run_of_saves_is_whole_whatever_is_deleted(seed: int, folder: Path) -> None:
    """Each save writes the changes; the rest stays in files of earlier saves. Then all but one are
    deleted, in any order."""
    chance = random.Random(seed)
    states = [state(seed)]
    holdfast.save(folder / "0", states[0])
    for step in range(1, 7):
        start = chance.randrange(BLOCKS)
        blocks = list(range(start, min(start + chance.choice([1, 5, 100]), BLOCKS)))
        blocks += [BLOCKS] * chance.choice([0, 1])  # the last block, which is short
        blocks += chance.sample(range(BLOCKS), chance.choice([0, 3, 60]))
        states.append(changed(states[-1], sorted(set(blocks))))
        report = holdfast.save(folder / f"{step}", states[-1], base=folder / f"{step - 1}")
        assert (report.base, report.why_whole) == (f"file://{folder}/{step - 1}", "")
        files = [
            path for path in (folder / f"{step}").rglob("*.blocks") if "lent" not in path.parts
        ]
        padding = sum(path.stat().st_size for path in files) - report.written_nbytes
        assert 0 <= padding < BLOCK_NBYTES
        made = manifest_at(folder / f"{step}")
        assert made.increments == step
        extents = made.extents
        assert extents is not None
        chunks = -(-(BLOCKS + 1) * BLOCK_NBYTES // CHUNK_NBYTES)
        assert len(extents.extent_blocks) <= chunks * EXTENTS_MAX
        for file in made.files:
            assert (folder / f"{step}" / file.key).stat().st_size == file.nbytes
        names = set((folder / f"{step}").rglob("lent/*/*"))
        assert names == {folder / f"{step}" / file.key for file in made.files if "lent" in file.key}
    order = list(range(7))
    chance.shuffle(order)
    for deleted, left in itertools.pairwise(order):
        shutil.rmtree(folder / f"{deleted}")
        check(folder / f"{left}", states[left])


def test_nothing_is_written_if_nothing_has_changed(folder: Path) -> None:
    """The checkpoint consists of links and a manifest."""
    holdfast.save(folder / "1", state())
    for step in (2, 3):
        report = holdfast.save(folder / f"{step}", state(), base=folder / f"{step - 1}")
        assert report.written_nbytes == 0
        assert not list((folder / f"{step}").rglob("*.blocks"))
        check(folder / f"{step}", state())


def test_a_checkpoint_may_replace_its_own_base(folder: Path) -> None:
    """The files that it needs remain."""
    values = state()
    holdfast.save(folder, values)
    for step in range(3):
        values = changed(values, [step])
        assert holdfast.save(folder, values, base=folder).borrowed_nbytes
        assert len(list((folder / "data").iterdir())) == 1
    check(folder, values)


@pytest.mark.parametrize(
    ("blocks", "share", "images"),
    [
        ([range(580, 600)] * 20, 0.0351, 1.4),
        ([range(601)] * 4, 1.001, 3.01),
        ([range(300)] * 8, 0.51, 2.6),
        ([[*range(300), *random.Random(i).sample(range(300, 600), 3)] for i in range(20)], 0.62, 3),
    ],
    ids=["adapter", "everything", "half", "sparse table"],
)
def test_files_do_not_outlive_their_use(
    blocks: list[Any], share: float, images: float, folder: Path
) -> None:
    """Three checkpoints of a long run are retained. They take little more space than one, and each
    save writes little more than the changes."""
    values = state()
    whole = holdfast.save(folder / "0", values).nbytes
    written, space = [], []
    for step, some in enumerate(blocks, 1):
        values = changed(values, list(some))
        report = holdfast.save(folder / f"{step}", values, base=folder / f"{step - 1}")
        written.append(report.written_nbytes / whole)
        if step >= 3:
            shutil.rmtree(folder / f"{step - 3}")
        space.append(space_nbytes(folder) / whole)
    assert np.mean(written) <= share
    assert max(space[len(space) // 2 :]) <= images
    check(folder / f"{len(blocks)}", values)


async def save(driver: Driver, values: Any, base: Path, limits: Incremental | None = None) -> Any:
    """Save with a base, without a process group."""
    job = SaveJob(flatten(values), None, BUDGET_NBYTES)
    job.base = Base(Place.of(base, None).opened, lambda: "", limits or Incremental())
    return await run_save(driver, Team(), job)


@pytest.mark.parametrize("every", [True, False], ids=["all links", "the second one"])
def test_blocks_that_cannot_be_linked_are_written(every: bool, folder: Path) -> None:
    """The base may be deleted meanwhile, or a file may have too many names."""
    values = [state()]
    holdfast.save(folder / "0", values[0])
    for step in (1, 2):
        values.append(changed(values[-1], list(range(step * 100, step * 100 + 10))))
        holdfast.save(folder / f"{step}", values[-1], base=folder / f"{step - 1}")
    links = 0

    async def before(name: str, key: str) -> None:
        nonlocal links
        links += name == "link"
        if name == "link" and (every or links == 2):
            raise AccessError("link failed", uri="file:///x", key=key)

    new = changed(values[-1], [300])
    driver = HookedDriver(open_driver(folder / "3"), before)
    saved = run(save(driver, new, folder / "2"))
    run(driver.inner.close())
    assert links == 3
    assert (saved.borrowed_nbytes == 0) == every
    shutil.rmtree(folder / "0")
    check(folder / "3", new)


def test_limits_bound_lenders_and_chains(folder: Path) -> None:
    """An image borrows from few earlier saves, and only from files that are mostly in use. Every
    n-th save is whole."""
    limits = Incremental(anchor=6, live=0.5, lenders=2)
    values = state()
    whole = []
    with holdfast.Checkpointer(folder, every=1, keep=20, incremental=limits, lazy=False) as run_:
        run_.resume({})
        for step in range(1, 13):
            values = changed(values, list(range(20 * step, 20 * step + 20)))
            handle = run_.step(step, values)
            assert handle is not None
            if handle.wait().why_whole:
                whole.append((step, handle.wait().why_whole))
            run_.wait()
            made = manifest_at(folder / f"step-{step:08}")
            assert made.extents is None or len(made.extents.lenders) <= limits.lenders
    assert whole == [
        (1, "there is no earlier checkpoint"), (7, "one in 6 saves is whole")
    ]  # fmt: skip
    check(folder / "step-00000012", values)


@pytest.mark.parametrize("wrong", [{"anchor": 0}, {"live": 1.5}, {"live": -1.0}, {"lenders": 0}])
def test_limits_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    """The error comes before any save."""
    with pytest.raises(UsageError, match="out of range"):
        Incremental(**wrong)


def test_each_rank_borrows_from_its_own_image(folder: Path) -> None:
    """A rank that cannot borrow saves its image as one file, from which the next save borrows."""
    mine: list[Any] = [{f"w{rank}": state(rank)["w"]} for rank in range(3)]

    def saved(step: int, base: int | None) -> Any:
        jobs = [SaveJob(flatten(one), None, BUDGET_NBYTES) for one in mine]
        for job in jobs:
            if base is not None:
                job.base = Base(Place.of(folder / f"{base}", None).opened, lambda: "")
        driver = open_driver(folder / f"{step}")
        found = succeeded(as_ranks(3, lambda team: run_save(driver, team, jobs[team.rank])))
        run(driver.close())
        return found

    saved(1, None)
    mine[1]["w1"][7 * BLOCK] += 1
    mine[2] = {**mine[2], "new": torch.ones(5 * BLOCK)}
    found = saved(2, 1)
    assert [one.stored_nbytes - one.borrowed_nbytes < 4 * BLOCK_NBYTES for one in found] == [
        True, True, False,
    ]  # fmt: skip
    assert found[2].why_whole == "the image of rank 2 had another layout, or there was none"
    extents = manifest_at(folder / "2").extents
    assert extents is not None
    assert sorted(extents.file_part[extents.file_lender == 0].tolist()) == [0, WHOLE_IMAGE]
    mine[2]["new"][0] = 0
    shutil.rmtree(folder / "1")
    found = saved(3, 2)
    shutil.rmtree(folder / "2")
    assert all(one.stored_nbytes - one.borrowed_nbytes < 4 * BLOCK_NBYTES for one in found)
    with holdfast.open(folder / "3") as checkpoint:
        assert checkpoint.verify().ok
    whole = holdfast.load(folder / "3")
    assert all(torch.equal(whole[name], one[name]) for one in mine for name in one)


@pytest.mark.parametrize("blocks", [BLOCKS - 200, BLOCKS + 200])
def test_an_image_of_another_size_lends_nothing(blocks: int, folder: Path) -> None:
    """This holds wherever its blocks lie."""
    holdfast.save(folder / "0", state())
    holdfast.save(folder / "1", changed(state(), [1]), base=folder / "0")
    new = state(blocks=blocks)
    report = holdfast.save(folder / "2", new, base=folder / "1")
    assert report.why_whole == "the image of rank 0 had another layout, or there was none"
    assert report.borrowed_nbytes == 0
    check(folder / "2", new)


def test_blocks_are_not_left_in_files_without_a_link(folder: Path) -> None:
    """This also holds if they were found equal before the link failed."""
    values = state()
    holdfast.save(folder / "0", values)
    attempt = manifest_at(folder / "0").attempt
    layout = lay_out(
        ["w"], ["float32"], np.array([values["w"].shape]), np.array([1]), np.array([4])
    )

    async def copied() -> None:
        source = open_driver(folder / "0")
        driver = open_driver(folder / "1")
        image = await linked_image(source, attempt, 0, layout, Incremental())
        assert image is not None
        await source.delete(image.key)
        upload = await image.open(driver, "data/1/0.safetensors", layout.nbytes)
        with pytest.raises(NotFoundError, match="not linked"):
            await upload.copy(0, source, image.key, 0, BLOCK_NBYTES)
        await upload.abort()
        await source.close()
        await driver.close()

    run(copied())


@pytest.mark.parametrize("shares", [False, True], ids=["whole", "shares files"])
def test_a_base_that_was_replaced_meanwhile_is_not_borrowed_from(
    shares: bool, folder: Path
) -> None:
    """Its blocks now lie elsewhere."""
    old = state()
    holdfast.save(folder / "0", old)
    holdfast.save(folder / "1", changed(old, [1]), base=folder / "0")
    new = changed(old, [2])

    async def before(name: str, key: str) -> None:
        """Replace the base once the leader has chosen it."""
        if name == "stat" and "data/" in key and not replaced:
            replaced.append(key)
            shutil.rmtree(folder / "1")
            os.rename(folder / "other", folder / "1")

    replaced: list[str] = []
    other = changed(old, [3]) if shares else state(5)
    holdfast.save(folder / "other", other, base=folder / "0" if shares else None)
    base = Place.of(folder / "1", None)

    def opened(key: str) -> Any:
        return _Hooked(base.opened(key), before)

    job = SaveJob(flatten(new), None, BUDGET_NBYTES)
    job.base = Base(opened, lambda: "")
    driver = HookedDriver(open_driver(folder / "2"))
    saved = run(run_save(driver, Team(), job))
    run(driver.inner.close())
    assert replaced
    assert saved.borrowed_nbytes == 0
    check(folder / "2", new)


class _Hooked:
    def __init__(self, opened: Any, before: Any) -> None:
        self._opened = opened
        self._before = before

    async def __aenter__(self) -> Driver:
        return HookedDriver(await self._opened.__aenter__(), self._before)

    async def __aexit__(self, *error: Any) -> None:
        await self._opened.__aexit__(*error)
