"""Test kill -9 of a copy or an import: it leaves one whole checkpoint, and the next one resumes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.aftermath import check_next_save
from support.bits import difference
from support.ranks import save_as_ranks
from support.victims import copy_and_die_at, copy_over, spawned, state_of_step

import holdfast
from holdfast.drivers.local.driver import LocalDriver
from holdfast.storage.runtime.engine import run

WAIT_S = 60.0
MODEL = {f"l{i}": torch.full((12_000,), float(i)) for i in range(6)}


def source(folder: Path, kind: str) -> tuple[Path, dict[str, Any]]:
    """Make a source: a checkpoint of four images, or a model's file. Return its state, too."""
    if kind == "import":
        save_file(MODEL, folder / "model.safetensors")
        return folder / "model.safetensors", MODEL
    states = [{"own": torch.full((5000,), rank, dtype=torch.uint8)} for rank in range(4)]
    driver = LocalDriver(folder / "src")
    save_as_ranks(driver, states)
    run(driver.close())
    return folder / "src", states[0]


def undecided_images(uri: Path) -> dict[Path, int]:
    """Return the images of attempts that nobody has decided on, with their sizes."""
    return {
        image: image.stat().st_size
        for attempt in (uri / "data").iterdir()
        if (attempt / "attempt.json").exists() and not (attempt / "fate").exists()
        for image in attempt.glob("*.safetensors")
        if not image.name.startswith(".")
    }


@pytest.mark.nightly(35)
@pytest.mark.parametrize("kind", ["copy", "import"])
@pytest.mark.timeout(300)
def test_a_copy_killed_before_one_of_its_system_calls(tmp_path: Path, kind: str, seed: int) -> None:
    """A reader finds the old checkpoint or the new one, and the next copy keeps whole images."""
    src, expected = source(tmp_path, kind)
    kept = 0
    for at in itertools.count(1 + seed % 13, 13):
        dst = tmp_path / str(at)
        old = state_of_step(at)
        holdfast.save(dst, old)
        process, pipe = spawned(copy_and_die_at, kind, str(src), str(dst), at)
        process.join(WAIT_S)
        if process.exitcode == 0:
            assert pipe.recv() < at
            break
        assert process.exitcode == -9
        found = holdfast.load(dst)
        is_old = "step" in found
        assert difference(old if is_old else expected, found) is None
        whole = undecided_images(dst)
        unsent_nbytes = copy_over(kind, str(src), str(dst))
        if is_old:
            assert unsent_nbytes == sum(whole.values())
            kept = max(kept, len(whole))
        with holdfast.open(dst) as c:
            assert c.verify().ok
        assert difference(expected, holdfast.load(dst)) is None
        assert list(dst.rglob("*.tmp")) == []
        check_next_save(dst, 1)
    assert kept > 1
