"""Every disk that a power cut could leave of a save."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from support.aftermath import check, check_next_save, some
from support.blockdevice import crash_disks, new_block_device, records
from support.disks import Disk
from support.syscalls import COMMIT, tapped
from support.victims import state_of_step

import holdfast

POINTS = 24
SAVE_AGAIN_EVERY = 8


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_every_disk_that_a_power_cut_leaves_holds_one_whole_checkpoint(
    kind: str, tmp_path: Path, seed: int
) -> None:
    """The old one, the new one, or either; and a save works there."""
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
    points = some(range(first, len(log) + 1), POINTS, seed)
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
