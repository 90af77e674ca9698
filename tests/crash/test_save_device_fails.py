"""A device that fails in the middle of a save, once or for good."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.aftermath import check, check_next_save, some
from support.blockdevice import BlockDevice, new_block_device, records
from support.victims import state_of_step

import holdfast

POINTS = 4


@pytest.fixture(params=["ext4", "xfs"])
def device(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlockDevice]:
    """A device with a file system of this kind."""
    with new_block_device(request.param, tmp_path) as device:
        yield device


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("what", ["write", "flush"])
def test_a_device_that_fails_is_an_error_or_did_no_harm(
    device: BlockDevice, what: str, seed: int
) -> None:
    """Mended and mounted again, it has the old checkpoint or the new one, whole."""
    uri = device.disk.folder / "run" / "c"
    holdfast.save(uri, state_of_step(1))
    check_next_save(uri, 1)
    begin = device.position
    holdfast.save(uri, state_of_step(1))
    log = [r for r in records(device.log) if r.position > begin]
    most, raised = sum(r.is_flush == (what == "flush") for r in log), 0
    for n, at in enumerate(some(range(1, most + 1), POINTS, seed)):
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
        ):  # I/O errors; and then it is read-only
            allowed, raised = {old, new}, raised + 1
        device.tell("work")
        device.disk.mend()
        check(uri, allowed)
        check_next_save(uri, 3000 + at)
    assert raised > 0
