"""Test saves to disks that are full."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.aftermath import check, check_next_save, some
from support.disks import new_disk, run, take, tmpfs
from support.victims import save_with_file_limits, spawned, state_of_step

import holdfast
from holdfast.drivers.local.driver import LocalDriver

WAIT_S = 120.0
POINTS = 8
ROOM_NBYTES = 3 << 20


def save_nbytes(uri: Path) -> int:
    """Return the bytes on disk of a checkpoint."""
    return sum(path.stat().st_blocks * 512 for path in uri.rglob("*"))


def explore(
    uri: Path,
    leave: Callable[[int], None],
    seed: int,
    step_nbytes: int,
    spare_nbytes: int,
    compression: Any = None,
) -> dict[int, bool]:
    """Save with growing room, from none to enough; ``leave(n)`` leaves n bytes."""
    holdfast.save(uri, state_of_step(1), compression=compression)
    most, outcome = save_nbytes(uri) + spare_nbytes, {}
    check_next_save(uri, 1)
    for free in some(range(0, most, step_nbytes), POINTS, seed):
        leave(free)
        try:
            holdfast.save(uri, state_of_step(2), budget_nbytes=32 << 20, compression=compression)
        except holdfast.FullError as error:
            assert "Free some space" in str(error)
            outcome[free] = False
            check(uri, {1})
        else:
            outcome[free] = True
            check(uri, {2})
        leave(-1)
        check_next_save(uri, 1)
    return outcome


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "nbytes"), [("ext4", 16 << 20), ("xfs", 300 << 20)])
def test_a_disk_runs_full_at_any_byte(kind: str, nbytes: int, tmp_path: Path, seed: int) -> None:
    """Another file takes all of the disk except a few bytes."""
    with new_disk(kind, tmp_path, nbytes).mounted() as disk:
        uri, other = disk.folder / "c", disk.folder / "other"

        def leave(free: int) -> None:
            other.unlink(missing_ok=True)
            if free >= 0:
                run("sync", "-f", disk.folder)
                room = os.statvfs(disk.folder)
                take(other, max(1, room.f_bavail * room.f_frsize - free))
            run("sync", "-f", disk.folder)

        outcome = explore(uri, leave, seed, 16384, 3 << 20)
        assert set(outcome.values()) == {False, True}


@pytest.mark.timeout(900)
def test_a_limit_of_file_size_is_met_at_any_byte(tmp_path: Path, seed: int) -> None:
    """The limit is ``ulimit -f``. It may also cut a write in two."""
    uri = tmp_path / "c"
    holdfast.save(uri, state_of_step(1))
    largest = max(path.stat().st_size for path in uri.rglob("*"))
    limits = some(range(0, largest + 4096, 1021), POINTS, seed)
    process, pipe = spawned(save_with_file_limits, str(uri), 2, limits)
    assert pipe.poll(WAIT_S + len(limits))
    outcomes = pipe.recv()
    process.join(WAIT_S)
    assert [isinstance(error, holdfast.FullError) for _, error in outcomes] == [
        limit < largest for limit in limits
    ]
    assert all("ulimit -f" in str(error) for _, error in outcomes if error is not None)
    assert all(step == (1 if error else 2) for step, error in outcomes)
    check(uri, {1})
    check_next_save(uri, 3)


def test_no_inode_is_left(tmp_path: Path) -> None:
    """A save fails cleanly if there is room, but no inode."""
    with tmpfs(tmp_path / "small", ROOM_NBYTES) as folder:
        uri = folder / "c"
        holdfast.save(uri, state_of_step(1))
        found = os.statvfs(folder)
        for spare in range(6):
            run("mount", "-o", f"remount,nr_inodes={found.f_files - found.f_ffree + spare}", folder)
            with pytest.raises(holdfast.FullError, match="inodes"):
                holdfast.save(uri, state_of_step(2))
            check(uri, {1})
            run("mount", "-o", "remount,nr_inodes=1000", folder)
        check_next_save(uri, 3)


FREE_NBYTES, IMAGE_NBYTES = 8 << 20, 16 << 20


@contextlib.contextmanager
def nearly_full(kind: str, tmp_path: Path) -> Iterator[Path]:
    """Mount a file system with room for half an image."""
    if kind == "tmpfs":
        with tmpfs(tmp_path / "small", FREE_NBYTES) as folder:
            yield folder
        return
    with new_disk(kind, tmp_path, {"ext4": 64 << 20, "xfs": 300 << 20}[kind]).mounted() as disk:
        room = os.statvfs(disk.folder)
        take(disk.folder / "other", room.f_bavail * room.f_frsize - FREE_NBYTES)
        yield disk.folder


@pytest.mark.parametrize("direct", ["auto", "off"])
@pytest.mark.parametrize("kind", ["ext4", "xfs", "tmpfs"])
def test_an_image_that_has_no_room_fails_before_its_first_byte(
    kind: str, direct: str, tmp_path: Path
) -> None:
    """The error says how much is needed and how much is free, and nothing is left."""

    async def work(folder: Path) -> None:
        driver = LocalDriver(folder / "run", direct=direct)
        with pytest.raises(
            holdfast.FullError,
            match=r"takes 16,777,216 bytes, [78],\d{3},\d{3} are free.*Free some space",
        ):
            await driver.create("image", IMAGE_NBYTES)
        assert [path for path in (folder / "run").rglob("*") if path.is_file()] == []
        upload = await driver.create("image", FREE_NBYTES // 2)
        await upload.write(0, memoryview(bytes(FREE_NBYTES // 2)))
        await upload.commit()
        assert (await driver.stat("image")).nbytes == FREE_NBYTES // 2
        await driver.close()

    with nearly_full(kind, tmp_path) as folder:
        asyncio.run(work(folder))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["ext4", "tmpfs"])
def test_a_checkpoint_that_compresses_is_saved_where_it_has_room(kind: str, tmp_path: Path) -> None:
    """Uncompressed it fails at once, as it is too large; compressed it is saved."""
    state = {"zeros": torch.zeros(IMAGE_NBYTES // 4)}
    with nearly_full(kind, tmp_path) as folder:
        with pytest.raises(holdfast.FullError, match="are free"):
            holdfast.save(folder / "run", state)
        holdfast.save(folder / "run", state, compression="lz4")
        assert torch.equal(holdfast.load(folder / "run")["zeros"], state["zeros"])


def test_room_that_two_take_is_not_given_twice(tmp_path: Path) -> None:
    """On ext4, reserved space is not available to a second upload."""

    async def work(folder: Path) -> None:
        driver = LocalDriver(folder)
        first = await driver.create("a", 5 << 20)
        with pytest.raises(holdfast.FullError, match="are free"):
            await driver.create("b", 5 << 20)
        await first.abort()
        await (await driver.create("b", 5 << 20)).abort()
        await driver.close()

    with nearly_full("ext4", tmp_path) as folder:
        asyncio.run(work(folder))
