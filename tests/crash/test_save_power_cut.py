"""A power cut in the middle of a save over another checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.aftermath import check
from support.disks import new_disk
from support.syscalls import COMMIT, tapped
from support.victims import state_of_step

import holdfast


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
