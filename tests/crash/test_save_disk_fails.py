"""A disk that fails in the middle of a save over another checkpoint: by a power cut, or by errors."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from support.aftermath import check, check_next_save, some
from support.blockdevice import crash_disks, new_block_device, records
from support.disks import Disk, new_disk
from support.victims import COMMIT, state_of_step, tapped

import holdfast

POINTS_OF_CUTS = 24
SAVE_AGAIN_EVERY = 8
POINTS_OF_ERRORS = 4


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_every_disk_that_a_power_cut_leaves_holds_one_whole_checkpoint(
    kind: str, tmp_path: Path, seed: int
) -> None:
    """It is the old one, the new one, or either. A save works there."""
    committing = 0
    with new_block_device(kind, tmp_path) as device:
        uri = device.disk.folder / "run" / "c"
        holdfast.save(uri, state_of_step(1))
        begin = device.position

        def before(number: int, label: str) -> None:
            nonlocal committing
            if label == COMMIT:
                committing = device.position

        with tapped(before):
            holdfast.save(uri, state_of_step(2), budget_nbytes=32 << 20)
        returned = device.position
        log = records(device.log)
    assert begin < committing < returned
    first = sum(r.position <= begin for r in log)
    points = some(range(first, len(log) + 1), POINTS_OF_CUTS, seed)
    found: set[int] = set()
    folder = tmp_path / "replayed"
    folder.mkdir()
    for n, (point, how, image) in enumerate(
        crash_disks(tmp_path / "before.image", log, points, folder, Random(seed))
    ):
        position = log[point - 1].position
        allowed = {2} if position >= returned else {1} if position <= committing else {1, 2}
        with Disk(image, folder / "mounted").mounted() as disk:
            uri = disk.folder / "run" / "c"
            try:
                found.add(check(uri, allowed))
                if n % SAVE_AGAIN_EVERY == 0:
                    check_next_save(uri, 3)
            except BaseException as error:
                error.add_note(
                    f"{kind}: {how} of what was not flushed after record {point} of "
                    f"{first}..{len(log)}"
                )
                raise
    print(f"{kind}: {n + 1} crash states, at {len(points)} of {len(log) + 1 - first} points")
    assert found == {1, 2}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
@pytest.mark.parametrize("what", ["write", "flush"])
def test_a_device_that_fails_is_an_error_or_did_no_harm(
    what: str, kind: str, tmp_path: Path, seed: int
) -> None:
    """After repair and a new mount, the device has the old checkpoint or the new one, whole."""
    with new_block_device(kind, tmp_path) as device:
        uri = device.disk.folder / "run" / "c"
        holdfast.save(uri, state_of_step(1))
        check_next_save(uri, 1)
        begin = device.position
        holdfast.save(uri, state_of_step(1))
        log = [r for r in records(device.log) if r.position > begin]
        most, raised = sum(r.is_flush == (what == "flush") for r in log), 0
        for n, at in enumerate(some(range(1, most + 1), POINTS_OF_ERRORS, seed)):
            old, new = 1000 + at, 2000 + at
            check_next_save(uri, old)
            device.tell(f"fail {what} {at}" + (" once" if n % 2 else " for good"))
            try:
                holdfast.save(uri, state_of_step(new), budget_nbytes=32 << 20)
                allowed = {new}
            except (
                holdfast.StorageDownError,
                holdfast.AccessError,
                holdfast.NotFoundError,
            ):  # I/O errors, and later errors of a read-only file system
                allowed, raised = {old, new}, raised + 1
            device.tell("work")
            device.disk.mend()
            check(uri, allowed)
            check_next_save(uri, 3000 + at)
        assert raised > 0


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_save_whose_manifest_has_no_durable_name_fails(kind: str, tmp_path: Path) -> None:
    """A power cut between the rename of the manifest and the fsync of its folder fails the save."""
    calls: list[str] = []

    with new_disk(kind, tmp_path).mounted() as disk:
        uri = disk.folder / "run" / "c"
        holdfast.save(uri, state_of_step(1))

        def before(number: int, label: str) -> None:
            if calls[-1:] == [COMMIT]:
                disk.cut_power()
            calls.append(label)

        with tapped(before), pytest.raises(holdfast.HoldfastError):
            holdfast.save(uri, state_of_step(2), budget_nbytes=32 << 20)
        assert COMMIT in calls
        disk.restart()
        check(uri, {1, 2})
