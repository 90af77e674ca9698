"""A run whose file system is unmounted under it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.disks import needed, run

import holdfast

STATE = {"w": torch.arange(9.0)}


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Mount a file system at ``kept``, and bind it to another folder; yield both."""
    needed("mount", "umount")
    kept, point = tmp_path / "kept", tmp_path / "point"
    for folder in (kept, point):
        folder.mkdir()
    try:
        run("mount", "-t", "tmpfs", "tmpfs", kept)
        run("mount", "--bind", kept, point)
    except OSError as error:
        pytest.skip(f"cannot mount here: {error}")
    yield kept, point
    for folder in (point, kept):
        if folder.is_mount():
            run("umount", folder)


@pytest.mark.parametrize("folder", ["", "below/run"])
def test_no_save_goes_to_the_folder_below_a_mount_point(
    mounts: tuple[Path, Path], folder: str
) -> None:
    """Saves fail while the folder is unmounted, and resume once remounted."""
    kept, point = mounts
    with holdfast.Checkpointer(point / folder, every=1, keep=2, grace_s=None) as saving:
        saving.resume(STATE)
        for step in (1, 2, 3):
            saving.step(step, STATE)
            saving.wait()
        run("umount", point)
        handle = saving.step(4, STATE)
        assert handle is not None
        with pytest.raises(holdfast.StorageError, match="unmounted"):
            handle.wait()
        assert list(point.rglob("*")) == []
        run("mount", "-t", "tmpfs", "tmpfs", point)
        run("cp", "-a", f"{kept}/.", point)
        saving.step(5, STATE)
        saving.wait()
        assert (saving.counters.saved, saving.counters.failed) == (4, 1)
    assert [c.step for c in holdfast.list_checkpoints(point / folder)] == [3, 5]
    run("umount", point)
