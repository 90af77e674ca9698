"""A power cut in the middle of a save over another checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.aftermath import check, check_next_save, some
from support.disks import Disk, new_disk
from support.syscalls import COMMIT, tapped
from support.victims import state_of_step

import holdfast

POINTS = 8


@pytest.fixture(params=["ext4", "xfs"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    """A file system of this kind, mounted."""
    with new_disk(request.param, tmp_path).mounted() as disk:
        yield disk


def save_until_cut(
    disk: Disk, uri: Path, step: int, is_due: Callable[[list[str]], bool]
) -> tuple[list[str], bool]:
    """Save; cut the power before the first call that ``is_due``; return the calls and the success."""
    seen: list[str] = []
    is_cut = False

    def before(number: int, label: str) -> None:
        nonlocal is_cut
        if is_cut:
            return
        if is_due(seen):
            is_cut = True
            disk.cut_power()
        else:
            seen.append(label)

    with tapped(before):
        try:
            holdfast.save(uri, state_of_step(step), budget_nbytes=32 << 20)
        except holdfast.HoldfastError:
            return seen, False
    return seen, True


@pytest.mark.nightly(4)
@pytest.mark.timeout(1800)
def test_after_a_power_cut_the_old_checkpoint_is_there_or_the_new_one(
    disk: Disk, seed: int
) -> None:
    """The old one before the commit begins, the new one once the save has returned."""
    uri = disk.folder / "run" / "c"
    holdfast.save(uri, state_of_step(1))
    calls, well = save_until_cut(disk, uri, 2, lambda before: False)
    assert well
    assert COMMIT in calls
    found, expected = {}, {}
    for at in some(range(1, len(calls) + 3), POINTS, seed):
        old, new = 1000 + at, 2000 + at
        check_next_save(uri, old)
        before, well = save_until_cut(disk, uri, new, lambda before, at=at: len(before) == at - 1)
        disk.restart()
        found[at] = "new" if check(uri, {old, new}) == new else "old"
        expected[at] = "new" if well else found[at] if COMMIT in before else "old"
        check_next_save(uri, 3000 + at)
    print(f"{len(found)} power cuts, at {len(calls) + 2} points")
    assert found == expected
    assert set(found.values()) == {"old", "new"}


def test_a_save_whose_manifest_has_no_durable_name_fails(disk: Disk) -> None:
    """The power goes between the rename of the manifest and the fsync of its folder."""
    uri = disk.folder / "run" / "c"
    holdfast.save(uri, state_of_step(1))
    before, well = save_until_cut(disk, uri, 2, lambda before: before[-1:] == [COMMIT])
    assert (before[-1], well) == (COMMIT, False)
    disk.restart()
    check(uri, {1, 2})
