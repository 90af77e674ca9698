"""Test kill -9 of a copying process: it leaves one whole checkpoint or none, and resumes."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from support.bits import difference
from support.ranks import save_as_ranks
from support.victims import copy_and_die_at, spawned, state_of_step

import holdfast
from holdfast.drivers.local.driver import LocalDriver
from holdfast.storage.runtime.engine import run

WAIT_S = 60.0


def source(folder: Path, nbytes: int) -> Path:
    """A checkpoint of four images."""
    driver = LocalDriver(folder)
    states = [
        {"who": "new", "own": torch.full((nbytes,), rank, dtype=torch.uint8)} for rank in range(4)
    ]
    save_as_ranks(driver, states)
    run(driver.close())
    return folder


def there(uri: Path) -> str:
    """Which checkpoint is there, whole: "new", or the step of the old one, or "none"."""
    try:
        found = holdfast.load(uri)
    except holdfast.NotACheckpointError:
        return "none"
    with holdfast.open(uri) as c:
        assert c.verify().ok
    if "step" in found:
        assert difference(state_of_step(found["step"]), found) is None
        return str(found["step"])
    assert torch.equal(found["own"], torch.zeros_like(found["own"]))
    return str(found["who"])


def whole_images(uri: Path) -> int:
    """Bytes of the images that no manifest names yet, of attempts that nobody has decided on."""
    open_still = [
        a
        for a in (uri / "data").glob("*")
        if (a / "attempt.json").exists() and not (a / "fate").exists()
    ]
    return sum(
        p.stat().st_size
        for a in open_still
        for p in a.glob("*.safetensors")
        if not p.name.startswith(".")
    )


@pytest.mark.nightly(18)
@pytest.mark.parametrize("over", [False, True], ids=["to an empty place", "over another"])
@pytest.mark.timeout(300)
def test_a_copy_killed_before_one_of_its_system_calls(
    tmp_path: Path, over: bool, seed: int
) -> None:
    """The next copy succeeds, and resends no whole image."""
    src, found = source(tmp_path / "src", 5000), []
    for at in itertools.count(1 + seed % 13, 13):
        dst = tmp_path / str(at)
        if over:
            holdfast.save(dst, state_of_step(at))
        process, pipe = spawned(copy_and_die_at, str(src), str(dst), at)
        process.join(WAIT_S)
        if process.exitcode == 0:
            assert pipe.recv() < at
            break
        assert process.exitcode == -9
        found.append(there(dst))
        assert found[-1] in ("new", str(at) if over else "none")
        whole_nbytes = whole_images(dst)
        report = holdfast.copy(src, dst, overwrite=True)
        assert report.nbytes - report.sent_nbytes == (
            report.nbytes if found[-1] == "new" else whole_nbytes
        )
        assert there(dst) == "new"
        assert list(dst.rglob("*.tmp")) == []
    assert there(dst) == "new"
    assert len(found) > 10
